"""Masked diffusion: its decoders against a slow literal version, and its training rows by hand and by frequency."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import refusion
from refusion.cli import main
from refusion.config import DreamConfig, LladaConfig, MaskedConfig, UserError
from refusion.events import Committed, Drafted, Finished
from refusion.methods.base import Example, TokenIds, TrainingRow
from refusion.methods.masked import MaskedObjective, even, surest
from refusion.methods.registry import method_of
from refusion.models.runner import Runner, surety
from refusion.models.transformer import ModelConfig, Transformer
from refusion.sampling import Shaping, draw, uniform
from refusion.training.data import collate, infilling, question
from refusion.training.loop import train
from refusion.training.recipe import load
from refusion.training.step import accumulate, visible
from scripted import Driven, HashModel, Script, both_ways, drive

MASK, EOS = 0, 1
TINY = Path(__file__).parent.parent / "recipes" / "tiny.toml"

# --- the literal version ------------------------------------------------------------------------------------------------

# What every position's distribution is: of a text; of the rows begin..end when all others are as they were in an old text.
Distributions = Callable[[list[int], list[int], int, int], dict[int, Tensor]]
Writes = list[dict[int, int]]  # of every forward that writes: response position -> token
Literal = tuple[list[int], Writes, list[dict[int, float]]]


def literal(distributions: Distributions, prompt: Sequence[int], s: Any, eos: Sequence[int]) -> Literal:
    """The response up to end-of-sequence, everything that is written, without an early end, and step by step, and the
    probabilities of all drafts before each write."""
    shift, n = int(isinstance(s, DreamConfig)), s.max_new_tokens
    text, writes, seen, step = [*prompt, *[MASK] * n], Writes(), list[dict[int, float]](), -1
    size, budget = s.block_size or n, s.steps or n
    for start in range(0, n, size):
        stop = min(start + size, n)
        steps = max(1, stop * budget // n - start * budget // n)
        masked, old = list(range(start, stop)), list(text)
        adaptive = s.confidence_threshold > 0 or s.factor > 0
        for i in range(stop - start if adaptive else steps):
            if not masked:
                break
            step += 1
            rows = range(len(text))
            if s.cache != "none" and text != old:
                rows = range(len(prompt) + start - shift, len(prompt) + stop if s.cache == "dual" else len(text))
            found = distributions(text, old, rows.start, rows.stop)
            drafts = {p: drafted(found[len(prompt) + p - shift], s, step, p) for p in masked}
            written = {p: drafts[p][0] for p in picked(s, drafts, step, i, steps, stop - start)}
            for p, token in written.items():
                text[len(prompt) + p] = token
            masked = [p for p in masked if p not in written]
            if written:
                writes.append(written)
                seen.append({p: draft[1] for p, draft in drafts.items()})
        assert not masked
    response = text[len(prompt) :]
    end = min([response.index(token) for token in eos if token in response and not s.ignore_eos], default=n)
    return response[:end], writes, seen


def drafted(distribution: Tensor, s: Any, step: int, p: int) -> tuple[int, float, float, float]:
    """Token, probability, margin and minus the entropy."""
    allowed = distribution.clone()
    allowed[MASK] = 0.0
    if s.temperature:
        token = draw(allowed, Shaping(s.temperature, s.top_k, s.top_p), uniform(s.seed, step, 0, p))
    else:
        token = max(range(len(allowed)), key=lambda t: (float(allowed[t]), -t))
    ranked = distribution.double().sort(descending=True).values
    entropy = -(ranked * ranked.log()).sum()
    return token, float(distribution[token]), float(ranked[0] - ranked[1]), -float(entropy)


def picked(s: Any, drafts: dict[int, Any], step: int, i: int, steps: int, length: int) -> set[int]:
    """Which positions are written in step i of the block."""
    by_probability = sorted(drafts, key=lambda p: (-drafts[p][1], p))
    if s.confidence_threshold:
        return {p for p in drafts if drafts[p][1] > s.confidence_threshold} | {by_probability[0]}
    if s.factor:
        count = 1
        for n in range(1, len(drafts) + 1):
            if (n + 1) * (1 - drafts[by_probability[n - 1]][1]) < s.factor:
                count = n
        return set(by_probability[:count])
    chance = {p: uniform(s.seed, step, 1, p) for p in drafts}
    if isinstance(s, LladaConfig):
        count = ([length // steps + 1] * (length % steps) + [length // steps] * steps)[i]
        return set(sorted(drafts, key=chance.get)[:count] if s.remasking == "random" else by_probability[:count])
    now, then = (1 - k * (1 - 1e-3) / steps for k in (i, i + 1))
    part = 1.0 if i == steps - 1 else 1 - then / now
    if s.order == "origin":
        return {p for p in drafts if chance[p] < part}
    column = {"maskgit_plus": 1, "topk_margin": 2, "entropy": 3}[s.order]
    return set(sorted(drafts, key=lambda p: (-drafts[p][column], p))[: int(len(drafts) * part)])


def scripted_distributions(model: HashModel) -> Distributions:
    def distributions(text: list[int], old: list[int], begin: int, end: int) -> dict[int, Tensor]:
        before = both_ways(model, old, range(len(old)), [0] * len(old), ())
        kept = [column for i, column in enumerate(before) if not begin <= i < end]
        rows = both_ways(model, text[begin:end], range(begin, end), [0] * (end - begin), kept)
        return {begin + i: model.distribution(column) for i, column in enumerate(rows)}

    return distributions


# --- decoders on scripted models ----------------------------------------------------------------------------------------


def settings(rng: random.Random, **fixed: Any) -> MaskedConfig:
    """Any setting: blocks and steps that do not divide, one token, more steps than tokens, every order and cache."""
    n = rng.choice([1, 2, rng.randint(1, 12), rng.randint(8, 40)])
    threshold, factor = {"confidence_threshold": rng.choice([0.3, 0.6, 0.9, 1.0])}, {"factor": rng.choice([0.3, 1.0, 2.0])}
    adaptive = rng.choice([{}, {}, threshold, factor])
    shared: dict[str, Any] = {
        "max_new_tokens": n, "block_size": rng.choice([0, 0, 1, rng.randint(1, 9), rng.randint(4, 48)]),
        "steps": rng.choice([0, 1, rng.randint(1, n), rng.randint(1, 2 * n)]), "cache": rng.choice(MaskedConfig.CACHES),
        "temperature": rng.choice([0.0, 0.0, 0.7, 1.2]), "top_k": rng.choice([0, 0, 3]), "top_p": rng.choice([1.0, 0.8]),
        "seed": rng.randint(0, 999), "ignore_eos": rng.random() < 0.1, **adaptive, **fixed,
    }  # fmt: skip
    if rng.random() < 0.5:
        return LladaConfig(**shared, remasking=rng.choice(LladaConfig.REMASKING)).resolve()
    return DreamConfig(**shared, order=rng.choice(DreamConfig.ORDERS)).resolve()


def check(driven: Driven, expected: Literal, s: Any) -> None:
    """The literal answer; every write of the literal version until the answer is settled, and none after that."""
    answer, writes, drafts = expected
    for event, probabilities in zip(driven.of(Drafted), drafts, strict=False):
        assert dict(zip(event.positions, event.probabilities, strict=True)) == pytest.approx(probabilities, abs=1e-5)
    finished = driven.events[-1]
    ended = len(answer) < s.max_new_tokens
    assert finished == Finished("stop" if ended else "length", tuple(answer), ended)
    written = [dict(zip(e.positions, e.tokens, strict=True)) for e in driven.of(Committed)]
    settled, seen = len(writes), set[int]()
    for count, write in enumerate(writes, 1):
        seen |= write.keys()
        if ended and seen >= set(range(len(answer) + 1)):
            settled = count
            break
    assert written == writes[:settled]
    assert driven.forwards == settled == len(driven.of(Drafted)) and [e.round for e in driven.of(Drafted)] == list(range(settled))
    assert all(list(e.positions) == sorted(e.positions) for e in driven.of(Committed))
    assert MASK not in [token for write in written for token in write.values()]


@pytest.mark.parametrize("seed", range(150))
def test_a_decoder_is_its_literal_version(seed: int) -> None:
    rng = random.Random(seed)
    s, eos = settings(rng), rng.choice([(EOS,), (EOS,), (7, EOS)])
    model = HashModel(
        seed=rng.randint(0, 1 << 40), mask=MASK, eos=eos, agreement=rng.choice([0.0, 6.0, 10.0]),
        eos_rate=rng.choice([0.0, 0.1, 0.4]),
    )  # fmt: skip
    prompt = [rng.randint(1, 11) for _ in range(rng.randint(1, 5))]
    driven = drive(method_of(s).decode(prompt, s, TokenIds(MASK, eos)), Script(model))
    check(driven, literal(scripted_distributions(model), prompt, s, eos), s)


def run(s: MaskedConfig, eos: tuple[int, ...] = (), **model: Any) -> Driven:
    return drive(method_of(s).decode([5, 6, 7], s.resolve(), TokenIds(MASK, eos)), Script(HashModel(3, **model)))


@pytest.mark.parametrize(("cache", "rows"), [
    ("none", 6 * 11), ("prefix", 11 + 2 * 8 + 11 + 2 * 4), ("dual", 11 + 2 * 4 + 11 + 2 * 4),
])  # fmt: skip
def test_rows_of_every_cache(cache: str, rows: int) -> None:
    """3 prompt tokens, 2 blocks of 4 in 3 steps each: whole forwards of 11 rows, the others of what is not cached."""
    driven = run(LladaConfig(max_new_tokens=8, block_size=4, steps=6, cache=cache))
    assert (driven.forwards, driven.rows) == (6, rows)
    assert [len(e.tokens) for e in driven.of(Committed)] == [2, 1, 1] * 2
    shifted = run(DreamConfig(max_new_tokens=8, block_size=4, steps=6, cache=cache, order="maskgit_plus"))
    partial = sum(len(request.tokens) < 11 for request in shifted.requests)
    assert shifted.rows == sum(len(r.tokens) for r in shifted.requests)
    assert partial == (0 if cache == "none" else shifted.forwards - 2)
    assert {len(r.tokens) for r in shifted.requests} == {"none": {11}, "prefix": {11, 9, 5}, "dual": {11, 5}}[cache]


def test_more_at_once_takes_fewer_forwards() -> None:
    counts = {key: run(LladaConfig(max_new_tokens=24, **{name: value}), agreement=9.0).forwards for key, name, value in [
        ("all", "steps", 0), ("half", "steps", 12), ("one", "steps", 1), ("low", "confidence_threshold", 0.01),
        ("high", "confidence_threshold", 1.0), ("safe", "factor", 0.5), ("bold", "factor", 99.0),
    ]}  # fmt: skip
    assert (counts["all"], counts["half"], counts["one"], counts["low"], counts["high"], counts["bold"]) == (24, 12, 1, 1, 24, 1)
    assert 1 < counts["safe"] < 24


def test_of_equals_the_earlier_are_written() -> None:
    assert surest([0.3, 0.9, 0.3, 0.5], 3) == [0, 1, 3] and surest([0.5] * 4, 2) == [0, 1]
    assert [even(step, 3, 8) for step in range(3)] == [3, 3, 2]


def test_the_answer_is_settled_when_everything_before_the_end_is_written() -> None:
    """An end-of-sequence in the first block: no forward for the second one, and none for what follows it in the first."""
    config = LladaConfig(max_new_tokens=12, block_size=6, temperature=1.0)
    seeds = [run(replace(config, seed=i), eos=(EOS,), eos_rate=0.4) for i in range(30)]
    ends = [len(d.events[-1].tokens) for d in seeds if d.events[-1].eos]
    assert any(end < 5 for end in ends)
    assert all(d.forwards <= 6 for d in seeds if len(d.events[-1].tokens) < 6)
    assert any(d.forwards < 6 for d in seeds)


# --- settings


@pytest.mark.parametrize(("kind", "wrong", "message"), [
    (LladaConfig, {"remasking": "low"}, "remasking must be one of low_confidence, random, got 'low'"),
    (DreamConfig, {"order": "entropi"}, "did you mean 'entropy'?"),
    (LladaConfig, {"cache": True}, "cache must be one of none, prefix, dual, got True"),
    (LladaConfig, {"steps": -1}, "steps must be at least 0"),
    (LladaConfig, {"block_size": -1}, "block_size must be at least 0"),
    (DreamConfig, {"confidence_threshold": 1.5}, "confidence_threshold must be between 0 and 1"),
    (DreamConfig, {"factor": -1}, "factor must be at least 0"),
    (LladaConfig, {"factor": 1, "confidence_threshold": 0.5}, "confidence_threshold and factor cannot both be set"),
])  # fmt: skip
def test_wrong_settings_are_named(kind: type[MaskedConfig], wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        kind(**wrong)


def test_a_given_threshold_switches_off_a_default_factor() -> None:
    assert LladaConfig(confidence_threshold=0.9).resolve({"factor": 1.0}).factor == 0.0
    assert LladaConfig(factor=1.0).resolve({"confidence_threshold": 0.9}).confidence_threshold == 0.0
    assert LladaConfig().resolve({"confidence_threshold": 0.9}).confidence_threshold == 0.9
    with pytest.raises(UserError, match="cannot both be set"):
        LladaConfig().resolve({"confidence_threshold": 0.9, "factor": 1.0})


# --- decoders on a model


CONFIG = ModelConfig("qwen3", 23, 24, 32, 2, 4, 2, 8, qk_norm=True)


def fresh() -> Transformer:
    """Every weight random, and large enough that a mistake shows."""
    model, generator = Transformer(CONFIG).eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.6, generator=generator)
    return model


class Columns:
    """Keys and values of one forward, by layer; `seen` come before them."""

    def __init__(self, seen: dict[int, tuple[Tensor, Tensor]]) -> None:
        self.seen, self.new = seen, dict[int, tuple[Tensor, Tensor]]()

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.new[layer] = k, v
        before = self.seen.get(layer, (k[:, :, :0], v[:, :, :0]))
        return torch.cat([before[0], k], 2), torch.cat([before[1], v], 2)


@torch.no_grad()
def model_distributions(model: Transformer) -> Distributions:
    """Everything anew in each call: the whole old text for the columns of the others, then the rows asked for."""

    def forward(text: list[int], rows: range, columns: Columns) -> Tensor:
        others = next(iter(columns.seen.values()))[0].shape[2] if columns.seen else 0
        mask = torch.ones(1, 1, len(rows), others + len(rows), dtype=torch.bool)
        tokens = torch.tensor([[text[i] for i in rows]])
        return model.logits(model(tokens, torch.tensor([list(rows)]), mask, columns))[0].float().softmax(-1)

    @torch.no_grad()
    def distributions(text: list[int], old: list[int], begin: int, end: int) -> dict[int, Tensor]:
        stale = Columns({})
        forward(old, range(len(old)), stale)
        others = [i for i in range(len(old)) if not begin <= i < end]
        seen = {layer: (k[:, :, others], v[:, :, others]) for layer, (k, v) in stale.new.items()}
        found = forward(text, range(begin, end), Columns(seen))
        return {begin + i: row for i, row in enumerate(found)}

    return distributions


@pytest.mark.parametrize("seed", range(24))
def test_a_decoder_on_a_model_is_its_literal_version(seed: int) -> None:
    rng, model = random.Random(1000 + seed), fresh().double()
    fixed = {"max_new_tokens": rng.randint(8, 20), "block_size": rng.choice([0, 3, 4, 6]), "ignore_eos": rng.random() < 0.7}
    s = settings(rng, cache=MaskedConfig.CACHES[seed % 3], **fixed)
    barred = torch.arange(23) == MASK
    prompt = [rng.randint(1, 22) for _ in range(rng.randint(1, 6))]
    runner = Runner(model, barred, 8)
    driven = drive(method_of(s).decode(prompt, s, TokenIds(MASK, (EOS,))), runner)
    check(driven, literal(model_distributions(model), prompt, s, (EOS,)), s)
    assert (runner.forwards, runner.rows) == (driven.forwards, driven.rows)


def test_scores_of_the_runner_by_hand() -> None:
    rows = torch.tensor([[0.5, 0.25, 0.25, 0.0], [1.0, 0.0, 0.0, 0.0]])
    assert surety(rows, "margin").tolist() == [0.25, 1.0]
    assert surety(rows, "entropy").tolist() == pytest.approx([-1.5 * np.log(2), 0.0])
    assert surety(rows, "probability").tolist() == []


@pytest.mark.parametrize("config", [
    LladaConfig(), LladaConfig(remasking="random", steps=5), DreamConfig(), DreamConfig(factor=1.0),
])  # fmt: skip
def test_generation_counts_everything(config: MaskedConfig, any_model: refusion.Model) -> None:
    result = any_model.generate([1, 40, 50, 2], replace(config, max_new_tokens=21))
    rounds = [event for event in result.events if isinstance(event, Committed)]
    assert result.stats.forwards == result.stats.rounds == len(rounds)
    assert result.stats.rows == 25 * len(rounds) and any_model.ids.mask not in result.token_ids
    assert result.settings["steps"] == (config.steps or 0)


def test_the_command_writes_by_masked_diffusion(trained_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", "--model", str(trained_folder), "--method", "llada", "--max-new-tokens", "12", "--block-size", "0"]
    assert main([*command, "--steps", "3", "--json", "How many apples"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["stats"]["forwards"] <= 3 and shown["settings"]["block_size"] == 0
    assert main([*command, "--order", "entropy", "--compare", "How many apples"]) == 0
    error = capsys.readouterr().err
    assert "--order is ignored" in error and "llada:" in error and "token by token:" in error
    assert main([*command, "--cache", "duel", "How many apples"]) == 2
    assert "did you mean 'dual'?" in capsys.readouterr().err


# --- training rows


IDS = TokenIds(3, (2,))


class Chances:
    """Stands in for a generator: first 1 - t, then one number a token."""

    def __init__(self, t: float, tokens: Sequence[float]) -> None:
        self.t, self.tokens = t, tokens

    def random(self, size: int | None = None) -> Any:
        return 1 - self.t if size is None else np.array(self.tokens[:size])


def corrupted(objective: MaskedObjective, example: Example, t: float, masked: str) -> TrainingRow:
    """A row whose tokens are masked where `masked` has an M."""
    return objective.row(example, Chances(t, [0.0 if sign == "M" else 1.0 for sign in masked]))  # type: ignore[arg-type]


def test_worked_example() -> None:
    """The one in the module's docstring."""
    p, q, a, b, c, end, mask = 10, 11, 12, 13, 14, 2, 3
    example = question(np.array([p, q]), np.array([a, b, c, end]))
    plain = corrupted(MaskedObjective(IDS, 5), example, 0.5, "M.M.M")
    assert plain.tokens.tolist() == [p, q, mask, b, mask, end, mask]
    assert plain.targets.tolist() == [-1, -1, a, -1, c, -1, end]
    shifted = corrupted(MaskedObjective(IDS, 5, shifted=True), example, 0.5, "M.M.M")
    assert shifted.targets.tolist() == [-1, a, -1, c, -1, end, -1]
    for row in (plain, shifted):
        assert row.positions.tolist() == list(range(7)) and row.bidirectional
        assert row.weights[row.targets >= 0].tolist() == pytest.approx([1 / (0.5 * 5)] * 3)
        assert not row.losses.any() and not row.segments.any() and not row.prefixes.any()


