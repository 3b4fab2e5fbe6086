"""The nano suite: seeded tasks with one right answer, small enough to be learnt on a laptop.

The families mirror the paper's benchmarks and show what free order is good for:

    word        word problems of 2-4 steps, worked out a step a line, `#### 43` at the end   (GSM8K)
    expression  arithmetic expressions of 3-4 operations, worked out in steps                (MATH)
    list        6-10 numbers or words sorted, reversed, filtered: two operations             (BBH)
    record      a note turned into a JSON record of 4-6 fields in fixed order                (structured output)
    sudoku      4x4 with 6-10 clues and one solution; all four rows are written              (free order)
    code        a small Python function composed of 14 primitives, judged by running it      (HumanEval, MBPP)
    pair        two independent short questions in one prompt                                (free order)

Splits: a prompt belongs to the split that a hash of its normalised text names, so no prompt is in two splits and no list
has to be kept. On top, validation and test use only sudoku grids and compositions of primitives that training never
shows. `hard` has templates that no other split has, and larger numbers.

This module knows no tokenizer and no model.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from refusion.config import UserError, nearest
from refusion.evaluation.sandbox import run_function

SPLITS = ("train", "validation", "test", "hard")
HELD_OUT_GRIDS = 48

NAMES = "Mia Tom Ana Ben Eva Leo Zoe Sam Ida Max Kim Ray Lia Jon Amy Dan Sue Pam Ned Ivy".split()
ITEMS = "apples pens books coins cards eggs shells stamps beads cups keys plums".split()
WORDS = (  # one a letter: to sort them is to sort their beginnings
    "ant bird cake duck egg fish goat house iron jam kite lion moon nest owl pig queen rose ship table urn van wolf yard zebra"
).split()


@dataclass(frozen=True)
class Item:
    """One task. `facts` holds what the checker needs beyond the reference `answer`."""

    family: str
    prompt: str
    answer: str
    facts: dict[str, Any] = field(default_factory=dict, compare=False)

    def check(self, text: str) -> bool:
        """Whether `text` is a right answer to this task."""
        return CHECKERS[self.family](self, text)


def normalised(prompt: str) -> str:
    """The form under which prompts count as equal: lower case, single spaces, no punctuation but signs of arithmetic."""
    return " ".join(re.sub(r"[^a-z0-9+*/()-]+", " ", prompt.lower()).split())


def _bucket(text: str, buckets: int) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % buckets


def split_of(prompt: str) -> str:
    """The split that a prompt belongs to: 4% test, 4% validation, the rest training."""
    bucket = _bucket(normalised(prompt), 100)
    return "test" if bucket < 4 else "validation" if bucket < 8 else "train"


# --- arithmetic: worked steps -----------------------------------------------------------------------------------

Tree = int | tuple[str, "Tree", "Tree"]


def _apply(op: str, a: int, b: int) -> int:
    return a + b if op == "+" else a - b if op == "-" else a * b


def _show(tree: Tree, parent: str = "", right: bool = False) -> str:
    """An expression in the usual notation, with only the parentheses that it needs."""
    if isinstance(tree, int):
        return str(tree)
    op, a, b = tree
    text = f"{_show(a, op)}{op}{_show(b, op, True)}"
    needs = (parent == "*" and op != "*") or (parent == "-" and right and op != "*")
    return f"({text})" if needs else text


def _steps(tree: Tree, steps: list[str]) -> int:
    """Value of an expression; every operation is added to `steps` as `a+b=c`, left operand first."""
    if isinstance(tree, int):
        return tree
    op, left, right = tree
    a, b = _steps(left, steps), _steps(right, steps)
    value = _apply(op, a, b)
    steps.append(f"{a}{op}{b}={value}")
    return value


NUMBER = "(0|[1-9][0-9]{0,8})"
STEP = re.compile(rf"([^=]*: )?{NUMBER}([+*-]){NUMBER}=(-?{NUMBER})")


def _follows(lines: list[str], known: set[int]) -> list[int] | None:
    """Results of the equations in worked lines; None when a line is not in order.

    A line has one equation `a+b=c`, true, at its end, or none. Whatever number it states is one that is `known`, or the
    result of an equation above it.
    """
    known, results = set(known), []
    for line in lines:
        step = STEP.fullmatch(line)
        if step is None and (not line or "=" in line or "#" in line):
            return None
        stated = (step[1] or "") + f" {step[2]} {step[4]}" if step else line
        if not known.issuperset(map(int, re.findall(r"\d{1,9}", stated))):
            return None
        if step:
            results.append(int(step[5]))
            known.add(results[-1])
            if _apply(step[3], int(step[2]), int(step[4])) != results[-1]:
                return None
    return results


def _check_worked(item: Item, text: str) -> bool:
    """`#### ` and the right number at the end, below as many equations as there are steps, all true, the last one with this
    result. They start from the question's numbers (2 and 3 stand for words such as twice), and there is no line more than needed.
    """
    *lines, end = text.strip().split("\n")
    results = _follows([line.strip() for line in lines], {2, 3, *map(int, re.findall(r"[0-9]+", item.prompt))})
    steps, result = item.facts["steps"], item.facts["result"]
    if not results or end.strip() != f"#### {result}" or results[-1] != result:
        return False
    return len(results) >= steps and len(lines) <= item.answer.count("\n")


def _worked(family: str, prompt: str, lines: list[str], result: int) -> Item:
    answer = "\n".join([*lines, f"#### {result}"])
    return Item(family, prompt, answer, {"result": result, "steps": sum("=" in line for line in lines)})


# --- word problems ----------------------------------------------------------------------------------------------

GAINS = {"buys": "{A} buys {n} more.", "finds": "{A} finds {n} more.", "gets": "{B} gives {A} {n} more."}
LOSSES = {"gives": "{A} gives {n} to {B}.", "loses": "{A} loses {n}.", "sells": "{A} sells {n}."}
FACTORS = {2: "doubles", 3: "triples"}


def _journey(rng: random.Random, hard: bool) -> Item | None:
    """Somebody has things and gains, loses or multiplies them, 2-4 times."""
    a, b = rng.sample(NAMES, 2)
    item, top = rng.choice(ITEMS), 499 if hard else 99
    value = rng.randint(5, top)
    opening = "At first {A} owns {n} {item}." if hard else "{A} has {n} {item}."
    text, lines = [opening.format(A=a, n=value, item=item)], [f"start {value}"]
    for _ in range(4 if hard else rng.choice((2, 3, 3, 4))):
        kind, n = rng.choice(("+", "+", "-", "-", "*")), rng.randint(2, top)
        if kind == "*":
            n = rng.choice((2, 3))
            verb, sentence = FACTORS[n], f"Then {a} {FACTORS[n]} the {item}."
        else:
            verb, sentence = rng.choice(list((GAINS if kind == "+" else LOSSES).items()))
            sentence = sentence.format(A=a, B=b, n=n)
        result = _apply(kind, value, n)
        if not 0 < result <= (1999 if hard else 199):
            return None
        text.append(sentence)
        lines.append(f"{verb} {n}: {value}{kind}{n}={result}")
        value = result
    question = "Say how many {item} {A} ends with." if hard else "How many {item} does {A} have?"
    return _worked("word", " ".join([*text, question.format(A=a, item=item)]), lines, value)


def _shopping(rng: random.Random, hard: bool) -> Item | None:
    """Two kinds of things bought, perhaps paid with a note."""
    who, (x, y) = rng.choice(NAMES), rng.sample(ITEMS, 2)
    top = 99 if hard else 40
    p, q = rng.randint(2, top), rng.randint(2, top)
    m, n = rng.randint(2, 9 if hard else 5), rng.randint(2, 9 if hard else 5)
    total = m * p + n * q
    if hard:
        text = f"In a shop {x} are {p} each and {y} are {q} each. {who} takes {m} {x} and {n} {y}."
    else:
        text = f"{who} buys {m} {x} at {p} each and {n} {y} at {q} each."
    lines = [f"{x}: {m}*{p}={m * p}", f"{y}: {n}*{q}={n * q}", f"total: {m * p}+{n * q}={total}"]
    if rng.random() < 0.5:
        paid = 1000 if hard else rng.choice((100, 200))
        if total >= paid:
            return None
        lines.append(f"change: {paid}-{total}={paid - total}")
        return _worked("word", f"{text} {who} pays with {paid}. How much is the change?", lines, paid - total)
    if total > 199 and not hard:
        return None
    return _worked("word", f"{text} How much does {who} pay?", lines, total)


def _comparison(rng: random.Random, hard: bool) -> Item | None:
    """Three people, each compared with the one before; what do they have together?"""
    a, b, c = rng.sample(NAMES, 3)
    item, top = rng.choice(ITEMS), 300 if hard else 50
    x, n, k = rng.randint(5, top), rng.randint(2, top), rng.choice((2, 3))
    more = rng.random() < 0.5
    if not more and n >= x:
        return None
    y = x + n if more else x - n
    z = k * y
    times = "twice" if k == 2 else "three times"
    verb = "owns" if hard else "has"
    text = (
        f"{a} {verb} {x} {item}. {b} {verb} {n} {'more' if more else 'fewer'} than {a}. "
        f"{c} {verb} {times} as many as {b}. How many {'in all' if hard else 'together'}?"
    )
    if x + y + z > (1999 if hard else 250):
        return None
    lines = [f"{a} {x}", f"{b}: {x}{'+' if more else '-'}{n}={y}", f"{c}: {y}*{k}={z}"]
    lines += [f"{a} and {b}: {x}+{y}={x + y}", f"total: {x + y}+{z}={x + y + z}"]
    return _worked("word", text, lines, x + y + z)


def _rate(rng: random.Random, hard: bool) -> Item | None:
    """So much a day for some days, out of a whole."""
    who, item = rng.choice(NAMES), rng.choice(ITEMS)
    per, days = rng.randint(3, 99 if hard else 40), rng.randint(2, 9 if hard else 5)
    done = per * days
    whole = done + rng.randint(1, 99)
    if whole > (1999 if hard else 250):
        return None
    more = rng.randint(2, 60)
    if hard:
        text = f"Out of {whole} {item}, {who} packs {per} a day for {days} days, then {more} more arrive."
    else:
        text = f"{who} has {whole} {item} and uses {per} a day for {days} days. Then {who} buys {more}."
    lines = [f"used: {per}*{days}={done}", f"left: {whole}-{done}={whole - done}"]
    lines.append(f"buys {more}: {whole - done}+{more}={whole - done + more}")
    return _worked("word", f"{text} How many {item} are there now?", lines, whole - done + more)


def _word(rng: random.Random, split: str) -> Item | None:
    make = rng.choice((_journey, _journey, _shopping, _comparison, _rate))
    return make(rng, split == "hard")


# --- expressions ------------------------------------------------------------------------------------------------

SHAPES = (  # operators as a tree, 0 for a number; 3 operations, and mostly 4
    ("-", ("*", ("+", 0, 0), 0), 0), ("+", ("*", 0, 0), ("*", 0, 0)), ("-", ("+", 0, 0), ("-", 0, 0)),
    ("+", ("-", ("*", ("+", 0, 0), 0), 0), 0), ("-", ("+", ("*", 0, 0), ("*", 0, 0)), 0), ("+", ("*", ("-", 0, 0), 0), ("*", 0, 0)),
    ("-", ("+", ("+", 0, 0), ("*", 0, 0)), 0), ("+", ("-", ("+", 0, 0), 0), ("*", 0, 0)), ("-", ("*", ("+", 0, 0), 0), ("*", 0, 0)),
)  # fmt: skip
HARD_SHAPES = (
    ("-", ("+", ("*", ("+", 0, 0), 0), ("*", 0, 0)), 0), ("+", ("*", ("-", ("+", 0, 0), 0), 0), ("*", 0, 0)),
    ("+", ("-", ("*", ("+", 0, 0), 0), 0), ("*", 0, 0)),
)  # fmt: skip


def _fill(shape: Any, rng: random.Random, top: int, limit: int, factor: bool = False) -> tuple[Tree, int] | None:
    """Random numbers for the leaves so that every intermediate value stays within 1..limit; None if that failed."""
    if shape == 0:
        value = rng.randint(2, 5 if factor else top)
        return value, value
    op, a, b = shape
    left, right = _fill(a, rng, top, limit), _fill(b, rng, top, limit, op == "*")
    if left is None or right is None:
        return None
    value = _apply(op, left[1], right[1])
    return ((op, left[0], right[0]), value) if 0 < value <= limit else None


def _filled(shapes: Any, rng: random.Random, top: int, limit: int) -> Tree:
    while True:
        filled = _fill(rng.choice(shapes), rng, top, limit)
        if filled is not None:
            return filled[0]


def _expression(rng: random.Random, split: str) -> Item | None:
    if split == "hard":
        tree = _filled(HARD_SHAPES, rng, 300, 1999)
        prompt = f"Give the value of {_show(tree)} step by step."
    else:
        tree = _filled(SHAPES, rng, 99, 250)
        prompt = rng.choice(("Work out {}.", "Compute {}.", "What is {}?")).format(_show(tree))
    steps: list[str] = []
    return _worked("expression", prompt, steps, _steps(tree, steps))


# --- lists ------------------------------------------------------------------------------------------------------

Values = list[Any]
ListOp = tuple[str, str, Callable[[Values], Values]]  # instruction, label, function


def _number_ops(rng: random.Random, hard: bool) -> list[ListOp]:
    n = rng.randint(3, 7) * (100 if hard else 10)
    order: list[ListOp] = [
        ("sort ascending", "ascending", sorted),
        ("sort descending", "descending", lambda v: sorted(v, reverse=True)),
        ("reverse", "reversed", lambda v: v[::-1]),
    ]
    keep: list[ListOp] = [
        ("keep the even ones", "even", lambda v: [x for x in v if x % 2 == 0]),
        ("keep the odd ones", "odd", lambda v: [x for x in v if x % 2]),
        (f"keep those over {n}", f"over {n}", lambda v: [x for x in v if x > n]),
        (f"keep those under {n}", f"under {n}", lambda v: [x for x in v if x < n]),
    ]
    first, second = rng.choice(order), rng.choice(keep)
    return [first, second] if rng.random() < 0.5 else [second, first]


def _word_ops(rng: random.Random) -> list[ListOp]:
    letter = rng.choice("mnopr")
    sort: list[ListOp] = [
        ("sort from a to z", "a to z", sorted),
        ("sort from z to a", "z to a", lambda v: sorted(v, reverse=True)),
    ]
    rest: list[ListOp] = [
        ("reverse", "reversed", lambda v: v[::-1]),
        (f"keep those before {letter}", f"before {letter}", lambda v: [x for x in v if x < letter]),
    ]
    first, second = rng.choice(sort), rng.choice(rest)
    return [first, second] if rng.random() < 0.5 else [second, first]


def _list(rng: random.Random, split: str) -> Item | None:
    hard = split == "hard"
    size = rng.randint(11, 12) if hard else rng.randint(6, 10)
    if rng.random() < 0.65:
        values: Values = rng.sample(range(100, 1000), 10) if hard else rng.sample(range(10, 100), size)
        ops, joint = _number_ops(rng, hard), " "
    else:
        values, ops, joint = rng.sample(WORDS, size), _word_ops(rng), ", "
    lines, current = [], values
    for _, label, function in ops:
        current = function(current)
        lines.append(f"{label}: {joint.join(map(str, current))}")
    if len(current) < 3 or sum(line.count(joint) for line in lines) < 9:
        return None
    what = "Take the list" if hard else rng.choice(("List", "Given"))
    prompt = f"{what}: {joint.join(map(str, values))}. First {ops[0][0]}, then {ops[1][0]}."
    return Item("list", prompt, "\n".join(lines))


def _check_exact(item: Item, text: str) -> bool:
    """The reference answer, line by line; only white space at the ends may differ."""
    return [line.strip() for line in text.strip().split("\n")] == item.answer.split("\n")


# --- records ----------------------------------------------------------------------------------------------------

CITIES = "Lima Oslo Rome Cairo Paris Delhi Quito Tokyo Berlin Madrid Dublin Athens".split()
JOBS = "nurse baker pilot teacher farmer painter singer driver writer doctor".split()
HOBBIES = "chess tennis cooking music hiking fishing dancing reading".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
COLOURS = "red blue green black white yellow brown grey".split()
ROOMS = "A1 A2 A3 B1 B2 B3 C1 C2 C3".split()

# each kind: the record's keys in order, and notes that name all of them; `hard` has a note of its own (the last one)
RECORDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "person": (("name", "age", "city", "job", "hobby"), (
        "{name}, {age}, is a {job} from {city} and likes {hobby}.",
        "The {job} {name} lives in {city}, is {age} years old and enjoys {hobby}.",
        "Meet {name} from {city}: {age} years old, loves {hobby}, works as a {job}.",
        "In {city} there is a {job} of {age} whose name is {name}; after work it is {hobby}.",
    )),
    "order": (("item", "count", "price", "buyer", "city", "day"), (
        "{buyer} ordered {count} {item} at {price} each, to be sent to {city} on {day}.",
        "On {day} we send {count} {item} to {buyer} in {city}; the price is {price}.",
        "{count} {item} for {buyer}, {city}, price {price}, due {day}.",
        "Due {day}: for {price} apiece, {buyer} of {city} wants {count} {item}.",
    )),
    "meeting": (("host", "day", "hour", "room", "guests"), (
        "{host} meets {guests} guests in room {room} on {day} at {hour}.",
        "On {day} at {hour}, room {room}: {host} with {guests} guests.",
        "Room {room} is taken by {host} for {guests} guests, {day} at {hour}.",
        "{guests} guests will see {host} at {hour} on {day}, in {room}.",
    )),
    "car": (("owner", "colour", "seats", "year", "price"), (
        "{owner} sells a {colour} car of {year} with {seats} seats for {price}.",
        "For {price} you can have the {colour} car of {owner}; it is from {year} and has {seats} seats.",
        "A {colour} car, {seats} seats, year {year}, owner {owner}, price {price}.",
        "With {seats} seats and painted {colour} in {year}, the car of {owner} costs {price}.",
    )),
    "parcel": (("from", "to", "weight", "day"), (
        "A parcel of {weight} kg goes from {from} to {to} on {day}.",
        "On {day}, {weight} kg are sent to {to}; they come from {from}.",
        "{from} to {to}, {weight} kg, {day}.",
        "{to} waits for {weight} kg, sent from {from} on {day}.",
    )),
}  # fmt: skip


def _facts(rng: random.Random, hard: bool) -> dict[str, Any]:
    return {
        "name": rng.choice(NAMES), "buyer": rng.choice(NAMES), "host": rng.choice(NAMES), "owner": rng.choice(NAMES),
        "age": rng.randint(18, 99), "city": rng.choice(CITIES), "job": rng.choice(JOBS), "hobby": rng.choice(HOBBIES),
        "item": rng.choice(ITEMS), "count": rng.randint(100, 999) if hard else rng.randint(2, 99),
        "price": rng.randint(1000, 9999) if hard else rng.randint(10, 999), "day": rng.choice(DAYS),
        "hour": rng.randint(8, 20), "room": rng.choice(ROOMS), "guests": rng.randint(100, 999) if hard else rng.randint(2, 99),
        "colour": rng.choice(COLOURS), "seats": rng.randint(2, 9), "year": rng.randint(1960, 2024), "from": rng.choice(CITIES),
        "to": rng.choice(CITIES), "weight": rng.randint(2, 99),
    }  # fmt: skip


def _record(rng: random.Random, split: str) -> Item | None:
    keys, notes = RECORDS[rng.choice(("person", "person", "order", "order", "meeting", "meeting", "car", "car", "parcel"))]
    facts = _facts(rng, split == "hard")
    note = notes[-1] if split == "hard" else rng.choice(notes[:-1])
    record = {key: facts[key] for key in keys}
    return Item("record", f"Write as JSON: {note.format(**facts)}", json.dumps(record), {"record": record})


def _check_record(item: Item, text: str) -> bool:
    """One JSON object with the same keys in the same order and the same values of the same types."""
    try:
        pairs = json.loads(text, object_pairs_hook=tuple)
    except (ValueError, RecursionError):
        return False
    expected = tuple(item.facts["record"].items())
    return bool(pairs == expected) and [type(v) for _, v in pairs] == [type(v) for _, v in expected]


# --- sudoku -----------------------------------------------------------------------------------------------------


@cache
def sudoku_grids() -> tuple[str, ...]:
    """All 288 solved 4x4 grids as strings of 16 digits, shuffled; the first `HELD_OUT_GRIDS` are never trained on."""

    def extend(grid: str) -> Iterator[str]:
        if len(grid) == 16:
            yield grid
            return
        row, column = divmod(len(grid), 4)
        block = {grid[r * 4 + c] for r in range(row - row % 2, row) for c in range(column - column % 2, column - column % 2 + 2)}
        for digit in "1234":
            if digit not in grid[row * 4 :] and digit not in grid[column::4] and digit not in block:
                yield from extend(grid + digit)

    grids = sorted(extend(""))
    random.Random("sudoku grids").shuffle(grids)
    return tuple(grids)


@cache
def _clue_index() -> dict[tuple[int, str], int]:
    """For each (cell, digit) the set of grids that have it there, as bits of one number."""
    index: dict[tuple[int, str], int] = {}
    for number, grid in enumerate(sudoku_grids()):
        for cell, digit in enumerate(grid):
            index[cell, digit] = index.get((cell, digit), 0) | 1 << number
    return index


def _sudoku(rng: random.Random, split: str) -> Item | None:
    grids = sudoku_grids()
    grid = rng.choice(grids[HELD_OUT_GRIDS:] if split == "train" else grids[:HELD_OUT_GRIDS])
    cells = set(rng.sample(range(16), 5 if split == "hard" else rng.randint(6, 10)))
    fits = (1 << len(grids)) - 1
    for cell in cells:
        fits &= _clue_index()[cell, grid[cell]]
    if fits.bit_count() != 1:  # more than one solution
        return None
    clues = [digit if cell in cells else "0" for cell, digit in enumerate(grid)]
    lead = "Fill in the grid:" if split == "hard" else "Solve the sudoku:"
    prompt = lead + "\n" + "\n".join(" ".join(clues[r : r + 4]) for r in range(0, 16, 4))
    return Item("sudoku", prompt, "\n".join(" ".join(grid[r : r + 4]) for r in range(0, 16, 4)))


# --- code -------------------------------------------------------------------------------------------------------

Primitive = tuple[str, str, Callable[[Any, int], Any]]  # words, Python, the same as a function

PRIMITIVES: dict[str, Primitive] = {
    "even": ("keep the even ones", "[x for x in xs if x % 2 == 0]", lambda v, n: [x for x in v if x % 2 == 0]),
    "odd": ("keep the odd ones", "[x for x in xs if x % 2 == 1]", lambda v, n: [x for x in v if x % 2 == 1]),
    "over": ("keep those over {n}", "[x for x in xs if x > {n}]", lambda v, n: [x for x in v if x > n]),
    "under": ("keep those under {n}", "[x for x in xs if x < {n}]", lambda v, n: [x for x in v if x < n]),
    "add": ("add {n} to each", "[x + {n} for x in xs]", lambda v, n: [x + n for x in v]),
    "times": ("multiply each by {n}", "[x * {n} for x in xs]", lambda v, n: [x * n for x in v]),
    "square": ("square each", "[x * x for x in xs]", lambda v, n: [x * x for x in v]),
    "reverse": ("reverse", "xs[::-1]", lambda v, n: v[::-1]),
    "sort": ("sort", "sorted(xs)", lambda v, n: sorted(v)),
    "take": ("take the first {n}", "xs[:{n}]", lambda v, n: v[:n]),
    "drop": ("drop the first {n}", "xs[{n}:]", lambda v, n: v[n:]),
}
ENDS: dict[str, Primitive] = {
    "sum": ("return the sum", "sum(xs)", lambda v, n: sum(v)),
    "count": ("return the count", "len(xs)", lambda v, n: len(v)),
    "list": ("return the list", "xs", lambda v, n: v),
}


def held_out(composition: tuple[str, ...]) -> bool:
    """Whether a composition of primitives is kept out of training (one in five)."""
    return _bucket(" ".join(composition), 5) == 0


def _code(rng: random.Random, split: str) -> Item | None:
    count = 4 if split == "hard" else rng.choice((2, 3, 3))
    names = (*rng.sample(list(PRIMITIVES), count), rng.choice(list(ENDS)))
    if not any("for" in PRIMITIVES[name][1] for name in names[:-1]):  # too short to be of interest
        return None
    if held_out(names) != (split != "train"):
        return None
    parts = [(PRIMITIVES | ENDS)[name] for name in names]
    numbers = [rng.randint(2, 9 if split != "hard" else 50) for _ in parts]
    words = [part[0].format(n=n) for part, n in zip(parts, numbers, strict=True)]
    lines = [f"    xs = {part[1].format(n=n)}" for part, n in zip(parts[:-1], numbers, strict=False)]
    lead = "Python function f of a list xs:" if split == "hard" else rng.choice(("Write f(xs):", "Define f(xs):"))
    answer = "\n".join(["def f(xs):", *lines, f"    return {parts[-1][1]}"])
    facts = {"names": names, "numbers": numbers}
    return Item("code", f"{lead} {', '.join(words)}.", answer, facts)


def _check_code(item: Item, text: str) -> bool:
    """Runs the answer on lists and compares with the composition itself: the same values of the same types.

    Single numbers show every threshold and constant; long lists show what is taken, dropped and put in order.
    """
    rng = random.Random(item.prompt)
    inputs = [[], *([number] for number in range(-60, 100))]
    for low, high in ((-9, 20), (-9, 60), (20, 99)):
        inputs += [[rng.randint(low, high) for _ in range(size)] for size in (2, 3, 4, 6, 9, 12, 15, 30, 60, 110, 200)]
    expected = []
    for values in inputs:
        current: Any = list(values)
        for name, n in zip(item.facts["names"], item.facts["numbers"], strict=True):
            current = (PRIMITIVES | ENDS)[name][2](current, n)
        expected.append(current)
    results = run_function(text, "f", [[values] for values in inputs])
    return results is not None and json.dumps(results) == json.dumps(expected)  # as text: 1, 1.0 and true differ


# --- pairs ------------------------------------------------------------------------------------------------------

SHORT_SHAPES = (
    ("+", ("*", 0, 0), 0), ("-", ("*", 0, 0), 0), ("*", ("+", 0, 0), 0), ("*", ("-", 0, 0), 0), ("-", ("+", 0, 0), 0),
    ("+", 0, ("*", 0, 0)), ("+", ("-", 0, 0), 0),
)  # fmt: skip


def _short_expression(rng: random.Random, hard: bool) -> tuple[str, str]:
    tree = _filled(SHORT_SHAPES, rng, 300 if hard else 99, 1999 if hard else 250)
    steps: list[str] = []
    _steps(tree, steps)
    return f"work out {_show(tree)}", ", ".join(steps)


def _short_list(rng: random.Random, hard: bool) -> tuple[str, str]:
    values = rng.sample(range(100, 1000) if hard else range(10, 100), 6 if hard else rng.randint(6, 7))
    words, function = rng.choice((("sort ascending", sorted), ("sort descending", lambda v: sorted(v, reverse=True)),
                                  ("reverse", lambda v: v[::-1])))  # fmt: skip
    return f"{words} {' '.join(map(str, values))}", " ".join(map(str, function(values)))


def _pair(rng: random.Random, split: str) -> Item | None:
    hard = split == "hard"
    (ask_a, a), (ask_b, b) = (rng.choice((_short_expression, _short_list))(rng, hard) for _ in range(2))
    lead = "Two tasks." if hard else ""
    return Item("pair", f"{lead} A: {ask_a}. B: {ask_b}.".strip(), f"A: {a}\nB: {b}")


# --- the suite --------------------------------------------------------------------------------------------------

MAKERS: dict[str, Callable[[random.Random, str], Item | None]] = {
    "word": _word, "expression": _expression, "list": _list, "record": _record, "sudoku": _sudoku, "code": _code,
    "pair": _pair,
}  # fmt: skip
CHECKERS: dict[str, Callable[[Item, str], bool]] = {
    "word": _check_worked, "expression": _check_worked, "list": _check_exact, "record": _check_record,
    "sudoku": _check_exact, "code": _check_code, "pair": _check_exact,
}  # fmt: skip
FAMILIES = tuple(MAKERS)


def items(family: str, split: str, seed: int = 0) -> Iterator[Item]:
    """An endless stream of different tasks of one family; its first N are the same however many are taken.

    Raises `UserError` for an unknown family or split.
    """
    if family not in MAKERS:
        raise UserError(f"unknown family {family!r}{nearest(family, MAKERS)}")
    if split not in SPLITS:
        raise UserError(f"split must be one of {', '.join(SPLITS)}, got {split!r}{nearest(split, SPLITS)}")
    rng, seen = random.Random(f"{family} {split} {seed}"), set()
    while True:
        item = MAKERS[family](rng, split)
        if item is None or (split != "hard" and split_of(item.prompt) != split):
            continue
        key = normalised(item.prompt)
        if key not in seen:
            seen.add(key)
            yield item


def take(family: str, split: str, count: int, seed: int = 0) -> list[Item]:
    """The first `count` tasks of a family in a split."""
    if not 0 <= count <= 10_000_000:
        raise UserError(f"a number of tasks must be between 0 and 10,000,000, got {count!s:.40}")
    return list(itertools.islice(items(family, split, seed), count))
