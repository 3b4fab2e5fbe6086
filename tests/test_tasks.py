"""Published benchmarks: their files become items, right answers count as right and wrong ones as wrong.

The files in data/benchmarks hold made-up items in the published formats.
"""

from __future__ import annotations

import doctest
import gzip
import importlib
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from refusion.config import UserError
from refusion.evaluation.tasks import TASKS, Item, Verdict, load
from refusion.evaluation.tasks.choice import letter
from refusion.evaluation.tasks.code import completed
from refusion.evaluation.tasks.mathematics import answer, equal
from refusion.evaluation.tasks.phrases import phrase
from refusion.evaluation.tasks.word_problems import number

DATA = Path(__file__).parent / "data" / "benchmarks"
FOLDERS = {  # one of each published format
    "gsm8k": "gsm8k", "math": "math", "math, 500": "math500/test.jsonl", "humaneval": "humaneval", "mbpp": "mbpp",
    "mbpp, sanitized": "mbpp/sanitized-mbpp.json", "arc-c": "arc-c", "arc-c, exported": "arc-c/exported.jsonl",
    "arc-c, csv": "arc-c/published.csv", "mmlu-pro": "mmlu-pro", "gpqa": "gpqa", "bbh": "bbh",
    "bbh, one": "bbh/word_sorting.json", "aqua": "aqua",
}  # fmt: skip
# A response around the reference answer, and one that is wrong.
RESPONSES = {
    "gsm8k": ("First 2 + 2 = 4.\n#### {gold}", "First {gold}.\n#### 99"),
    "math": ("It is $\\boxed{{1}}$, no: $\\boxed{{{gold}}}$.", "$\\boxed{{{gold}}}$ is wrong, it is \\boxed{{17}}."),
    "humaneval": ("{gold}", "    return None"),
    "mbpp": ("Sure!\n```python\n{gold}\n```\nIt works.", "```python\npass\n```"),
    "arc-c": ("Ice is cold, so the answer is ({gold}).", "The answer is {gold}? No, the answer is ({other})."),
    "bbh": ("Step by step. So the answer is {gold}.", "So the answer is (Z)."),
}
RESPONSES |= dict.fromkeys(("mmlu-pro", "gpqa", "aqua"), RESPONSES["arc-c"])


def items_of(name: str) -> list[Item]:
    return load(TASKS[name.partition(",")[0]], DATA / FOLDERS[name])


@pytest.mark.parametrize("name", FOLDERS)
def test_reference_answers_are_right_and_others_wrong(name: str) -> None:
    task = TASKS[name.partition(",")[0]]
    right, wrong = RESPONSES[task.name]
    items = items_of(name)
    assert items
    for item in items:
        good, bad = (text.format(gold=item.gold, other="B" if item.gold == "A" else "A") for text in (right, wrong))
        assert task.verdict(item, good).right, item
        assert not task.verdict(item, bad).right, item
        assert task.verdict(item, "").right is False
        thought = f"<think>{bad}</think>\n\n{good}"
        assert task.verdict(item, thought).right, "what was thought aloud is not the answer"


def test_every_task_is_in_some_format_here() -> None:
    assert {name.partition(",")[0] for name in FOLDERS} == set(TASKS) == set(RESPONSES)


def test_the_published_solutions_of_word_problems_are_right() -> None:
    solutions = [json.loads(line) for line in (DATA / "gsm8k/test.jsonl").read_text().splitlines()]
    for item, entry in zip(items_of("gsm8k"), solutions, strict=True):
        assert TASKS["gsm8k"].verdict(item, entry["answer"]).right
        assert entry["question"] in item.prompt and entry["answer"] not in item.prompt


def test_what_is_asked() -> None:
    assert [item.gold for item in items_of("gsm8k")] == ["8", "1800", "-4"]
    assert [item.gold for item in items_of("math")] == ["\\frac{1}{2}", "3\\sqrt{2}", "2{,}000"], "subjects in turn"
    assert items_of("math")[0].prompt.endswith("put your final answer within \\boxed{}.")
    assert len(items_of("mbpp")) == 2, "of the whole file, the test split"
    assert "class Node" not in items_of("mbpp")[0].prompt and "assert values(None) == []" in items_of("mbpp")[0].prompt
    first, second = items_of("arc-c")
    assert first.prompt.endswith("A. a stone\nB. a nail\nC. an ice cube\nD. a cup") and first.gold == "C"
    assert second.prompt.endswith("A. water\nB. light\nC. sound") and second.gold == "A", "figures become letters"
    assert first.prompt == items_of("arc-c, exported")[0].prompt == items_of("arc-c, csv")[0].prompt
    assert [item.group for item in items_of("mmlu-pro")] == ["business", "physics", "business"], "groups in turn"
    assert "N/A" not in items_of("mmlu-pro")[2].prompt
    assert [item.group for item in items_of("bbh")[:3]] == ["boolean_expressions", "date_understanding", "word_sorting"]
    assert items_of("aqua")[0].prompt.endswith("D. 120 km/h\nE. 240 km/h")