def test_answers_are_padded_and_longer_ones_stay() -> None:
    example = question(np.array([10]), np.array([12, 13, 2]))
    assert corrupted(MaskedObjective(IDS, 6), example, 1.0, "M" * 6).targets.tolist() == [-1, 12, 13, 2, 2, 2, 2]
    row = corrupted(MaskedObjective(IDS, 2), example, 1.0, "MMM")
    assert row.targets.tolist() == [-1, 12, 13, 2] and row.weights[1:].tolist() == pytest.approx([1 / 3] * 3)


def test_an_infilling_row_fills_its_gap() -> None:
    """Text at 0, 1, 2 and 7, 8; the gap has 4 places for 2 tokens and end-of-sequence."""
    context, places = np.array([10, 11, 12, 20, 21]), np.array([0, 1, 2, 7, 8])
    example = Example(context, places, np.array([30, 31, 2]), 3, room=4)
    for shifted, targets in ((False, [-1] * 5 + [30, 31, 2, 2]), (True, [-1, -1, 30, -1, -1, 31, 2, 2, -1])):
        row = corrupted(MaskedObjective(IDS, 50, shifted=shifted), example, 1.0, "MMMM")
        assert row.tokens.tolist() == [10, 11, 12, 20, 21, 3, 3, 3, 3]
        assert row.positions.tolist() == [0, 1, 2, 7, 8, 3, 4, 5, 6]
        assert row.targets.tolist() == targets
        assert row.weights[row.targets >= 0].tolist() == pytest.approx([0.25] * 4)
    for seed in range(50):
        gap = infilling(np.arange(30, 34), np.append(np.arange(40, 60), 2), np.random.default_rng(seed))
        row = MaskedObjective(IDS, 9, shifted=True).row(gap, np.random.default_rng(seed))
        assert len(row.tokens) == len(gap.context) + (gap.room or 0) == len(set(row.positions.tolist()))


