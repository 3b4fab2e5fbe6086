"""Block diffusion: the decoder against a version without a cache, the objective against its definition."""

from __future__ import annotations

import io
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import refusion
from refusion.config import BlockConfig, UserError
from refusion.events import Committed, Drafted, Finished
from refusion.live import LiveView
from refusion.methods.base import Answer, Example, Forward, TokenIds, TrainingRow
from refusion.methods.block import BlockObjective, decode, surest
from refusion.models.runner import Runner, barred_ids, visibility
from refusion.models.transformer import ModelConfig, Transformer
from refusion.sampling import Shaping, draw, uniform
from refusion.training.data import collate, infilling, question
from refusion.training.step import accumulate, visible
from scripted import Driven, drive

MASK, EOS, VOCAB = 0, 1, 14
IDS = TokenIds(MASK, (EOS,))
NEAR = 2e-5  # decisions closer than this are not compared: float32 sums in another order may turn them


def tiny(seed: int) -> Transformer:
    config = ModelConfig("qwen3", VOCAB, 32, 48, 3, 4, 2, 8, qk_norm=True, initializer_range=0.3)
    return Transformer(config).eval().initialize(torch.Generator().manual_seed(seed))


def block_causal(groups: Sequence[int]) -> Tensor:
    """Who sees whom when token i is of block groups[i]: bool [T, T]."""
    group = torch.tensor(groups)
    return group[None, :] <= group[:, None]


# --- the decoder: a slow, literal version


@dataclass
class Literal:
    """What the slow version did, step by step, and how near its nearest decision was."""

    drafted: list[tuple[tuple[int, ...], tuple[int, ...], list[float]]] = field(default_factory=list)
    committed: list[dict[int, int]] = field(default_factory=list)
    tokens: tuple[int, ...] = ()
    ended: bool = False
    margin: float = math.inf


@torch.no_grad()
def probabilities(model: Transformer, tokens: list[int], groups: list[int]) -> Tensor:
    """Everything computed anew under block-causal attention, float32 [T, V]."""
    positions = torch.arange(len(tokens))[None]
    hidden = model(torch.tensor([tokens]), positions, block_causal(groups)[None, None])
    return model.logits(hidden)[0].float().softmax(-1)


