"""Many requests at once: each is written as it would be alone, whoever stands beside it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import refusion
from refusion.config import (
    AutoregressiveConfig,
    BlockConfig,
    DecodeConfig,
    DreamConfig,
    GenerationConfig,
    LladaConfig,
    UserError,
)
from refusion.engine import Engine, answer_all
from refusion.generate import Result


@pytest.fixture(scope="module")
def model(trained_folder: Path) -> refusion.Model:
    return refusion.load(trained_folder, device="cpu")


def drawn(rng: random.Random, model: refusion.Model) -> tuple[list[int], GenerationConfig]:
    """A request of any method, any length, greedy or sampled."""
    prompt = [rng.randrange(model.transformer.config.vocab_size) for _ in range(rng.randint(1, 40))]
    shared: dict[str, Any] = {
        "max_new_tokens": rng.randint(1, 40), "temperature": rng.choice([0.0, 0.0, 1.0]), "seed": rng.randrange(99),
        "ignore_eos": rng.random() < 0.3,
    }  # fmt: skip
    size = rng.randint(1, 9)
    return prompt, rng.choice([
        DecodeConfig(slot_size=size, block_size=4 * size, slot_threshold=rng.choice([0.1, 0.5]),
                     token_threshold=rng.choice([0.1, 0.4]), **shared),
        AutoregressiveConfig(**shared),
        LladaConfig(block_size=8, confidence_threshold=0.3, cache=rng.choice(["none", "prefix", "dual"]), **shared),
        DreamConfig(steps=9, **shared),
        BlockConfig(block_size=size, confidence_threshold=0.3, **shared),
    ])  # fmt: skip


def same(one: Result, other: Result) -> bool:
    """Everything but the time."""
    return replace(one, stats=replace(one.stats, seconds=0.0)) == replace(other, stats=replace(other.stats, seconds=0.0))


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_in_company_as_alone(batch_size: int, model: refusion.Model) -> None:
    """Requests that come, end and are cancelled at any tick: tokens, probabilities in events, forwards, rows."""
    rng = random.Random(batch_size)
    requests = [drawn(rng, model) for _ in range(60)]
    engine, results, cancelled = Engine(model, batch_size), dict[int, Result](), set[int]()
    waiting, heard = list(enumerate(requests)), dict[int, list[Any]]()
    while waiting or not engine.idle:
        for _ in range(rng.randint(0, 5)):
            if waiting:
                number, (prompt, config) = waiting.pop(0)
                assert engine.add(prompt, config) == number
        for number, item in engine.tick():
            assert number not in cancelled and number not in results
            if isinstance(item, Result):
                results[number] = item
            else:
                heard.setdefault(number, []).append(item)
        if rng.random() < 0.05:
            victim = rng.randrange(len(requests))
            if victim not in results and victim < len(requests) - len(waiting):
                engine.cancel(victim)
                cancelled.add(victim)
    assert set(results) | cancelled == set(range(60)) and cancelled
    for number, result in results.items():
        alone = model.generate(*requests[number])
        assert same(result, alone), requests[number]
        assert tuple(heard[number]) == alone.events


def test_many_prompts_share_forwards(model: refusion.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    together = model.transformer.together

    def counted(tokens: Any, positions: Any, parts: Any) -> Any:
        calls.append(len(parts))
        return together(tokens, positions, parts)

    monkeypatch.setattr(model.transformer, "together", counted)
    config = AutoregressiveConfig(max_new_tokens=10, ignore_eos=True)
    results = model.generate([[5, 6, 7]] * 8, config, batch_size=4)
    assert calls == [4] * 20 and all(result.stats.forwards == 10 for result in results)


def test_answers_come_in_the_order_of_their_prompts(model: refusion.Model) -> None:
    prompts, told = ["Tom has 5 nuts.", "A", "Ann has 3 cats and 4 dogs."], []
    config = DecodeConfig(max_new_tokens=16)
    results = answer_all(model, prompts, config, batch_size=2, progress=lambda *x: told.append(x[:2]))
    assert [r.prompt_ids for r in results] == [tuple(model.encode(p)) for p in prompts]
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert [r.text for r in results] == [model.generate(p, config).text for p in prompts]


def test_a_request_that_cannot_be_done_is_refused_at_once(model: refusion.Model) -> None:
    engine = Engine(model)
    with pytest.raises(UserError, match="prompt must not be empty"):
        engine.add("")
    assert engine.idle and list(engine.tick()) == []
    for size in (0, -1):
        with pytest.raises(UserError, match="batch_size must be at least 1"):
            model.generate(["x"], batch_size=size)


def test_cancelled_while_it_is_being_told(model: refusion.Model) -> None:
    """Whoever hears the first event may hang up there and then; the others go on."""
    engine, heard = Engine(model), []
    first, second = (engine.add([5, 6], DecodeConfig(max_new_tokens=16, ignore_eos=True)) for _ in range(2))
    while not engine.idle:
        for number, item in engine.tick():
            heard.append((number, item))
            engine.cancel(first)
    assert [number for number, _ in heard].count(first) == 1
    assert isinstance(heard[-1][1], Result) and heard[-1][0] == second