def test_options_are_shuffled_by_the_seed_and_nothing_else() -> None:
    task = TASKS["gpqa"]
    golds = {seed: [item.gold for item in load(task, DATA / "gpqa", seed)] for seed in range(8)}
    assert golds[0] == [item.gold for item in items_of("gpqa")]
    assert len({tuple(letters) for letters in golds.values()}) > 4
    for seed in golds:
        for item in load(task, DATA / "gpqa", seed):
            right = next(line[3:] for line in item.prompt.splitlines() if line.startswith(f"{item.gold}. "))
            assert right in ("6", "T, C", "newton", "radio")


# --- reading answers


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("#### 18", "18"), ("####18", "18"), ("#### $1,234.50.", "1234.50"), ("#### -3\n#### 4", "-3"), ("#### -$3", "-3"),
        ("#### **12**", "12"), ("It is 5.", "5"), ("5 apples, 6 pears", "6"), ("It costs $3,000.", "3000"), ("about .5", ".5"),
        ("#### none, perhaps 7", "7"), ("nothing", None), ("", None), ("version 1.2.3", "3"), ("10%", "10"),
    ],
)  # fmt: skip
def test_numbers(text: str, found: str | None) -> None:
    got = number(text)
    assert got == found or (found == "3" and got == ".3")


def test_equal_numbers() -> None:
    judge = TASKS["gsm8k"].judge
    item = Item("", "18")
    assert judge(item, "#### 18.00").right and judge(item, "#### 018").right and not judge(item, "#### 18.5").right


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (r"\frac12", "0.5"), (r"\dfrac{1}{2}", r"\frac{1}{2}"), ("1/2", r"\tfrac12"), (r"-\frac{1}{2}", r"\frac{-1}{2}"),
        ("x = 5", "5"), ("5", "5.0"), (r"\sqrt3", r"\sqrt{3}"), (r"\left(1, 2\right)", "(1,2)"), (r"90^\circ", "90"),
        (r"90^{\circ}", "90"), (r"\$12", "12"), (r"25\%", "25"), ("1,000", "1000"), (r"10,\!000", "10000"), (".5", "0.5"),
        (r"5\text{ cm}", "5"), (r"5\text{ cm}^2", "5"), (r"\text{Monday}", "Monday"), (r"\text{(C)}", "(C)"), ("3.", "3"),
        (r"\frac{3}{6}", r"\frac12"), (r"2\,000", "2000"), (r"\frac1{72}", r"\frac{1}{72}"),
    ],
)  # fmt: skip
def test_equal_in_mathematics(a: str, b: str) -> None:
    assert equal(a, b) and equal(b, a)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("1", "2"), (r"\frac12", r"\frac{1}{3}"), ("(1,2)", "(2,1)"), ("x", "y"), ("1,2", "12"), ("-5", "5"), ("", "0"),
        (r"\frac{1}{0}", r"\frac{2}{0}"), (r"\sqrt{2}", "2"), ("x=5", "y=6"), ("9" * 5000, "8" * 5000),
    ],
)  # fmt: skip
def test_not_equal_in_mathematics(a: str, b: str) -> None:
    assert not equal(a, b)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"\boxed{1} then \boxed{2}", "2"), (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"), (r"\fbox{7}", "7"),
        (r"\boxed{\left\{1,2\right.}", r"\left\{1,2\right."), (r"\boxed{5", None), (r"\boxed{4} and \boxed{5", "4"),
        ("The final answer is $7$.", "7"), ("The answer is: 12", "12"), ("no box", None), (r"\boxed {3}", "3"),
    ],
)  # fmt: skip
def test_boxes(text: str, found: str | None) -> None:
    assert answer(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("the answer is (B)", "B"), ("The answer is B.", "B"), ("**Answer:** C", "C"), ("Answer: (D)", "D"), ("ANSWER IS A", "A"),
        ("The correct answer is: **(B)**", "B"), (r"The answer is \boxed{C}.", "C"), (r"so $\boxed{\text{D}}$", "D"), ("B", "B"),
        ("The answer is option C", "C"), ("The correct answer choice is (A).", "A"), ("A or B? It must be (B), not C", "B"),
        ("Answer: Apples are best, so D", "D"), ("the answer is (E)", None), ("none", None), ("", None), ("ABC", None),
        ("the answer is (A). Wait, no: the answer is (C)", "C"), ("The answer is not B", "B"),
    ],
)  # fmt: skip
def test_letters(text: str, found: str | None) -> None:
    assert letter(text, 4) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("So the answer is ] ).", "] )"), ("The answer is: 'valid'", "valid"), ("x\n**Yes**\n", "Yes"), ("", None),
        ("The answer is 1. No, the answer is 2.", "1. No, the answer is 2"), ("The answer is 1.\nThe answer is 2.", "2"),
    ],
)  # fmt: skip
def test_phrases(text: str, found: str | None) -> None:
    assert phrase(text) == found