def literal(model: Transformer, prompt: list[int], s: Any) -> Literal:
    """No cache, no fusing: at each step the whole text so far and the block as it stands."""
    out, response, step = Literal(), {}, 0
    eos = () if s.ignore_eos else (EOS,)
    end = math.inf  # position of the first end-of-sequence
    for number, start in enumerate(range(0, s.max_new_tokens, s.block_size)):
        block = range(start, min(start + s.block_size, s.max_new_tokens))
        for left in range(s.block_steps or len(block), -len(block), -1):
            still = [p for p in block if p not in response and p < end]
            if not still:
                break
            text = prompt + [response.get(p, MASK) for p in range(block.stop)]
            groups = [-1] * len(prompt) + [p // s.block_size for p in range(block.stop)]
            rows = probabilities(model, text, groups)
            drafts = {p: taken(rows[len(prompt) + p], s, step, p, out) for p in still}
            sure = {p: float(rows[len(prompt) + p][drafts[p]]) for p in still}
            best = sorted(still, key=lambda p: (-sure[p], p))
            share = math.ceil(len(still) / max(1, left))
            chosen = set(best[:share]) | {p for p in still if sure[p] > s.confidence_threshold}
            near([sure[p] for p in best], share, s.confidence_threshold, out)
            ends = [p for p in chosen if drafts[p] in eos]
            end = min([*ends, end])
            new = {p: drafts[p] for p in sorted(chosen) if p <= end}
            response |= new
            out.drafted.append((tuple(still), tuple(drafts.values()), list(sure.values())))
            out.committed.append(new)
            step += 1
        assert all(p in response for p in block if p < end), number
        if end < math.inf:
            break
    out.ended = end < math.inf
    out.tokens = tuple(response[p] for p in range(int(min(end, s.max_new_tokens))))
    return out


def taken(row: Tensor, s: Any, step: int, position: int, out: Literal) -> int:
    allowed = row.clone()
    allowed[MASK] = 0.0
    if s.temperature > 0:
        return draw(allowed, Shaping(s.temperature, s.top_k, s.top_p), uniform(s.seed, step, 0, position))
    two = allowed.topk(2).values
    out.margin = min(out.margin, float(two[0] - two[1]))
    return int(allowed.argmax())


def near(ordered: list[float], share: int, threshold: float, out: Literal) -> None:
    gaps = [abs(value - threshold) for value in ordered] if threshold < 1 else []
    gaps += [ordered[share - 1] - ordered[share]] if share < len(ordered) else []
    out.margin = min([out.margin, *gaps])


def settings_of(rng: random.Random) -> BlockConfig:
    return BlockConfig(
        max_new_tokens=rng.randint(1, 26), block_size=rng.randint(1, 9), block_steps=rng.choice([0, 0, 1, 2, 3, 40]),
        confidence_threshold=rng.choice([1.0, 0.9, 0.6, 0.3, 0.0]), ignore_eos=rng.random() < 0.5,
        temperature=rng.choice([0.0, 0.0, 0.7, 1.3]), top_k=rng.choice([0, 4]), top_p=rng.choice([1.0, 0.8]),
        seed=rng.randint(0, 99),
    ).resolve()  # fmt: skip


def run(model: Transformer, prompt: list[int], settings: BlockConfig, fuse: bool = True) -> tuple[Driven, Runner]:
    runner = Runner(model, barred_ids(VOCAB, range(VOCAB), MASK), 4)
    return drive(decode(prompt, settings, IDS, fuse=fuse), runner), runner


CASES = range(60)
MADE: dict[int, tuple[Transformer, list[int], BlockConfig, Literal]] = {}


def case(seed: int) -> tuple[Transformer, list[int], BlockConfig, Literal]:
    """A model, a prompt and settings whose decisions are all clear, and what the slow version makes of them."""
    if seed not in MADE:
        for attempt in range(50):
            rng = random.Random(f"block {seed} {attempt}")
            prompt, settings = [rng.randint(2, VOCAB - 1) for _ in range(rng.randint(1, 9))], settings_of(rng)
            model = tiny(seed)
            slow = literal(model, prompt, settings)
            if slow.margin >= NEAR:
                break
        assert slow.margin >= NEAR
        MADE[seed] = model, prompt, settings, slow
    return MADE[seed]


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "alone"])
@pytest.mark.parametrize("seed", CASES)
def test_equal_to_a_version_without_a_cache(seed: int, fuse: bool) -> None:
    model, prompt, settings, slow = case(seed)
    fast, runner = run(model, prompt, settings, fuse)
    drafts = fast.of(Drafted)
    assert [(d.positions, d.tokens) for d in drafts] == [(p, t) for p, t, _ in slow.drafted]
    for ours, (_, _, theirs) in zip(drafts, slow.drafted, strict=True):
        assert ours.probabilities == pytest.approx(theirs, abs=1e-5)
    assert [dict(zip(c.positions, c.tokens, strict=True)) for c in fast.of(Committed)] == slow.committed
    reason = "stop" if slow.ended else "length"
    assert fast.events[-1] == Finished(reason, slow.tokens, slow.ended)
    assert [e.round for e in fast.events[:-1]] == [i // 2 for i in range(2 * len(drafts))]
    blocks = {d.positions[0] // settings.block_size for d in drafts}
    assert fast.forwards == runner.forwards == len(drafts) + (0 if fuse else len(blocks))
    assert MASK not in {token for c in fast.of(Committed) for token in c.tokens}


def test_the_cases_cover_what_can_happen() -> None:
    """Else the test above would show little."""
    made = [case(seed) for seed in CASES]
    assert sum(slow.ended for *_, slow in made) >= 5
    assert sum(slow.ended and any(max(c) > len(slow.tokens) for c in slow.committed) for *_, slow in made) >= 1
    assert sum(s.max_new_tokens % s.block_size > 0 for _, _, s, _ in made) >= 20
    assert sum(s.max_new_tokens < s.block_size for _, _, s, _ in made) >= 3
    assert sum(s.max_new_tokens > 2 * s.block_size for _, _, s, _ in made) >= 20
    assert sum(s.temperature > 0 for _, _, s, _ in made) >= 15
    sizes = {len(c) for *_, slow in made for c in slow.committed}
    assert {1, 2, 3, 4, 5} <= sizes


def test_fusing_costs_no_rows_and_saves_a_forward_a_block() -> None:
    settings = BlockConfig(max_new_tokens=20, block_size=4, confidence_threshold=1.0, ignore_eos=True).resolve()
    fused, _ = run(tiny(0), [5, 6, 7], settings)
    alone, _ = run(tiny(0), [5, 6, 7], settings, fuse=False)
    assert (fused.forwards, alone.forwards) == (20, 25)
    assert fused.rows == alone.rows == 3 + 20 * 4 + 4 * 4  # prompt, steps, the clean blocks but the last
    assert fused.events == alone.events


def test_a_chained_forward_is_block_causal() -> None:
    """And nobody sees the padding but itself."""
    segments = (0, 0, 1, 3, 3, 3)
    seen = visibility(segments, 2, 8, 12, torch.device("cpu"), bidirectional=True, chained=True)[0, 0]
    expected = torch.zeros(8, 12, dtype=torch.bool)
    expected[:6, :2] = True
    expected[:6, 2:8] = block_causal(segments)
    expected[6, 8] = expected[7, 9] = True
    assert torch.equal(seen, expected)
    one_way = visibility(segments, 2, 6, 8, torch.device("cpu"), chained=True)[0, 0, :, 2:]
    assert torch.equal(one_way, torch.ones(6, 6, dtype=torch.bool).tril())


# --- the decoder: rules, by hand

Table = dict[tuple[int, int], tuple[int, float]]  # (step, position) -> token, probability


def told(table: Table, prompt_len: int) -> Callable[[Forward], Answer]:
    """Answers by step and position; where the table says nothing, token 9 at 0.1."""
    step = -1

    def respond(forward: Forward) -> Answer:
        nonlocal step
        step += 1
        pairs = [table.get((step, forward.positions[row] - prompt_len), (9, 0.1)) for row in forward.drafts]
        return Answer(tuple(t for t, _ in pairs), tuple(p for _, p in pairs))

    return respond


def written(table: Table, **settings: Any) -> Driven:
    return drive(decode([5, 6], BlockConfig(**settings).resolve(), IDS), told(table, 2))


def steps(driven: Driven) -> list[dict[int, int]]:
    return [dict(zip(c.positions, c.tokens, strict=True)) for c in driven.of(Committed)]


def test_the_surest_is_committed_and_of_equals_the_earliest() -> None:
    driven = written({(0, 2): (7, 0.5)}, max_new_tokens=4, block_size=4)
    assert steps(driven) == [{2: 7}, {0: 9}, {1: 9}, {3: 9}]
    assert driven.requests[0].tokens == (5, 6, 0, 0, 0, 0) and driven.requests[0].positions == (0, 1, 2, 3, 4, 5)
    assert driven.requests[1].tokens == (0, 0, 7, 0) and driven.requests[1].keep == (0, 1)
    assert driven.requests[2].tokens == (9, 0, 7, 0) and driven.requests[2].keep == ()


def test_all_over_the_threshold_are_committed() -> None:
    table = {(0, 0): (7, 0.91), (0, 3): (8, 0.95), (0, 1): (4, 0.9)}
    assert steps(written(table, max_new_tokens=4, block_size=4))[:2] == [{0: 7, 3: 8}, {1: 9}]
    assert steps(written(table, max_new_tokens=4, block_size=4, confidence_threshold=1.0))[0] == {3: 8}
    assert len(steps(written(table, max_new_tokens=4, block_size=4, confidence_threshold=0.0))) == 1


@pytest.mark.parametrize(("count", "sizes"), [
    (1, [7]), (2, [4, 3]), (3, [3, 2, 2]), (5, [2, 2, 1, 1, 1]), (0, [1] * 7), (50, [1] * 7),
])  # fmt: skip
def test_steps_share_a_block_evenly(count: int, sizes: list[int]) -> None:
    driven = written({}, max_new_tokens=7, block_size=7, block_steps=count)
    assert [len(step) for step in steps(driven)] == sizes


def test_tokens_over_the_threshold_leave_less_for_later_steps() -> None:
    table: Table = {(0, p): (7, 0.95) for p in range(5)}
    driven = written(table, max_new_tokens=8, block_size=8, block_steps=4)
    assert [len(step) for step in steps(driven)] == [5, 1, 1, 1]


def test_the_text_before_an_early_end_is_still_written() -> None:
    """End-of-sequence at 2 is the surest; 3 was written before it, 0 and 1 are open; the second block is never begun."""
    table: Table = {(0, 3): (8, 0.8), (1, 2): (EOS, 0.7)}
    driven = written(table, max_new_tokens=12, block_size=5)
    assert steps(driven) == [{3: 8}, {2: EOS}, {0: 9}, {1: 9}]
    assert driven.requests[2].tokens == (0, 0, EOS, 8, 0), "what stands after the end stays as it is"
    assert driven.of(Drafted)[2].positions == (0, 1)
    assert driven.events[-1] == Finished("stop", (9, 9), True)


def test_of_tokens_committed_at_once_those_after_the_end_are_dropped() -> None:
    table: Table = {(0, 1): (EOS, 0.95), (0, 2): (8, 0.99), (0, 3): (EOS, 0.99)}
    driven = written(table, max_new_tokens=4, block_size=4)
    assert steps(driven) == [{1: EOS}, {0: 9}]
    assert driven.events[-1] == Finished("stop", (9,), True)
    ignored = written(table, max_new_tokens=4, block_size=4, ignore_eos=True)
    assert ignored.events[-1] == Finished("length", (9, EOS, 8, EOS), False)


def test_an_earlier_end_replaces_a_later_one() -> None:
    table: Table = {(0, 2): (EOS, 0.8), (1, 0): (EOS, 0.8)}
    driven = written(table, max_new_tokens=4, block_size=4)
    assert steps(driven) == [{2: EOS}, {0: EOS}]
    assert driven.events[-1] == Finished("stop", (), True) and driven.forwards == 2


def test_the_smallest_budgets() -> None:
    for n in (1, 2, 3):
        driven = written({}, max_new_tokens=n, block_size=8)
        assert driven.forwards == n and driven.events[-1] == Finished("length", (9,) * n, False)
        assert len(driven.requests[0].tokens) == 2 + n, "the last block is short"


def test_a_share_of_the_surest() -> None:
    assert surest((0.2, 0.2, 0.2), 2, 1.0) == [0, 1]
    assert surest((1.0, 0.3), 1, 1.0) == [0]
    assert surest((0.1, 0.3), 5, 0.5) == [0, 1]


# --- settings, and the way through `generate`


@pytest.mark.parametrize(("wrong", "message"), [
    ({"block_size": 0}, "block_size must be at least 1, got 0"),
    ({"block_steps": -1}, "block_steps must be at least 0, got -1"),
    ({"block_steps": 1.5}, "block_steps must be a whole number, got 1.5"),
    ({"confidence_threshold": 1.1}, "confidence_threshold must be between 0 and 1, got 1.1"),
])  # fmt: skip
def test_wrong_settings_are_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        BlockConfig(**wrong)


def test_a_model_writes_block_by_block(any_model: refusion.Model) -> None:
    config = BlockConfig(max_new_tokens=21, block_size=4, confidence_threshold=0.7)
    prompt = [4, 5, 6, 7, 8]
    out = io.StringIO()
    view = LiveView(any_model.tokenizer.decode, eos=any_model.ids.eos, stream=out)
    with view:
        for event in any_model.stream(prompt, config):
            view.add(event)
    result = any_model.generate(prompt, config)
    assert result.settings["block_size"] == 4 and result.stats.tokens <= 21
    assert view.state.forwards == result.stats.forwards == result.stats.rounds
    assert len(out.getvalue().splitlines()) == sum(len(e.tokens) for e in result.events if isinstance(e, Committed))
    assert any_model.ids.mask not in result.token_ids


# --- the objective


def row_of(seed: int, sizes: tuple[int, ...] = (1, 3, 4, 8), infill: bool = False, **settings: Any) -> tuple[Example, TrainingRow]:
    rng = np.random.default_rng(seed)
    prompt = rng.integers(2, VOCAB, rng.integers(1, 9))
    answer = np.append(rng.integers(2, VOCAB, rng.integers(5, 20)), EOS)
    example = infilling(prompt, answer, rng) if infill else question(prompt, answer)
    return example, BlockObjective(IDS, sizes, **settings).row(example, rng)


def noised_part(example: Example, row: TrainingRow) -> slice:
    """Where the noised copies stand: at the end of the row, from the answer's first position on."""
    begin = int(np.flatnonzero(row.positions == example.start)[-1])
    return slice(begin, len(row.tokens))


def test_the_worked_example() -> None:
    """Of the module's docstring; noise is the only chance in it."""
    example = question(np.array([10, 11]), np.array([2, 3, 4, 5, EOS]))
    objective = BlockObjective(IDS, (2,))
    row = objective.row(example, np.random.default_rng(0))
    assert row.bidirectional
    assert row.positions.tolist() == [0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 6, 7]
    assert row.segments.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert row.prefixes.tolist() == [0, 0, 2, 2, 4, 4, 2, 2, 4, 4, 6, 6]
    assert row.tokens[:6].tolist() == [10, 11, 2, 3, 4, 5] and (row.targets[:6] == -1).all()
    text, masked = np.array([2, 3, 4, 5, EOS, EOS]), row.tokens[6:] == MASK
    assert (row.tokens[6:] == np.where(masked, MASK, text)).all()
    assert (row.targets[6:] == np.where(masked, text, -1)).all()


@pytest.mark.parametrize("infill", [False, True])
def test_tokens_targets_and_weights(infill: bool) -> None:
    filled = cut = 0
    for seed in range(200):
        example, row = row_of(seed, (4,), infill)
        part = noised_part(example, row)
        count = len(row.tokens) - part.start
        ends = int(example.answer[-1]) == EOS
        whole = -(-len(example.answer) // 4) * 4 if ends else len(example.answer)
        if example.room is not None:
            whole = min(whole, max(example.room, len(example.answer)))
        assert count == whole
        filled, cut = filled + (count > len(example.answer)), cut + (count % 4 > 0)
        text = np.append(example.answer, np.full(count - len(example.answer), EOS))
        masked = row.tokens[part] == MASK
        assert (row.tokens[part] == np.where(masked, MASK, text)).all()
        assert (row.targets[part] == np.where(masked, text, -1)).all() and (row.targets[: part.start] == -1).all()
        assert (row.positions[part] == example.start + np.arange(count)).all()
        t = 1 / (row.weights[part] * count)
        assert ((t > 0) & (t <= 1.0001)).all() and (t == t[np.arange(count) // 4 * 4]).all()
        context, clean = len(example.context), (count - 1) // 4 * 4
        assert (row.tokens[:context] == example.context).all() and part.start == context + clean
        assert (row.tokens[context : part.start] == text[:clean]).all()
        assert (row.positions[context : part.start] == example.start + np.arange(clean)).all()
    assert filled > 20 and (cut > 20) == infill


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (0.3, 0.8), (1.0, 1.0)])
def test_frequencies(bounds: tuple[float, float]) -> None:
    """t is uniform between its bounds, a token is masked with probability t, and so it counts 1 on average."""
    low, high = bounds
    rates, masked, totals = [], [], []
    for seed in range(1500):
        example, row = row_of(seed, (4,), noise_range=bounds)
        part = noised_part(example, row)
        rates += (1 / (row.weights[part] * (len(row.tokens) - part.start))).tolist()
        masked += (row.tokens[part] == MASK).tolist()
        totals.append(float(row.weights[row.targets >= 0].sum()))
    t, hit = np.array(rates), np.array(masked)
    if low == high:
        assert hit.all() and t == pytest.approx(1.0) and totals == pytest.approx([1.0] * len(totals))
        return
    assert low <= t.min() + 1e-6 and t.max() <= high + 1e-6
    place = (t - low) / (high - low)
    for quarter in range(4):
        inside = (place > quarter / 4) & (place <= (quarter + 1) / 4)
        assert inside.mean() == pytest.approx(0.25, abs=0.02)
        assert hit[inside].mean() == pytest.approx(t[inside].mean(), abs=0.02)
    if low > 0:  # without a bound the variance is infinite
        assert np.mean(totals) == pytest.approx(1.0, abs=0.02)


def test_sizes_are_drawn_alike() -> None:
    sizes = [int((row.segments == 1).sum()) for _, row in (row_of(seed, (2, 3)) for seed in range(600))]
    assert {2, 3} == set(sizes) and np.mean(sizes) == pytest.approx(2.5, abs=0.07)


def test_each_noised_block_is_as_if_alone() -> None:
    """In one padded batch: its outputs are those of prompt, clean blocks and noised block under block-causal attention."""
    model = tiny(1)
    sizes = (1, 3, 4, 8) * 3
    pairs = [row_of(seed, (size,), infill=seed % 3 == 0) for seed, size in enumerate(sizes)]
    batch = collate([row for _, row in pairs], 1)
    with torch.no_grad():
        tokens, positions = torch.from_numpy(batch.tokens).clamp(min=0), torch.from_numpy(batch.positions)
        logits = model.logits(model(tokens, positions, visible(batch)))
    for number, (size, (example, row)) in enumerate(zip(sizes, pairs, strict=True)):
        part = noised_part(example, row)
        for segment in np.unique(row.segments[part]):
            own = np.flatnonzero(row.segments == segment)
            before = row.positions[own[0]] - example.start  # answer tokens before the block
            tokens = np.concatenate([example.context, example.answer[:before], row.tokens[own]])
            answered = example.start + np.arange(before)
            positions = np.concatenate([example.context_positions, answered, row.positions[own]])
            groups = [-1] * len(example.context) + [i // size for i in range(before + len(own))]
            assert torch.allclose(alone(model, tokens, positions, groups)[-len(own) :], logits[number, own], atol=1e-4)


@torch.no_grad()
def alone(model: Transformer, tokens: Any, positions: Any, groups: list[int]) -> Tensor:
    """Logits of one row under block-causal attention, [T, V]."""
    mask = block_causal(groups)[None, None]
    return model.logits(model(torch.from_numpy(tokens)[None], torch.from_numpy(positions)[None], mask))[0]


def test_what_the_trainer_lets_each_token_see() -> None:
    """The rule of the paper's mask, token by token; `visible` is what training uses."""
    for seed in range(8):
        example, row = row_of(seed, (3,))
        part = noised_part(example, row)
        seen = visible(collate([row], 1))[0, 0]
        context = len(example.context)
        block = np.where(np.arange(len(row.tokens)) < context, -1, (row.positions - example.start) // 3)
        noised = np.arange(len(row.tokens)) >= part.start
        for i in range(len(row.tokens)):
            for j in range(len(row.tokens)):
                if noised[j]:
                    expected = bool(noised[i] and block[i] == block[j])
                else:
                    expected = bool(block[j] < block[i] or (block[j] == block[i] and not noised[i]))
                assert bool(seen[i, j]) == expected


@pytest.mark.parametrize("size", [1, 3, 5])
def test_loss_and_gradient_do_not_depend_on_micro_batches(size: int) -> None:
    objective, model = BlockObjective(IDS, noise_range=(0.2, 1.0)), tiny(2).train()
    rows = [row_of(seed, noise_range=(0.2, 1.0))[1] for seed in range(8)]

    def report(cut: int) -> tuple[float, Tensor]:
        model.zero_grad()
        loss = accumulate(model, [collate(rows[i : i + cut], 1) for i in range(0, len(rows), cut)], objective.losses)
        gradient = model.model.layers[0].mlp.up_proj.weight.grad
        assert gradient is not None
        return loss["loss"], gradient.clone()

    (whole, one), (parts, other) = report(8), report(size)
    assert parts == pytest.approx(whole, rel=1e-5) and torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def test_the_loss_by_hand() -> None:
    """Uniform outputs: every cross-entropy is ln V, so a row's loss is ln V * masked / (t * length)."""
    model = tiny(0)
    torch.nn.init.zeros_(model.lm_head.weight)
    pairs = [row_of(seed, noise_range=(0.5, 0.5)) for seed in range(6)]
    counts = [((row.targets >= 0).sum(), len(row.tokens) - noised_part(e, row).start) for e, row in pairs]
    expected = math.log(VOCAB) * np.mean([masked / (0.5 * length) for masked, length in counts])
    report = accumulate(model, [collate([row for _, row in pairs], 1)], BlockObjective(IDS).losses)
    assert report["loss"] == report["loss_mdm"] == pytest.approx(expected, rel=1e-5)


def test_training_learns_a_batch() -> None:
    model, objective = tiny(3).train(), BlockObjective(IDS, (4,), (0.1, 1.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    rng = np.random.default_rng(0)
    answers = [np.append(rng.integers(2, VOCAB, 9), EOS) for _ in range(4)]
    losses = []
    for _ in range(150):
        rows = [objective.row(question(np.array([2 + i, 7]), answer), rng) for i, answer in enumerate(answers)]
        losses.append(accumulate(model, [collate(rows, 1)], objective.losses)["loss"])
        optimizer.step()
        optimizer.zero_grad()
    assert np.mean(losses[-30:]) < 0.4 * np.mean(losses[:30])
    settings = BlockConfig(max_new_tokens=20, block_size=4).resolve()
    for i, answer in enumerate(answers):
        finished = run(model.eval(), [2 + i, 7], settings)[0].events[-1]
        assert finished == Finished("stop", tuple(answer[:-1].tolist()), True)


@pytest.mark.parametrize(("settings", "message"), [
    ({"block_sizes": ()}, "block_sizes must be positive"), ({"block_sizes": (4, 0)}, "block_sizes must be positive"),
    ({"noise_range": (0.5,)}, "noise_range must be"), ({"noise_range": (0.8, 0.3)}, "noise_range must be"),
    ({"noise_range": (0.0, 0.0)}, "noise_range must be"), ({"noise_range": (0.0, 1.5)}, "noise_range must be"),
    ({"ids": TokenIds(None, (EOS,))}, "mask token"),
])  # fmt: skip
def test_wrong_objectives_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        BlockObjective(**{"ids": IDS, **settings})