def test_without_a_token_before_it_the_first_is_not_asked_for() -> None:
    row = corrupted(MaskedObjective(IDS, 3, shifted=True), question(np.array([], dtype=np.int64), np.array([12, 2])), 1.0, "MMM")
    assert row.tokens.tolist() == [3, 3, 3] and row.targets.tolist() == [2, 2, -1]


def test_weights_by_context() -> None:
    example = question(np.array([10, 11]), np.array([12, 13, 14, 2]))
    row = corrupted(MaskedObjective(IDS, 4, context_p=0.3), example, 0.2, "M.MM")
    known = [0, 1, 3]
    for place in (2, 4, 5):
        expected = sum(0.5 * 0.3 * 0.7 ** (abs(place - i) - 1) for i in known) / 4
        assert row.weights[place] == pytest.approx(expected)


def test_masks_and_weights_are_as_often_and_as_large_as_they_should_be() -> None:
    example, length = question(np.array([10, 11]), np.append(np.arange(20, 39), 2)), 24
    rows = [MaskedObjective(IDS, length).row(example, np.random.default_rng([7, i])) for i in range(4000)]
    masked = np.stack([row.targets[2:] >= 0 for row in rows])
    assert np.abs(masked.mean(0) - 0.5).max() < 0.04  # every place alike, padding too
    counts = np.bincount(masked.sum(1), minlength=length + 1) / len(rows)
    assert np.abs(counts - 1 / (length + 1)).max() < 0.015  # t is uniform, so the number of masks is
    for i in range(200):
        t = 1 - np.random.default_rng([7, i]).random()
        assert np.allclose(rows[i].weights[2:][masked[i]], 1 / (t * length))
    assert np.mean([(row.weights * (row.targets >= 0)).sum() for row in rows]) == pytest.approx(1.0, abs=0.1)


