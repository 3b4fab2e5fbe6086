"""Evaluation: sums, not means of ratios; order of writing; one setting for all; errors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from refusion.config import AutoregressiveConfig, DecodeConfig, UserError
from refusion.evaluation import procedural
from refusion.evaluation.evaluate import evaluate, out_of_order
from refusion.events import Committed
from refusion.generate import Result, Stats


@dataclass
class Clerk:
    """Stands in for a model: knows every third answer, and takes forwards as told."""

    name: str = "clerk"
    forwards: tuple[int, ...] = (2, 10)
    asked: list[str] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)
    configs: set[Any] = field(default_factory=set)

    def settings(self, config: Any) -> Any:
        return (config or DecodeConfig()).resolve()

    def generate(self, prompt: str, config: Any) -> Result:
        number = len(self.asked)
        self.asked.append(prompt)
        self.configs.add(config)
        text = self.answers[prompt] if number % 3 == 0 else "no idea"
        stats = Stats(9, 20, self.forwards[number % 2], 99, 1, 0.5)
        order = (Committed(0, (8, 9), (1, 1)), Committed(1, tuple(range(8)), (1,) * 8))
        settings = self.settings(config).to_dict()
        return Result(text, (1,) * 20, "stop", order if number % 2 else (), stats, settings, (1,))


@pytest.fixture
def clerk() -> Clerk:
    items = [item for family in procedural.FAMILIES for item in procedural.take(family, "test", 6)]
    return Clerk(answers={item.prompt: item.answer for item in items})


def test_report(clerk: Clerk) -> None:
    seen: list[tuple[int, int, str]] = []
    report = evaluate(clerk, "nano", "test", 6, DecodeConfig(slot_size=4), lambda *x: seen.append(x))  # type: ignore[arg-type]
    count = len(procedural.FAMILIES) * 6
    assert report["accuracy"] == pytest.approx(1 / 3)
    assert all(entry["accuracy"] == pytest.approx(1 / 3) and entry["n"] == 6 for entry in report["families"].values())
    assert report["tokens_per_forward"] == pytest.approx(20 * count / (12 * count / 2)), "all tokens over all forwards"
    assert report["tokens_per_second"] == pytest.approx(40)
    assert report["stderr"] == pytest.approx((1 / 3 * 2 / 3 / count) ** 0.5)
    assert report["settings"]["slot_size"] == 4 and len(clerk.configs) == 1, "one setting for all families"
    assert report["out_of_order"] == pytest.approx(0.5)
    assert seen[-1] == (count, count, "") and len(seen) == count


def test_the_first_items_are_the_same_for_any_limit(clerk: Clerk) -> None:
    evaluate(clerk, limit=2, config=AutoregressiveConfig(), families=("list",))  # type: ignore[arg-type]
    first = clerk.asked.copy()
    clerk.asked.clear()
    evaluate(clerk, limit=6, config=AutoregressiveConfig(), families=("list",))  # type: ignore[arg-type]
    assert clerk.asked[:2] == first


def test_out_of_order() -> None:
    def commits(*spans: tuple[int, range]) -> tuple[Committed, ...]:
        return tuple(Committed(round, tuple(span), (0,) * len(span)) for round, span in spans)

    assert not out_of_order(commits((0, range(0, 4)), (1, range(4, 8))), 8)
    assert out_of_order(commits((0, range(4, 8)), (1, range(0, 4))), 8)
    assert not out_of_order(commits((0, range(8, 12)), (0, range(0, 4)), (1, range(4, 8))), 4), "what stands after the end"


@pytest.mark.parametrize(
    ("suite", "split", "limit", "word"),
    [("nono", "test", 1, "nano"), ("nano", "tset", 1, "test"), ("nano", "test", 0, "limit")],
)
def test_bad_input(clerk: Clerk, suite: str, split: str, limit: int, word: str) -> None:
    with pytest.raises(UserError, match=word):
        evaluate(clerk, suite, split, limit)  # type: ignore[arg-type]