PROMPT = 'import math\n\ndef g(x):\n    return x\n\ndef f(x):\n    """ One more. """\n'
WHOLE = "def f(x):\n    return g(x) + 1"
TESTS = "def check(candidate):\n    assert candidate(1) == 2 and math.pi > 3"


@pytest.mark.parametrize(
    "response",
    [
        "    return g(x) + 1", "    return g(x) + 1\n\nprint(f(2)", "\n    return g(x) + 1\n```\nThat is all.", "return g(x) + 1",
        "y = g(x)\n    return y + 1", WHOLE, f"Here:\n{WHOLE}", f"```python\n{WHOLE}\n```", f"```\n{WHOLE}\n```\n```\nf(3)\n```",
        f"Use:\n```py\nf(1)\n```\nwith\n```python\n{WHOLE}\n```", f"```python\n{WHOLE}", "```python\n    return g(x) + 1\n```",
        f"```python\n{PROMPT}    return x + 1\n```", f"   ```python\n{WHOLE}\n```", f"```python\r\n{WHOLE}\r\n```\r\n",
        "    return g(x) + 1\n\n\ndef f(x):\n    return 0", f"```python\n{WHOLE}\n\nif __name__ == '__main__':\n    f(None)\n```",
    ],
)  # fmt: skip
def test_code_is_found(response: str) -> None:
    task, facts = TASKS["humaneval"], {"name": "f", "prompt": PROMPT, "test": TESTS}
    verdict = task.verdict(Item("", "", facts=facts), response)
    assert verdict.right, (verdict.note, completed(PROMPT, response, "f"))


def test_code_that_misbehaves_is_wrong_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = TASKS["mbpp"]
    item = next(item for item in items_of("mbpp, sanitized"))
    mark = tmp_path / "mark"
    bad = {
        "while True: pass": "out of time", "x = [0] * 10**10": "MemoryError", "import os; os.fork()": "ValueError: not allowed",
        f"open({str(mark)!r}, 'w')": "ValueError: not allowed", "open('/etc/passwd').read()": "ValueError: not allowed",
        "import socket; socket.socket()": "ImportError: socket", "import sys; sys.exit(0)": "SystemExit",
    }  # fmt: skip
    for code, note in bad.items():
        monkeypatch.setattr("refusion.evaluation.tasks.code.SECONDS", 1.0 if note == "out of time" else 60.0)
        verdict = task.verdict(item, f"```python\n{code}\ndef diagonal(a, b):\n  return 5\n```")
        assert not verdict.right and verdict.note.startswith(note), (code, verdict.note)
    assert not mark.exists()
    assert task.verdict(item, item.gold).right, "and the next one runs"


# --- files


def test_gzip_json_and_lines_are_all_the_same(tmp_path: Path) -> None:
    lines = (DATA / "gsm8k/test.jsonl").read_bytes()
    entries = [json.loads(line) for line in lines.splitlines()]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "b.json").write_text(json.dumps(entries, indent=2))
    (tmp_path / "c.json").write_bytes(b"\xef\xbb\xbf" + lines)
    (tmp_path / "d.json.gz").write_bytes(gzip.compress(json.dumps(entries).encode()))
    for file in tmp_path.iterdir():
        assert load(TASKS["gsm8k"], file) == items_of("gsm8k"), file.name


def test_numbered_files_come_in_numeric_order(tmp_path: Path) -> None:
    shutil.copytree(DATA / "math" / "test", tmp_path / "m")
    golds = [item.gold for item in load(TASKS["math"], tmp_path / "m" / "algebra")]
    assert golds == ["\\frac{1}{2}", "2{,}000"], "2.json before 10.json"


def test_parquet_is_read_by_pyarrow_or_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "test-00000-of-00001.parquet"
    file.write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UserError, match=r"pip install pyarrow.*JSON Lines"):
        load(TASKS["mmlu-pro"], tmp_path)
    rows = [json.loads(line) for line in (DATA / "mmlu-pro/test.jsonl").read_text().splitlines()]
    module = ModuleType("pyarrow.parquet")
    module.read_table = lambda path: SimpleNamespace(to_pylist=lambda: rows)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyarrow", ModuleType("pyarrow"))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", module)
    assert load(TASKS["mmlu-pro"], tmp_path) == items_of("mmlu-pro")


