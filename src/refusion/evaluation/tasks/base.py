"""What all benchmarks have in common: records of a file become items, answers become verdicts.

Contract: a task reads one published format and judges text; it knows no model, no tokenizer and no settings. The same file and
seed give the same items in the same order. Whatever is wrong with a record is a `UserError` that names file and line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from refusion.config import UserError


@dataclass(frozen=True)
class Record:
    """One entry of a benchmark's file."""

    values: Mapping[str, Any]
    place: str  # file and line, for complaints
    stem: str  # name of the file without its endings

    def complaint(self, text: str) -> UserError:
        return UserError(f"{self.place}: {text}")

    def text(self, *keys: str) -> str:
        """The text under the first of `keys` that is there."""
        key = next((key for key in keys if key in self.values), keys[0])
        value = self.values.get(key)
        if not isinstance(value, str) or not value.strip():
            raise self.complaint(f"{' or '.join(map(repr, keys))} must be text, got {value!r:.40}")
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise self.complaint(f"{key!r} holds half of a surrogate pair")
        return value

    def texts(self, key: str) -> list[str]:
        """The list of texts under `key`."""
        value = self.values.get(key)
        if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(v, str) for v in value):
            raise self.complaint(f"{key!r} must be a list of texts, got {value!r:.40}")
        return list(value)


@dataclass(frozen=True)
class Item:
    """One question. `facts` holds what the judge needs beyond the reference answer `gold`."""

    prompt: str  # one user turn
    gold: str
    group: str = ""  # subject or part of the benchmark; counted on its own in reports
    facts: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Verdict:
    """What was read from an answer, and whether it is right."""

    extracted: str | None  # None: nothing that could be an answer
    right: bool
    note: str = ""  # why not, where there is something to say


@dataclass(frozen=True)
class Task:
    """A benchmark.

    files: patterns to look for in a folder, in order of preference; the first that is there is taken. read: a record and the
    seed of what is shuffled, as an item. judge: an item and the answer's text. choose: the part of all items that is asked.
    """

    name: str
    files: tuple[str, ...]
    form: str  # of the file, in words
    url: str  # where it is published
    read: Callable[[Record, int], Item]
    judge: Callable[[Item, str], Verdict]
    choose: Callable[[list[Item]], list[Item]] = field(default=lambda items: items)

    def verdict(self, item: Item, response: str) -> Verdict:
        """Judge a whole response: of a model that thinks aloud, what stands after its last `</think>`."""
        return self.judge(item, response.rpartition("</think>")[2])