def test_wrong_objectives_are_named() -> None:
    for ids, wrong, message in ((IDS, {"answer_length": 0}, "answer_length"), (IDS, {"context_p": 2.0}, "context_p"),
                                (TokenIds(None, (2,)), {}, "mask token"), (TokenIds(3, ()), {}, "end-of-sequence")):  # fmt: skip
        with pytest.raises(UserError, match=message):
            MaskedObjective(ids, **wrong)  # type: ignore[arg-type]


# --- training


def some_examples(count: int = 6) -> list[Example]:
    """Prompts of 1-8 tokens, answers of 3-14."""
    rng = np.random.default_rng(5)
    sizes = [(rng.integers(1, 9), rng.integers(2, 14)) for _ in range(count)]
    return [question(rng.integers(4, 23, prompt), np.append(rng.integers(4, 23, answer), 2)) for prompt, answer in sizes]


def some_rows(objective: MaskedObjective) -> list[TrainingRow]:
    return [objective.row(example, np.random.default_rng([9, i])) for i, example in enumerate(some_examples())]


def test_every_token_sees_all_real_ones_and_nobody_sees_padding() -> None:
    rows = some_rows(MaskedObjective(IDS, 5))
    batch = collate(rows, 1)
    seen, width = visible(batch), batch.tokens.shape[1]
    assert len({len(row.tokens) for row in rows}) > 2
    for i, row in enumerate(rows):
        real = torch.arange(width) < len(row.tokens)
        assert torch.equal(seen[i, 0][real], real.expand(len(row.tokens), width))
        assert seen[i, 0].any(-1).all()  # padding sees something, so that its softmax is a number


