"""Accuracy and tokens per forward of a model on the nano suite.

Contract: one setting for all families; every answer is judged by its task's own checker; tokens per forward is all
tokens over all forwards, never a mean of ratios.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from refusion.config import AutoregressiveConfig, DecodeConfig, UserError, nearest
from refusion.evaluation import procedural
from refusion.events import Committed, Event
from refusion.generate import Config, Model, Result

SUITES = ("nano",)


@dataclass
class Tally:
    """Sums over answers."""

    n: int = 0
    right: int = 0
    tokens: int = 0
    forwards: int = 0
    seconds: float = 0.0
    long: int = 0  # answers of 3 slots or more
    reordered: int = 0  # of these, written out of order

    def add(self, result: Result, right: bool) -> None:
        self.n += 1
        self.right += right
        self.tokens += result.stats.tokens
        self.forwards += result.stats.forwards
        self.seconds += result.stats.seconds
        slot_size = result.settings.get("slot_size")
        if slot_size and result.stats.tokens > 2 * slot_size:
            self.long += 1
            self.reordered += out_of_order(result.events, result.stats.tokens)

    @property
    def accuracy(self) -> float:
        return self.right / max(1, self.n)

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / max(1, self.forwards)


def out_of_order(events: tuple[Event, ...], tokens: int) -> bool:
    """Whether some token of the answer was committed in an earlier round than a token before it."""
    written = {
        position: event.round for event in events if isinstance(event, Committed) for position in event.positions
    }  # fmt: skip
    rounds = [written[position] for position in range(tokens) if position in written]
    return any(later < earlier for earlier, later in pairwise(rounds))


def evaluate(
    model: Model, suite: str = "nano", split: str = "test", limit: int = 100, config: Config | None = None,
    progress: Callable[[int, int, str], None] | None = None, families: tuple[str, ...] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Answer the first `limit` tasks of every family and judge them.

    progress: called with (done, total, note) after every answer. Raises `UserError` for an unknown suite or split.
    """
    if suite not in SUITES:
        raise UserError(f"unknown suite {suite!r}; there is {', '.join(SUITES)}{nearest(suite, SUITES)}")
    if limit < 1:
        raise UserError(f"limit must be at least 1, got {limit}")
    chosen = families or procedural.FAMILIES
    tallies = {family: Tally() for family in chosen}
    whole, done = Tally(), 0
    for family in chosen:
        for item in procedural.take(family, split, limit):
            result = model.generate(item.prompt, config)
            right = item.check(result.text)
            tallies[family].add(result, right)
            whole.add(result, right)
            done += 1
            if progress is not None:
                progress(done, limit * len(chosen), "")
    return _report(model, tallies, whole, config, suite, split)


def _report(
    model: Model, tallies: dict[str, Tally], whole: Tally, config: Config | None, suite: str, split: str
) -> dict[str, Any]:
    settings = model.settings(config)
    report = {
        "model": model.name, "suite": suite, "split": split,
        "method": settings.method,
        "families": {
            name: {"accuracy": tally.accuracy, "tokens_per_forward": tally.tokens_per_forward, "n": tally.n}
            for name, tally in tallies.items()
        },
        "accuracy": whole.accuracy,
        "stderr": math.sqrt(whole.accuracy * (1 - whole.accuracy) / max(1, whole.n)), "n": whole.n,
        "tokens_per_forward": whole.tokens_per_forward, "tokens_per_second": whole.tokens / max(1e-9, whole.seconds),
        "settings": settings.to_dict(),
    }  # fmt: skip
    if isinstance(settings, DecodeConfig):
        report["out_of_order"] = whole.reordered / max(1, whole.long)  # of the answers of 3 slots or more
    return report


def validation_decode(model: Model, limit: int) -> dict[str, float]:
    """Accuracy on the validation split, by the model's own method and token by token, where it can, as training logs it."""
    record: dict[str, float] = {}
    if model.method != "autoregressive":
        own = evaluate(model, split="validation", limit=limit)
        record |= {"accuracy": own["accuracy"], "tokens_per_forward": own["tokens_per_forward"]}
        record |= {f"accuracy_{family}": entry["accuracy"] for family, entry in own["families"].items()}
    if model.by_token:
        record["accuracy_autoregressive"] = evaluate(
            model, split="validation", limit=limit, config=AutoregressiveConfig()
        )["accuracy"]  # fmt: skip
    return record
