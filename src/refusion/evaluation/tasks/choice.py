"""Multiple choice: ARC-Challenge, MMLU-Pro, GPQA, AQuA. The answer is a letter.

All have one prompt and one way of reading the answer (`letter`); what differs is how the options are published:

    arc-c      JSON Lines, {"question": {"stem", "choices": [{"label", "text"}]}, "answerKey"}; or "question" and
               {"choices": {"label": [...], "text": [...]}}; or CSV with "(A) ... (B) ..." in `question`, and `AnswerKey`
    mmlu-pro   {"question", "options": [...], "answer": "I", "category"}
    gpqa       CSV with `Question`, `Correct Answer`, `Incorrect Answer 1` to `3`; shuffled here, by question and seed
    aqua       JSON Lines (in a file named .json), {"question", "options": ["A)...", ...], "correct"}
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from refusion.evaluation.tasks.base import Item, Record, Task, Verdict

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
PROMPT = (
    "Answer the following multiple choice question. Think step by step, then finish your answer with "
    '"the answer is (X)", where X is the letter of the right choice.\n\n{question}\n\n{options}'
)
ANSWER_IS = r"(?i:answer(?:\s+(?:choice|option))?[\s*_]*(?:is|:)[\s*_:]*)"
BEFORE = r"(?:[\s*_$({\[]|\\boxed|\\text(?:bf)?|\\mathrm|(?i:option|choice))*"


def letter(text: str, count: int) -> str | None:
    """The letter that an answer names, of the first `count` ones.

    The last "answer is (X)" or "answer: X"; without one, the last `\\boxed{X}`; else the last "(X)"; else the last letter that
    stands alone. (The usual harnesses do the same, but for the first of several "answer is"; a random letter, which some
    of them take at the end, is not taken.)

    >>> letter("The answer is (B). No: the answer is C.", 4), letter("(A) is wrong, so **(D)**", 4), letter("the answer is E", 4)
    ('C', 'D', None)
    """
    one = f"([{LETTERS[:count]}])(?![\\w'])"
    patterns = (rf"{ANSWER_IS}{BEFORE}{one}", rf"\\boxed{BEFORE}{one}", rf"\({one}\)", rf"(?<![\w']){one}")
    for pattern in patterns:
        found = re.findall(pattern, text)
        if found:
            return str(found[-1])
    return None


def asked(question: str, options: Sequence[str], right: int, group: str = "") -> Item:
    """The item of a question whose right option is number `right`."""
    lines = [f"{LETTERS[i]}. {option.strip()}" for i, option in enumerate(options)]
    prompt = PROMPT.format(question=question.strip(), options="\n".join(lines))
    return Item(prompt, LETTERS[right], group, {"count": len(options)})


def _judge(item: Item, response: str) -> Verdict:
    found = letter(response, item.facts["count"])
    return Verdict(found, found == item.gold)


def _checked(record: Record, question: str, options: Sequence[str], labels: Sequence[str], key: str, group: str = "") -> Item:
    """The item, if its key is one of the labels and there are options at all."""
    if not 2 <= len(options) <= len(LETTERS) or len(labels) != len(options):
        raise record.complaint(f"must have 2 to {len(LETTERS)} options, got {len(options)}")
    if key not in labels:
        raise record.complaint(f"the right answer must be one of {', '.join(labels)}, got {key!r:.40}")
    return asked(question, options, labels.index(key), group)


# --- ARC-Challenge


def _arc(record: Record, seed: int) -> Item:
    key = record.text("answerKey", "AnswerKey")
    question: Any = record.values.get("question")
    nested = question if isinstance(question, dict) else record.values
    stem, choices = nested.get("stem", question), nested.get("choices")
    if choices is None and isinstance(stem, str):
        stem, *parts = re.split(r"\s*\(([A-H1-8])\)\s+", stem)
        labels, options = parts[::2], parts[1::2]
    else:
        labels, options = _labelled(record, choices)
    if not isinstance(stem, str) or not stem.strip():
        raise record.complaint(f"'question' must be text, or have 'stem', got {question!r:.40}")
    return _checked(record, stem, options, labels, key)


def _labelled(record: Record, choices: Any) -> tuple[list[str], list[str]]:
    """Labels and options of [{"label", "text"}, ...] or {"label": [...], "text": [...]}."""
    try:
        if isinstance(choices, dict):
            return [str(label) for label in choices["label"]], [str(text) for text in choices["text"]]
        return [str(choice["label"]) for choice in choices], [str(choice["text"]) for choice in choices]
    except (KeyError, TypeError):
        raise record.complaint(f"'choices' must have 'label' and 'text', got {choices!r:.40}") from None


# --- the others


def _mmlu_pro(record: Record, seed: int) -> Item:
    options = [option for option in record.texts("options") if option != "N/A"]  # fillers of the first edition
    return _checked(
        record, record.text("question"), options, list(LETTERS[: len(options)]), record.text("answer").strip(),
        str(record.values.get("category", "")),
    )  # fmt: skip


def _gpqa(record: Record, seed: int) -> Item:
    question = record.text("Question")
    options = [record.text("Correct Answer"), *(record.text(f"Incorrect Answer {i}") for i in (1, 2, 3))]
    order = [0, 1, 2, 3]
    random.Random(f"gpqa {seed} {question}").shuffle(order)
    group = str(record.values.get("High-level domain") or "")
    return asked(question, [options[i] for i in order], order.index(0), group)


def _aqua(record: Record, seed: int) -> Item:
    options = record.texts("options")
    labels = [option[:1] for option in options]
    if any(not re.match(r"[A-Z]\)", option) for option in options):
        raise record.complaint(f"'options' must be of the form 'A)...', got {options!r:.60}")
    return _checked(record, record.text("question"), [option[2:] for option in options], labels, record.text("correct").strip())


ARC = Task(
    "arc-c",
    ("ARC-Challenge-Test.jsonl", "ARC-Challenge/ARC-Challenge-Test.jsonl", "*ARC-Challenge-Test.csv", "test.jsonl",
     "ARC-Challenge/test*.parquet", "test*.parquet"),
    "ARC-Challenge-Test.jsonl: JSON Lines with question, answerKey", "https://allenai.org/data/arc", _arc, _judge,
)  # fmt: skip
MMLU_PRO = Task(
    "mmlu-pro", ("test*.jsonl", "test*.json", "data/test*.parquet", "test*.parquet"),
    "JSON Lines (or Parquet, with pyarrow) with question, options, answer", "https://huggingface.co/datasets/TIGER-Lab/MMLU-Pro",
    _mmlu_pro, _judge,
)  # fmt: skip
GPQA = Task(
    "gpqa", ("gpqa_diamond.csv", "gpqa_main.csv", "gpqa_extended.csv", "dataset/gpqa_diamond.csv"),
    "gpqa_diamond.csv with Question, Correct Answer, Incorrect Answer 1 to 3", "https://github.com/idavidrein/gpqa",
    _gpqa, _judge,
)  # fmt: skip
AQUA = Task(
    "aqua", ("test.json", "test.jsonl"), "test.json: JSON Lines with question, options, correct",
    "https://github.com/google-deepmind/AQuA", _aqua, _judge,
)  # fmt: skip