@pytest.mark.parametrize("shifted", [False, True])
def test_the_loss_is_that_of_the_definition(shifted: bool) -> None:
    """Row by row, alone, without padding: cross-entropy at masks / (t * length), mean over rows."""
    objective, model = MaskedObjective(IDS, 12, shifted=shifted), fresh().train()
    rows, total = some_rows(objective), torch.zeros(())
    for i, row in enumerate(rows):
        example, t = some_examples()[i], 1 - np.random.default_rng([9, i]).random()
        answer = [*example.answer, *[2] * (12 - len(example.answer))]
        whole = [*example.context, *answer]
        mask = torch.ones(1, 1, len(whole), len(whole), dtype=torch.bool)
        logits = model.logits(model(torch.from_numpy(row.tokens)[None], torch.arange(len(whole))[None], mask))[0]
        for p in range(len(example.context), len(whole)):
            if row.tokens[p] == 3:
                entropy = F.cross_entropy(logits[p - shifted], torch.tensor(int(whole[p])))
                total = total + entropy / (t * len(answer)) / len(rows)
    report = accumulate(model, [collate(rows[:4], 1), collate(rows[4:], 1)], objective.losses)
    assert report["loss"] == report["loss_mdm"] == pytest.approx(float(total.detach()), rel=1e-5)


