"""BIG-Bench Hard: 27 tasks whose answer is an option, a word, a number or a list.

Published as one JSON file a task: {"canary", "examples": [{"input", "target"}]}.
"""

from __future__ import annotations

import re

from refusion.evaluation.tasks.base import Item, Record, Task, Verdict
from refusion.evaluation.tasks.choice import LETTERS, letter

PROMPT = '{input}\n\nThink step by step, then finish your answer with a line of the form "So the answer is ANSWER."'
PHRASE = re.compile(r"(?i:answer)[\s*_]*(?:is|:)[ \t*_:]*(.+)")


def phrase(text: str) -> str | None:
    """What follows the last "answer is" on its line; without one, the last line that is not empty.

    >>> phrase("4 + 5 = 9.\\nSo the answer is **9**."), phrase("Well.\\nvalid\\n")
    ('9', 'valid')
    """
    found = PHRASE.findall(text) or text.split("\n")
    lines = [bare(line) for line in found if bare(line)]
    return lines[-1] if lines else None


def bare(text: str) -> str:
    """A phrase without quotes, marks of emphasis and the full stop around it."""
    return re.sub(r"\.?[\s*_`\"'$]*\.?$", "", text.strip().lstrip("*_`\"'$ "))


def normalised(text: str) -> str:
    """Lower case, single spaces, no commas: lists of words are published with spaces between."""
    return " ".join(text.replace(",", " ").lower().split())


def _read(record: Record, seed: int) -> Item:
    return Item(PROMPT.format(input=record.text("input").strip()), record.text("target").strip(), record.stem)


def _judge(item: Item, response: str) -> Verdict:
    """An option as in the other multiple choice tasks (`choice.letter`); anything else by `phrase`, in `normalised` spelling."""
    if re.fullmatch(r"\([A-Z]\)", item.gold):
        found = letter(response, len(LETTERS))
        return Verdict(found, found == item.gold[1])
    said = phrase(response)
    return Verdict(said, said is not None and normalised(said) == normalised(bare(item.gold)))


BBH = Task(
    "bbh", ("bbh/*.json", "*.json"), "a folder of TASK.json, or one of them, with examples: input, target",
    "https://github.com/suzgunmirac/BIG-Bench-Hard", _read, _judge,
)  # fmt: skip
