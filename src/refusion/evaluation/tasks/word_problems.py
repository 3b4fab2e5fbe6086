"""GSM8K: word problems with a number as the answer.

Published as JSON Lines: {"question", "answer"}, the answer worked out in lines with `#### 18` as the last one.
"""

from __future__ import annotations

import re
from decimal import Decimal

from refusion.evaluation.tasks.base import Item, Record, Task, Verdict

PROMPT = "{question}\n\nThink step by step. End with a line of the form `#### N`, where N is the answer as a plain number."
NUMBER = r"(?:-\$?|\$-?)?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)"


def number(text: str) -> str | None:
    """The answer in a worked solution: the number after the first `####`; without one, the last number of the text.

    Commas and `$` are taken off. The usual harnesses do the same (strict and flexible match of lm-eval).

    >>> number("5 - 2 = 3\\n#### $1,003."), number("It is 12, so 13 in all."), number("I do not know")
    ('1003', '13', None)
    """
    marked = re.search(rf"####[\s*$]*({NUMBER})", text)
    found = [marked[1]] if marked else re.findall(NUMBER, text)
    return re.sub(r"[,$]", "", found[-1]) if found else None


def equal(a: str, b: str) -> bool:
    """Whether two numbers are the same: 18 is 18.00 here, while the usual harnesses compare the digits as text."""
    return Decimal(a) == Decimal(b)


def _read(record: Record, seed: int) -> Item:
    gold = number(record.text("answer"))
    if gold is None or "####" not in record.text("answer"):
        raise record.complaint("'answer' must end with #### and a number")
    return Item(PROMPT.format(question=record.text("question").strip()), gold)


def _judge(item: Item, response: str) -> Verdict:
    found = number(response)
    return Verdict(found, found is not None and equal(found, item.gold))


GSM8K = Task(
    "gsm8k", ("test.jsonl", "gsm8k.jsonl", "main/test*.parquet", "test*.parquet"),
    "test.jsonl: JSON Lines with question, answer", "https://github.com/openai/grade-school-math", _read, _judge,
)  # fmt: skip