@pytest.mark.parametrize("shifted", [False, True])
def test_the_loss_of_one_batch_falls(shifted: bool) -> None:
    objective = MaskedObjective(IDS, 12, shifted=shifted)
    model, rows = Transformer(CONFIG).initialize(torch.Generator().manual_seed(0)).train(), some_rows(objective)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(60):
        losses.append(accumulate(model, [collate(rows, 1)], objective.losses)["loss"])
        optimizer.step()
        optimizer.zero_grad()
    assert all(np.isfinite(losses)) and losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("method", ["llada", "dream"])
def test_a_run_gives_a_folder_that_writes_by_its_method(method: str, tmp_path: Path) -> None:
    keys = {"objective.method": method, "objective.answer_length": "70", "training.max_steps": "2", "training.save_every": "2",
            "validation.every": "2", "training.batch_size": "8"}  # fmt: skip
    out = train(load(TINY, keys), tmp_path / "run").out
    model = refusion.load(out / "last", device="cpu")
    assert model.method == method and model.settings().max_new_tokens == 70
    result = model.generate("Work out 1+2.", method_of(model.settings()).config(steps=3, ignore_eos=True))
    assert (len(result.token_ids), result.stats.forwards) == (70, 3 if method == "llada" else result.stats.rounds)
    path = out / "last" / "generation_config.json"
    assert json.loads(path.read_text())["refusion"] == {"method": method, "max_new_tokens": 70}
    logged = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert any("validation_loss_mdm" in line for line in logged)