@pytest.mark.parametrize("name", TASKS)
def test_a_missing_file_says_what_is_wanted_and_where_it_is(name: str, tmp_path: Path) -> None:
    for path in (None, tmp_path / "nowhere.jsonl", tmp_path):
        with pytest.raises(UserError) as caught:
            load(TASKS[name], path)
        text = str(caught.value)
        assert TASKS[name].url in text and TASKS[name].form in text and "\n" not in text
        assert path is None or str(path) in text


GOOD = '{"question": "1+1?", "answer": "#### 2"}\n'
BROKEN = {
    "not JSON": ("gsm8k", "a.jsonl", GOOD + "{", ":2: not JSON"),
    "an array that breaks off": ("mbpp", "a.json", '[\n{"task_id": 1},\n', ":3: not JSON"),
    "no object": ("gsm8k", "a.jsonl", GOOD + "\n\n[1]\n", ":4: must be an object"),
    "missing key": ("gsm8k", "a.jsonl", GOOD + '{"question": "x"}\n', ":2: 'answer'"),
    "no ####": ("gsm8k", "a.jsonl", '{"question": "x", "answer": "2"}', ":1: 'answer' must end"),
    "half a character": ("gsm8k", "a.jsonl", '{"question": "\\ud800", "answer": "#### 2"}', "surrogate"),
    "no text": ("gsm8k", "a.jsonl", '{"question": 5, "answer": "#### 2"}', "'question' must be text"),
    "empty": ("gsm8k", "a.jsonl", "\n", "no items"),
    "another ending": ("gsm8k", "a.txt", GOOD, ".jsonl"),
    "no gzip": ("gsm8k", "a.jsonl.gz", GOOD, "cannot be read"),
    "no box": ("math", "a.json", '{"problem": "x", "solution": "5"}', "boxed"),
    "key that is no option": ("aqua", "a.json", '{"question": "x", "options": ["A)1", "B)2"], "correct": "C"}', "one of A, B"),
    "options of another form": ("aqua", "a.json", '{"question": "x", "options": ["1", "2"], "correct": "A"}', "'A)...'"),
    "one option": ("mmlu-pro", "a.jsonl", '{"question": "x", "options": ["1"], "answer": "A"}', "2 to 26 options"),
    "options that are text": ("mmlu-pro", "a.jsonl", '{"question": "x", "options": "1 2", "answer": "A"}', "list of texts"),
    "two letters": ("mmlu-pro", "a.jsonl", '{"question": "x", "options": ["1", "2"], "answer": "AB"}', "'AB'"),
    "no choices": ("arc-c", "a.jsonl", '{"question": {"stem": "x"}, "answerKey": "A"}', "2 to 26 options"),
    "choices without text": ("arc-c", "a.jsonl", '{"question": "x", "choices": [{"label": "A"}], "answerKey": "A"}', "'choices'"),
    "no assertions": ("mbpp", "a.jsonl", '{"text": "x", "code": "y", "test_list": []}', "test_list"),
    "another function": (
        "humaneval", "a.jsonl", '{"prompt": "def f():", "entry_point": "g", "test": "x"}', "must define the function 'g'",
    ),
    "column that is missing": ("gpqa", "a.csv", "Question,Correct Answer\nx,y\n", ":2: 'Incorrect Answer 1'"),
    "too many fields": ("gpqa", "a.csv", "Question\nx,y\n", ":2: more fields"),
    "open quote": ("gpqa", "a.csv", 'Question\n"x\n', "not CSV"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_named_with_their_line(name: str, tmp_path: Path) -> None:
    task, file, text, complaint = BROKEN[name]
    path = tmp_path / file
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load(TASKS[task], path)
    assert complaint in str(caught.value) and str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD.encode() + b"\xff\n")
    with pytest.raises(UserError, match=r"a\.jsonl:2: not UTF-8"):
        load(TASKS["gsm8k"], path)


@pytest.mark.parametrize("name", ["tasks.word_problems", "tasks.mathematics", "tasks.choice", "tasks.code", "tasks.phrases",
                                  "tasks.files", "samples"])  # fmt: skip
def test_examples_in_docstrings(name: str) -> None:
    outcome = doctest.testmod(importlib.import_module(f"refusion.evaluation.{name}"))
    assert outcome.attempted > 0 and outcome.failed == 0


def test_verdicts_are_plain() -> None:
    assert Verdict("8", True) == TASKS["gsm8k"].verdict(items_of("gsm8k")[0], "8")
