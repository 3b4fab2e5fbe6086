"""The bench: turns, sums, ratios, the baseline always beside; on a model that takes the time it is told to."""

from __future__ import annotations

import json
import random
import xml.etree.ElementTree as ET
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import refusion
from refusion.config import AutoregressiveConfig, DecodeConfig, GenerationConfig, UserError
from refusion.evaluation import bench, procedural
from refusion.evaluation.bench import Contestant, Measured, Measurement, contestants, markdown, run
from refusion.events import Committed, Drafted, Event
from refusion.generate import Result, Stats
from refusion.methods.registry import METHODS

FORWARDS = {"refusion": 4, "autoregressive": 20, "llada": 10}


@dataclass
class Runner:
    """Stands in for a model: right on every second task; a forward takes a second, token by token; 20 tokens each."""

    name: str = "runner"
    has_mask: bool = True
    learnt: str = "refusion"
    asked: list[tuple[str, str]] = field(default_factory=list)
    transformer: Any = field(default_factory=lambda: SimpleNamespace(lm_head=SimpleNamespace(weight=torch.zeros(1))))
    folder: Any = field(default_factory=lambda: SimpleNamespace(parameters=7))

    @property
    def method(self) -> str:
        return self.learnt if self.has_mask else "autoregressive"

    @property
    def by_token(self) -> bool:
        return METHODS[self.method].by_token

    def settings(self, config: GenerationConfig) -> GenerationConfig:
        return config.resolve()

    def stream(self, prompt: str, config: GenerationConfig) -> Generator[Event, None, Result]:
        self.asked.append((prompt, config.method))
        yield Drafted(0, (0,), (1,), (1.0,))
        yield Committed(0, (0,), (1,))
        forwards = FORWARDS[config.method]
        stats = Stats(9, 20, forwards, 10 * forwards, 1, float(forwards))
        item = ITEMS[prompt]
        text = item.answer if list(ITEMS).index(prompt) % 2 == 0 else "no idea"
        return Result(text, [1] * 20, "stop", (), stats, self.settings(config).to_dict(), (1,))


ITEMS = {i.prompt: i for family in procedural.FAMILIES for i in procedural.take(family, "test", 2)}


def entries(model: Runner, **settings: Any) -> list[Contestant]:
    return contestants([model], ["refusion"], [settings])  # type: ignore[list-item]


def test_rows_hold_sums_and_ratios() -> None:
    model, seen = Runner(), []
    report = run(entries(model, slot_size=4), limit=2, repeats=3, progress=lambda *x: seen.append(x))
    slots, tokens = report["rows"]
    count = 2 * len(procedural.FAMILIES)
    assert [slots["method"], tokens["method"]] == ["refusion", "autoregressive"]
    assert slots["n"] == count and slots["accuracy"] == 0.5 and slots["settings"]["slot_size"] == 4
    assert (slots["tokens_per_forward"], tokens["tokens_per_forward"]) == (5.0, 1.0)
    assert (slots["rows_per_token"], tokens["rows_per_token"]) == (2.0, 10.0)
    assert slots["tokens_per_second"] == pytest.approx(5.0) and slots["speedup"] == pytest.approx(5.0)
    assert slots["tokens_per_second_interval"] == pytest.approx([5.0, 5.0]) and tokens["speedup"] == 1.0
    assert slots["latency_seconds"] == {"p50": 4.0, "p90": 4.0, "p99": 4.0}
    assert slots["first_commit_seconds"] < 1 and slots["peak_memory_bytes"] > 0 and slots["parameters"] == 7
    assert seen[-1][:2] == (3 * 2 * count, 3 * 2 * count) and len(seen) == 6 * count
    assert report["machine"]["torch"] == torch.__version__
    table = markdown(report)
    assert "| runner | refusion | 1 | 0.500 | 5.00 | 2.0 | 5 (5-5) |" in table and table.count("\n") == 5


def test_contestants_take_turns_on_every_prompt_in_an_order_that_rotates() -> None:
    model = Runner()
    run(entries(model), limit=2, repeats=2, warmup=0)
    pairs = list(zip(model.asked[::2], model.asked[1::2], strict=True))
    assert all(one[0] == other[0] and {one[1], other[1]} == {"refusion", "autoregressive"} for one, other in pairs)
    firsts = [one[1] for one, _ in pairs]
    assert firsts.count("refusion") == firsts.count("autoregressive") == len(pairs) / 2
    assert [prompt for (prompt, _), _ in pairs] == list(ITEMS) * 2


def test_warm_up_is_not_measured() -> None:
    model = Runner()
    report = run(entries(model), limit=1, repeats=1, warmup=3)
    assert report["rows"][0]["n"] == len(procedural.FAMILIES)
    assert len(model.asked) == 2 * (len(procedural.FAMILIES) + 3)


def test_the_same_weights_token_by_token_are_always_beside() -> None:
    assert [c.config.method for c in entries(Runner())] == ["refusion", "autoregressive"]
    two = contestants([Runner(), Runner("ar", has_mask=False)], ["refusion"], [{"slot_size": 4}, {"slot_size": 8}])  # type: ignore[list-item]
    assert [(c.model.name, c.config.method) for c in two] == [
        ("runner", "refusion"), ("runner", "refusion"), ("runner", "autoregressive"), ("ar", "autoregressive"),
    ]  # fmt: skip


