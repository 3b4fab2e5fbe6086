"""The nano suite: right answers pass and wrong ones do not, splits are apart, texts have the promised lengths."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
import statistics
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from refusion.config import UserError
from refusion.evaluation.procedural import (
    CITIES,
    ENDS,
    FAMILIES,
    HELD_OUT_GRIDS,
    ITEMS,
    NAMES,
    PRIMITIVES,
    SPLITS,
    WORDS,
    Item,
    held_out,
    normalised,
    split_of,
    sudoku_grids,
    take,
)
from refusion.models.tokenizer import Tokenizer
from refusion.training import suite

EXACT = ("list", "sudoku", "pair")
WORKED = ("word", "expression")
BOTH = list(itertools.product(FAMILIES, SPLITS))


@cache
def sample(family: str, split: str, count: int = 300) -> list[Item]:
    return take(family, split, count)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return suite.learn_tokenizer(1024, 0, per_family=300)


def test_families_come_in_the_shares_that_are_asked_for(tokenizer: Tokenizer, tmp_path: Path) -> None:
    even = suite.rows(tokenizer, "train", 4, 0, 512, tmp_path)[0]
    assert len(even) == 4 * len(FAMILIES)
    weighted = suite.rows(tokenizer, "train", 4, 0, 512, tmp_path, [0.5, 0, 2, 1, 0, 0, 0])[0]
    prompts = [tokenizer.decode(weighted.pair(i)[0].tolist()) for i in range(len(weighted))]
    assert [sum(start in p for p in prompts) for start in ("Write as JSON", "Write f(", "Solve")] == [4, 0, 0]
    assert sum("First" in p for p in prompts) == 8 and len(prompts) == 14
    for wrong in ([1.0], [0] * len(FAMILIES)):
        with pytest.raises(UserError, match=f"family_weights must have {len(FAMILIES)} entries"):
            suite.rows(tokenizer, "train", 4, 0, 512, tmp_path, wrong)


# --- streams and splits


@pytest.mark.parametrize(("family", "split"), BOTH)
def test_a_stream_is_the_same_however_much_of_it_is_taken(family: str, split: str) -> None:
    assert take(family, split, 40) == sample(family, split)[:40]
    assert [item.facts for item in take(family, split, 40)] == [item.facts for item in sample(family, split)[:40]]
    assert take(family, split, 20, seed=1) != take(family, split, 20)


@pytest.mark.parametrize(("family", "split"), BOTH)
def test_a_stream_holds_no_prompt_twice(family: str, split: str) -> None:
    prompts = [normalised(item.prompt) for item in sample(family, split)]
    assert len(set(prompts)) == len(prompts)


def test_texts_are_those_that_models_were_trained_on() -> None:
    """If this fails, published accuracies no longer mean what they say, and `suite.VERSION` must change."""
    digest = hashlib.sha256()
    for family, split in BOTH:
        for item in sample(family, split)[:100]:
            digest.update(f"{item.prompt}\0{item.answer}\0".encode())
    assert (suite.VERSION, digest.hexdigest()[:16]) == (2, "52b7a8a4c1b345ae")


@pytest.mark.parametrize("family", FAMILIES)
def test_no_prompt_is_in_two_splits(family: str) -> None:
    """`split_of` is a function of the normalised prompt, so this holds for all prompts; and `hard` is apart by its templates."""
    prompts = {split: {normalised(item.prompt) for item in sample(family, split)} for split in SPLITS}
    for one, other in itertools.combinations(SPLITS, 2):
        assert not prompts[one] & prompts[other]
    for split in ("train", "validation", "test"):
        assert all(split_of(item.prompt) == split for item in sample(family, split))


def test_prompts_that_differ_in_case_and_spaces_only_are_in_one_split() -> None:
    for item in sample("word", "test")[:50]:
        assert split_of(f"  {item.prompt.upper()}\n") == "test"


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match="unknown family 'sudoko'; did you mean 'sudoku'"):
        take("sudoko", "test", 1)
    with pytest.raises(UserError, match=r"split must be one of .*; did you mean 'validation'"):
        take("word", "valdation", 1)


def skeleton(prompt: str) -> set[tuple[str, str]]:
    """Pairs of neighbouring words, numbers and names made alike."""
    names = "|".join([*NAMES, *CITIES, *ITEMS, *WORDS])
    words = re.sub(rf"\b({names})\b", "@", re.sub(r"\S*\d\S*", "#", prompt)).split()
    return set(itertools.pairwise(words))


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "sudoku"])
def test_hard_prompts_have_templates_that_training_never_shows(family: str) -> None:
    seen = set().union(*(skeleton(item.prompt) for item in sample(family, "train", 3000)))
    assert all(skeleton(item.prompt) - seen for item in sample(family, "hard"))
    assert sum(bool(skeleton(item.prompt) - seen) for item in sample(family, "test")) < 15  # of 300: it can tell


def largest(item: Item) -> int:
    return max(map(int, re.findall(r"\d+", item.prompt + item.answer)), default=0)


@pytest.mark.parametrize("family", [*WORKED, "list", "pair", "record", "code"])
def test_hard_has_larger_numbers(family: str) -> None:
    ordinary, hard = ([largest(item) for item in sample(family, split)] for split in ("test", "hard"))
    assert statistics.mean(hard) > 1.4 * statistics.mean(ordinary)


# --- difficulty


def test_word_problems_have_two_steps_or_more_with_operands_up_to_99() -> None:
    for item in sample("word", "train"):
        assert 2 <= item.facts["steps"] <= 5
        assert all(int(n) <= 250 for n in re.findall(r"\d+", item.prompt))


def test_lists_have_six_to_ten_entries() -> None:
    for split in ("train", "validation", "test"):
        for item in sample("list", split):
            values = re.search(r": ([^.]*)\.", item.prompt)
            assert values and 6 <= len(re.split(r",? ", values[1])) <= 10


def test_some_prompts_hold_two_questions() -> None:
    assert all("A: " in item.prompt and "B: " in item.prompt for item in sample("pair", "test"))


# --- sudoku


def solutions(clues: list[int], cell: int = 0) -> Iterator[list[int]]:
    """All ways to fill a 4x4 grid, found by trying."""
    if cell == 16:
        yield list(clues)
        return
    if clues[cell]:
        yield from solutions(clues, cell + 1)
        return
    for digit in range(1, 5):
        row, column = divmod(cell, 4)
        peers = [
            other for other in range(16)
            if other // 4 == row or other % 4 == column or (other // 8 == cell // 8 and other % 4 // 2 == column // 2)
        ]  # fmt: skip
        if all(clues[other] != digit for other in peers if other != cell):
            yield from solutions([*clues[:cell], digit, *clues[cell + 1 :]], cell + 1)


def grid_of(text: str) -> list[int]:
    return [int(digit) for digit in re.findall(r"\d", text)]


@pytest.mark.parametrize("split", SPLITS)
def test_every_sudoku_has_one_solution_and_it_is_the_answer(split: str) -> None:
    for item in sample("sudoku", split)[:150]:
        clues = grid_of(item.prompt)
        assert list(itertools.islice(solutions(clues), 2)) == [grid_of(item.answer)]
        assert sum(map(bool, clues)) in ((5,) if split == "hard" else range(6, 11))


def test_the_grids_are_all_288_and_48_of_them_are_never_trained_on() -> None:
    assert {"".join(map(str, grid)) for grid in solutions([0] * 16)} == set(sudoku_grids()) and len(sudoku_grids()) == 288
    kept = set(sudoku_grids()[:HELD_OUT_GRIDS])
    assert len(kept) == 48
    shown = {split: {"".join(map(str, grid_of(item.answer))) for item in sample("sudoku", split, 900)} for split in SPLITS}
    assert not shown["train"] & kept and len(shown["train"]) > 200
    assert all(shown[split] <= kept for split in ("validation", "test", "hard"))


# --- code


def test_held_out_compositions_are_never_trained_on() -> None:
    assert not any(held_out(item.facts["names"]) for item in sample("code", "train", 3000))
    for split in ("validation", "test", "hard"):
        assert all(held_out(item.facts["names"]) for item in sample("code", split))
    everything = [(*names, end) for names in itertools.permutations(PRIMITIVES, 2) for end in ENDS]
    assert 0.1 < sum(map(held_out, everything)) / len(everything) < 0.3
    assert len(PRIMITIVES) + len(ENDS) >= 12


def program(item: Item) -> Any:
    scope: dict[str, Any] = {}
    exec(item.answer, scope)
    return scope["f"]


def outputs(code: str) -> list[Any]:
    """What a program returns on very many lists; nothing if it fails."""
    rng, scope = random.Random(1), {}
    exec(code, scope)
    lists = [[rng.randint(-20, top) for _ in range(size)] for size in (*range(0, 130, 3), 250, 400) for top in (12, 25, 60, 120)]
    try:
        return [scope["f"](values) for values in [*([n] for n in range(-60, 100)), *lists]]
    except (ValueError, ZeroDivisionError):
        return []


def mutants(item: Item, rng: random.Random) -> Iterator[str]:
    """Programs that differ in a line or a number."""
    first, *lines, last = item.answer.split("\n")
    drop = rng.randrange(len(lines))
    yield "\n".join([first, *lines[:drop], *lines[drop + 1 :], last])
    swap = rng.randrange(len(lines) - 1)
    yield "\n".join([first, *lines[:swap], lines[swap + 1], lines[swap], *lines[swap + 2 :], last])
    numbers = list(re.finditer(r"(?<![%=] )\b\d+", item.answer))
    if numbers:
        one = rng.choice(numbers)
        yield f"{item.answer[: one.start()]}{int(one[0]) + rng.choice((-1, 1))}{item.answer[one.end() :]}"
    yield "\n".join([first, *lines, f"    return {rng.choice(['sum(xs)', 'len(xs)', 'xs'])}"])


def check_mutants(count: int) -> None:
    rng, wrong = random.Random(0), 0
    for split in ("test", "hard"):
        for item in sample("code", split)[:count]:
            for code in mutants(item, rng):
                same = outputs(code) == outputs(item.answer)
                wrong += not same
                assert item.check(code) == same, (item.prompt, code)
    assert wrong > count


@pytest.mark.parametrize("split", SPLITS)
def test_code_answers_pass(split: str) -> None:
    for item in sample("code", split)[:8]:
        assert item.check(item.answer) and item.check(item.answer + "\n")


def test_code_that_does_something_else_fails() -> None:
    check_mutants(6)


@pytest.mark.slow
def test_code_that_does_something_else_fails_many() -> None:
    check_mutants(150)


@pytest.mark.slow
def test_all_code_answers_pass() -> None:
    assert all(item.check(item.answer) for split in SPLITS for item in sample("code", split, 150)[:150])


def test_code_with_values_of_another_type_fails() -> None:
    count = next(item for item in sample("code", "test") if item.facts["names"][-1] == "count")
    assert count.check(count.answer) and not count.check(count.answer.replace("len(xs)", "float(len(xs))"))
    many = next(item for item in sample("code", "test") if item.facts["names"][-1] == "list")
    assert many.check(many.answer.replace("return xs", "return tuple(xs)"))  # a sequence is a sequence
    assert not many.check(many.answer.replace("return xs", "return [float(x) for x in xs]"))
    assert not many.check(many.answer.replace("return xs", "return str(xs)"))


def test_code_that_prints_instead_of_returning_fails() -> None:
    item = sample("code", "test")[0]
    assert not item.check(item.answer.replace("return ", "print(") + ")")
    assert not item.check("") and not item.check(f"Here it is:\n{item.answer}")


# --- checkers of text


@pytest.mark.parametrize(("family", "split"), [(f, s) for f, s in BOTH if f != "code"])
def test_reference_answers_pass(family: str, split: str) -> None:
    for item in sample(family, split):
        assert item.check(item.answer) and item.check(f" {item.answer}\n")


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "code"])
def test_nothing_and_the_answer_of_another_task_fail(family: str) -> None:
    for item, other in itertools.pairwise(sample(family, "test")):
        assert not item.check("")
        assert item.answer == other.answer or not item.check(other.answer)


def changed(text: str, place: int) -> str:
    """One digit or letter changed to another."""
    signs = "0123456789" if text[place].isdigit() else "abcdefghijklmnopqrstuvwxyz"
    return text[:place] + random.Random(place).choice([s for s in signs if s != text[place]]) + text[place + 1 :]


@pytest.mark.parametrize("family", [*EXACT, "record"])
def test_exact_answers_with_a_sign_changed_fail(family: str) -> None:
    for item in sample(family, "test"):
        for place in [i for i, sign in enumerate(item.answer) if sign.isalnum()][::5]:
            assert not item.check(changed(item.answer, place))


@pytest.mark.parametrize("family", EXACT)
def test_exact_answers_with_lines_dropped_swapped_or_added_fail(family: str) -> None:
    for item in sample(family, "test"):
        lines = item.answer.split("\n")
        assert not item.check("\n".join(lines[:-1])) and not item.check("\n".join(lines[1:]))
        assert lines[0] == lines[1] or not item.check("\n".join([lines[1], lines[0], *lines[2:]]))
        assert not item.check(f"{item.answer}\n{lines[-1]}") and not item.check(f"Answer:\n{item.answer}")
        assert not item.check(item.answer + " .") and not item.check(item.answer.replace("\n", " "))


def test_records_want_the_same_keys_in_order_and_the_same_types() -> None:
    for item in sample("record", "test"):
        record = item.facts["record"]
        assert item.check(json.dumps(record, indent=2))  # white space is no part of JSON
        keys = list(record)
        assert not item.check(json.dumps({key: record[key] for key in reversed(keys)}))
        assert not item.check(json.dumps({key: record[key] for key in keys[:-1]}))
        assert not item.check(json.dumps({**record, "more": 1}))
        assert not item.check(json.dumps([[key, value] for key, value in record.items()]))
        assert not item.check(json.dumps({key: str(value) if isinstance(value, int) else 1 for key, value in record.items()}))
        assert not item.check(json.dumps({k: float(v) if isinstance(v, int) else v for k, v in record.items()})) or not any(
            isinstance(value, int) for value in record.values()
        )
        assert not item.check(item.answer + item.answer) and not item.check(f"{item.answer} done")
        assert not item.check(item.answer[:-1]) and not item.check(item.answer.replace("{", '{"x": 1, ', 1))


def test_hostile_json_is_only_wrong() -> None:
    item = sample("record", "test")[0]
    for text in ("[" * 100_000, '{"a":' * 100_000, "9" * 10_000, "\ud800", "null", "NaN"):
        assert not item.check(text)


# --- worked steps


def equations(item: Item) -> list[int]:
    """Numbers of the lines that hold an equation."""
    return [i for i, line in enumerate(item.answer.split("\n")) if "=" in line]


@pytest.mark.parametrize("family", WORKED)
@pytest.mark.parametrize("split", SPLITS)
def test_worked_answers_say_what_python_says(family: str, split: str) -> None:
    for item in sample(family, split):
        lines = item.answer.split("\n")
        assert item.facts["steps"] == len(equations(item))
        for line in (lines[i] for i in equations(item)):
            left, right = re.sub(r"^.*: ", "", line).split("=")
            assert eval(left) == int(right)
        assert lines[-1] == f"#### {item.facts['result']}"
        if family == "expression":
            text = re.search(r"[\d(][\d()+*-]*", item.prompt)
            assert text and eval(text[0]) == item.facts["result"]


@pytest.mark.parametrize("family", WORKED)
def test_worked_answers_with_a_digit_of_an_equation_or_the_result_changed_fail(family: str) -> None:
    for split in ("test", "hard"):
        for item in sample(family, split):
            lines = item.answer.split("\n")
            for i in [*equations(item), len(lines) - 1]:
                first = lines[i].rindex(" ") + 1 if " " in lines[i] else 0
                for place in [p for p in range(first, len(lines[i])) if lines[i][p].isdigit()]:
                    wrong = [*lines[:i], changed(lines[i], place), *lines[i + 1 :]]
                    assert not item.check("\n".join(wrong)), wrong


def test_most_labels_with_a_digit_changed_fail() -> None:
    """A label is words, but a number in it must come from somewhere."""
    total, passed = 0, 0
    for item in sample("word", "test"):
        for match in re.finditer(r"\d(?=\d*(:|$))", item.answer, re.M):
            line = item.answer[: match.start()].count("\n")
            if line < item.answer.count("\n") and "=" not in item.answer[: match.start()].split("\n")[-1]:
                total += 1
                passed += item.check(changed(item.answer, match.start()))
    assert total > 300 and passed / total < 0.1


@pytest.mark.parametrize("family", WORKED)
def test_worked_answers_with_steps_dropped_fail(family: str) -> None:
    for item in sample(family, "test"):
        lines = item.answer.split("\n")
        for i in equations(item):
            assert not item.check("\n".join([*lines[:i], *lines[i + 1 :]]))
        assert not item.check("\n".join(lines[:-1])) and not item.check(lines[-1])


@pytest.mark.parametrize("family", WORKED)
def test_worked_answers_with_text_added_fail(family: str) -> None:
    for item in sample(family, "test"):
        result, before = item.facts["result"], item.answer.rsplit("\n", 1)[0]
        assert not item.check(f"{item.answer} {item.facts['result']}") and not item.check(f"{item.answer}\nDone.")
        assert not item.check(f"Well.\n{item.answer}") and not item.check(f"{before}\n\n#### {result}")
        assert not item.check(f"{before}\n#### {result}\n#### {result}") and not item.check(f"#### {result}\n{before}")
        assert not item.check(f"{before}\n#### 0{result}") and not item.check(f"{before}\n#### {result}.0")
        assert not item.check(f"{before}\n####{result}") and not item.check(f"{before}\n#### +{result}")


def test_expressions_with_dependent_steps_swapped_fail_and_independent_ones_pass() -> None:
    item = Item("expression", "What is 3*4+5*6?", "3*4=12\n5*6=30\n12+30=42\n#### 42", {"result": 42, "steps": 3})
    assert item.check("5*6=30\n3*4=12\n12+30=42\n#### 42")
    assert item.check("4*3=12\n5*6=30\n30+12=42\n#### 42")
    assert not item.check("3*4=12\n12+30=42\n5*6=30\n#### 42")
    assert not item.check("12+30=42\n3*4=12\n5*6=30\n#### 42")


CHEATS = {
    "no steps": "#### 42",
    "the number repeated": "42=42\n42=42\n42=42\n#### 42",
    "true but idle": "1+1=2\n1+1=2\n1+1=2\n#### 42",
    "idle with the question's numbers": "3+4=7\n3+4=7\n3+4=7\n#### 42",
    "from nowhere": "40+2=42\n40+2=42\n40+2=42\n#### 42",
    "only the last step": "12+30=42\n12+30=42\n12+30=42\n#### 42",
    "steps first stated as text": "12 and 30\n3*4=12\n12+30=42\n#### 42",
    "chain": "3*4=12\n5*6=30\n0+12+30=42\n#### 42",
    "chain of equals": "3*4=12=12\n5*6=30\n12+30=42\n#### 42",
    "two on a line": "3*4=12, 5*6=30\n12+30=42\n12+30=42\n#### 42",
    "decimals": "3*4=12.5\n5*6=30\n12+30=42\n#### 42",
    "tail of an equation": "3*4=12 apples\n5*6=30\n12+30=42\n#### 42",
    "false in a label": "3*4=13: 3*4=12\n5*6=30\n12+30=42\n#### 42",
    "unknown number in a label": "step 7: 3*4=12\n5*6=30\n12+30=42\n#### 42",
    "hidden by a letter": "x3*4=12\n5*6=30\n12+30=42\n#### 42",
    "leading zeros": "03*4=12\n5*6=30\n12+30=42\n#### 42",
    "other digits": "3*4=12\n5*6=30\n12+30=42\n#### ٤٢",
    "other digits in a step": "٣*4=12\n5*6=30\n12+30=42\n#### 42",
    "other operators": "3*4=12\n60/2=30\n12+30=42\n#### 42",
    "result twice": "3*4=12\n#### 42\n5*6=30\n12+30=42\n#### 42",
    "more lines than needed": "3*4=12\n5*6=30\n3*4=12\n12+30=42\n#### 42",
    "an empty line": "3*4=12\n5*6=30\n\n12+30=42\n#### 42",
    "huge numbers": f"{'9' * 5000}*4=12\n5*6=30\n12+30=42\n#### 42",
    "huge result": f"3*4=12\n5*6=30\n12+30=42\n#### {'9' * 5000}",
    "ends on another result": "3*4=12\n12+30=42\n5*6=30\n#### 42",
    "result of a step before": "12+30=42\n5*6=30\n3*4=12\n#### 42",
}


@pytest.mark.parametrize("name", CHEATS)
def test_cheats_fail(name: str) -> None:
    item = Item("expression", "What is 3*4+5*6?", "3*4=12\n5*6=30\n12+30=42\n#### 42", {"result": 42, "steps": 3})
    assert item.check(item.answer)
    assert not item.check(CHEATS[name])


# --- lengths, in tokens


@pytest.mark.parametrize("split", ["train", "test"])
def test_lengths_in_tokens(tokenizer: Tokenizer, split: str) -> None:
    answers: list[int] = []
    for family in FAMILIES:
        for item in sample(family, split)[:200]:
            prompt, answer = suite.encode(tokenizer, item)
            assert len(prompt) <= 80, item.prompt
            assert 24 <= len(answer) <= 96, item.answer
            answers.append(len(answer))
    assert statistics.median(answers) >= 40


def test_every_digit_is_a_token(tokenizer: Tokenizer) -> None:
    digits = {tokenizer.encode(digit)[0] for digit in "0123456789"}
    assert len(digits) == 10
    for family in FAMILIES:
        for item in sample(family, "test")[:100]:
            for text in (item.prompt, item.answer):
                ids = tokenizer.encode(text)
                assert tokenizer.decode(ids) == text
                assert sum(i in digits for i in ids) == sum(sign.isdigit() for sign in text)


def test_training_and_generation_use_one_template(tokenizer: Tokenizer) -> None:
    item = sample("word", "train")[0]
    prompt, answer = suite.encode(tokenizer, item)
    assert prompt == tokenizer.encode_chat([{"role": "user", "content": item.prompt}])
    assert answer[-1] == tokenizer.eos_token_id and tokenizer.decode(answer[:-1]) == item.answer
    assert tokenizer.mask_token_id is not None and tokenizer.mask_token_id not in prompt + answer
