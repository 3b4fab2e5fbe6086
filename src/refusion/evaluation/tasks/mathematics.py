"""MATH: competition problems whose answer stands in a box.

Published as one JSON file a problem, {"problem", "level", "type", "solution"}, in folders by subject (MATH/test/algebra/1.json);
its 500-problem subset as JSON Lines with "subject" and "answer" besides. Without "answer", the last box of "solution" is the
reference.
"""

from __future__ import annotations

import re
from fractions import Fraction

from refusion.evaluation.tasks.base import Item, Record, Task, Verdict

PROMPT = "{problem}\n\nReason step by step, and put your final answer within \\boxed{{}}."
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
PHRASE = re.compile(r"(?i:final answer is|answer is)\s*:?\s*(.+)")
TEXT = r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}"
# Spelling that means nothing, in the order in which it is put right.
SPELLING = (
    (r"\{,\}", ","), (r"\\[cdt]frac", r"\\frac"), (r"\\(?:left|right)(?![a-zA-Z])", ""), (r"(?<!\\)\\[!,;: ]|~", ""),
    (r"\^\{?\\circ\}?|\\degree", ""), (r"\\?\$|\\?%", ""), (r"\\sqrt\s*([^\s{\[\\])", r"\\sqrt{\1}"),
    (r"\\frac\s*([^\s{\\])\s*([^\s{\\])", r"\\frac{\1}{\2}"),
    (r"\\frac\s*([^\s{\\])\s*\{", r"\\frac{\1}{"), (r"(\\frac\{[^{}]*\})\s*([^\s{\\])", r"\1{\2}"), (r"\s+", ""),
    (r"^\\?[a-zA-Z]{1,2}=(?!.*=)", ""), (r"(?<!\d)\.(?=\d)", "0."), (r"\.$", ""), (r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}"),
)  # fmt: skip


def last_box(text: str) -> str | None:
    """What stands in the last complete `\\boxed{...}` (or `\\fbox`), with balanced braces; None without one.

    >>> last_box(r"\\boxed{1} and \\boxed{\\frac{1}{2}}"), last_box(r"\\boxed{1")
    ('\\\\frac{1}{2}', None)
    """
    contents = [_balanced(text, match.end()) for match in BOX.finditer(text)]
    return next((content for content in reversed(contents) if content is not None), None)


def _balanced(text: str, start: int) -> str | None:
    """The text from `start` to the brace that closes the one before it; escaped braces do not count."""
    depth = 1
    for match in re.compile(r"\\.|[{}]", re.S).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return text[start : match.start()]
    return None


def answer(text: str) -> str | None:
    """The answer in a solution: the last box; without one, what follows the last "answer is" on its line."""
    boxed = last_box(text)
    if boxed is not None:
        return boxed.strip()
    phrases = PHRASE.findall(text)
    return phrases[-1].strip().rstrip(".").strip("$* ") if phrases else None


def normalised(answer: str) -> str:
    """One spelling for what the usual harnesses hold for the same.

    Spaces, `\\left`, `\\right`, `$`, `%`, degrees and a unit in `\\text{}` at the end go; so does `x=` before a value; dfrac and
    tfrac are frac; `\\frac12` and 1/2 are `\\frac{1}{2}`; `\\sqrt3` is `\\sqrt{3}`; .5 is 0.5; 1,000 is 1000.

    >>> normalised(r"x = \\dfrac12"), normalised(r"1,250\\text{ cm}^2"), normalised(r"\\text{(B)}")
    ('\\\\frac{1}{2}', '1250', '(B)')
    """
    text = answer.strip()
    if not re.match(TEXT, text):
        text = re.sub(TEXT + r"(?:\^\{?\d\}?)?\s*\.?$", "", text)
    text = re.sub(TEXT, r"\1", text)
    for pattern, put in SPELLING:
        text = re.sub(pattern, put, text)
    grouped = re.fullmatch(r"-?\d{1,3}(?:,(?:\\!)?\d{3})+(?:\.\d+)?", text)
    return text.replace(",", "") if grouped else text


def _value(text: str) -> Fraction | None:
    """The number that a normalised answer is, if it is one."""
    decimal = re.fullmatch(r"-?\d{1,40}(?:\.\d{1,40})?", text)
    if decimal:
        return Fraction(text)
    fraction = re.fullmatch(r"(-?)\\frac\{(-?\d{1,40})\}\{(-?\d{1,40})\}", text)
    if fraction is None or int(fraction[3]) == 0:
        return None
    return Fraction(int(fraction[2]), int(fraction[3])) * (-1 if fraction[1] else 1)


def equal(a: str, b: str) -> bool:
    """Whether two answers are the same in normalised spelling, or as numbers. No algebra: x+1 is not 1+x."""
    first, second = normalised(a), normalised(b)
    return first == second or (_value(first) is not None and _value(first) == _value(second))


def _read(record: Record, seed: int) -> Item:
    gold = record.text("answer") if "answer" in record.values else last_box(record.text("solution"))
    if gold is None:
        raise record.complaint("'solution' must hold \\boxed{...}, or the record must have 'answer'")
    group = record.values.get("subject") or record.values.get("type") or ""
    return Item(PROMPT.format(problem=record.text("problem").strip()), gold.strip(), str(group))


def _judge(item: Item, response: str) -> Verdict:
    found = answer(response)
    return Verdict(found, found is not None and equal(found, item.gold))


MATH = Task(
    "math", ("test.jsonl", "math*.jsonl", "test/*/*.json", "*/*.json", "*.json"),
    "a folder test/SUBJECT/N.json with problem, solution (or JSON Lines, as MATH-500)", "https://github.com/hendrycks/math",
    _read, _judge,
)  # fmt: skip