def test_a_method_is_measured_on_the_models_that_learnt_it() -> None:
    models = [Runner("nano"), Runner("masked", learnt="llada")]
    chosen = contestants(models, ["refusion", "llada"], [{}])  # type: ignore[arg-type]
    assert [(c.model.name, c.config.method) for c in chosen] == [
        ("nano", "refusion"), ("nano", "autoregressive"), ("masked", "llada"),
    ]  # fmt: skip
    tried = contestants(models[:1], ["bd3lm"], [{}])  # type: ignore[arg-type]
    assert [c.config.method for c in tried] == ["bd3lm", "autoregressive"]


def test_a_model_that_cannot_write_token_by_token_is_compared_with_one_that_can() -> None:
    models = [Runner("nano"), Runner("masked", learnt="llada")]
    rows = run(contestants(models, ["llada", "refusion"], [{}]), limit=1, repeats=1)["rows"]  # type: ignore[arg-type]
    assert [row["speedup"] for row in rows] == [pytest.approx(5.0), pytest.approx(1.0), pytest.approx(2.0)]
    alone = run(contestants(models[1:], ["llada"], [{}]), limit=1, repeats=1)  # type: ignore[arg-type]
    assert [row["speedup"] for row in alone["rows"]] == [None] and "| llada |" in bench.markdown(alone)


def measurement(tokens: int, seconds: float, first: float = 1.0) -> Measurement:
    stats = Stats(1, tokens, 1, 1, 1, seconds)
    return Measurement(Result("", [], "stop", (), stats, {}, ()), True, seconds, first, first, 0)


def test_the_time_of_the_first_forward_can_be_left_out() -> None:
    answers = [measurement(10, 3.0), measurement(20, 5.0)]
    assert bench._speed(answers) == pytest.approx(30 / 8)
    assert bench._speed(answers, after_first=True) == pytest.approx(30 / 6)
    assert bench._speed(answers, after_first=True, early=1) == pytest.approx(28 / 6)


def test_medians_over_repeats_and_an_interval_over_prompts() -> None:
    one = Measured(Contestant(Runner(), DecodeConfig()))  # type: ignore[arg-type]
    for factor in (1.0, 2.0, 10.0):  # the machine was slow twice
        one.repeats.append([measurement(10, factor), measurement(30, factor)])
    row = one.row(random.Random(0))
    assert row["tokens_per_second"] == pytest.approx(10.0)  # the median of 20, 10, 2
    low, high = row["tokens_per_second_interval"]
    assert low == pytest.approx(30 / 13) and high == pytest.approx(90 / 13)  # only the slow prompt, only the fast one


@pytest.mark.parametrize(("arguments", "message"), [
    ({"suite": "nanoo"}, "unknown suite"), ({"limit": 0}, "limit must be at least 1"),
    ({"repeats": 0}, "repeats must be at least 1"),
    ({"warmup": -1}, "warmup must be at least 0"), ({"split": "tset"}, "split must be one of"),
])  # fmt: skip
def test_misuse(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run([Contestant(Runner(), AutoregressiveConfig())], **arguments)  # type: ignore[arg-type]


def test_methods_that_cannot_be() -> None:
    with pytest.raises(UserError, match=r"unknown method 'refushion'.*did you mean 'refusion'"):
        contestants([Runner()], ["refushion"], [])  # type: ignore[list-item]
    with pytest.raises(UserError, match="needs a mask token"):
        contestants([Runner(has_mask=False)], ["refusion"], [])  # type: ignore[list-item]


def test_the_report_is_json_a_table_and_a_picture(tmp_path: Path) -> None:
    report = run(entries(Runner()), limit=1, repeats=1)
    bench.write(report, tmp_path / "new" / "folder")
    folder = tmp_path / "new" / "folder"
    assert json.loads((folder / "bench.json").read_text()) == report
    assert markdown(report) in (folder / "bench.md").read_text()
    assert ET.parse(folder / "bench.svg").getroot().tag.endswith("svg")
    with pytest.raises(UserError, match="cannot be written"):
        bench.write(report, folder / "bench.md")


def test_batches_are_measured_beside_single_prompts(trained_folder: Path) -> None:
    """A real model: the answers are the same, and the time of what is written at once is shared out."""
    model = refusion.load(trained_folder, device="cpu")
    chosen = contestants([model], ["refusion"], [{"max_new_tokens": 8}], [1, 3])
    assert [(c.config.method, c.batch_size) for c in chosen] == [
        ("refusion", 1), ("autoregressive", 1), ("refusion", 3), ("autoregressive", 3),
    ]  # fmt: skip
    report = run(chosen, limit=2, repeats=1, warmup=1)
    rows = {(row["method"], row["batch_size"]): row for row in report["rows"]}
    for method in ("refusion", "autoregressive"):
        one, three = rows[method, 1], rows[method, 3]
        for key in ("accuracy", "tokens", "forwards", "tokens_per_forward", "rows_per_token", "n"):
            assert one[key] == three[key], key
        assert three["tokens_per_second"] > 0 and three["first_commit_seconds"] > 0
        assert three["tokens_per_second_after_first_forward"] is None
    assert rows["refusion", 3]["speedup"] == pytest.approx(
        rows["refusion", 3]["tokens_per_second"] / rows["autoregressive", 3]["tokens_per_second"]
    )
    assert "| refusion | 3 |" in markdown(report)


def test_batch_sizes_that_cannot_be() -> None:
    with pytest.raises(UserError, match="batch sizes must be at least 1"):
        contestants([Runner()], ["refusion"], [{}], [0])  # type: ignore[list-item]
