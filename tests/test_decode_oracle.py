"""The decoder against the slow oracle: random settings on scripted models, cases by hand, a tiny transformer."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

import oracle
from refusion.config import DecodeConfig
from refusion.events import Committed, Finished
from refusion.methods.base import Answer, Forward, TokenIds
from refusion.methods.refusion.decode import decode
from refusion.models.transformer import ModelConfig, Transformer
from scripted import Driven, HashModel, Model, Script, Told, ToldModel, answered, drive, recomputed

MASK, EOS = 0, 1
NEAR = 1e-5
SETTINGS = range(520)  # so many that every branch is visited often


# --- random settings on scripted models -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    prompt: tuple[int, ...]
    settings: DecodeConfig
    eos: tuple[int, ...]
    model: HashModel


def ablation(rng: random.Random) -> dict[str, Any]:
    """The paper's method in three cases of four, else one with its parts exchanged."""
    if rng.random() < 0.75:
        return {}
    order, score = rng.choice(DecodeConfig.ORDERS), rng.choice(DecodeConfig.SCORES)
    return {"slot_order": order, "slot_score": score, "recompute": rng.random() < 0.5}


def drawn(seed: int, attempt: int = 0) -> Case:
    """A setting of any shape: short last slots and blocks, one token, thresholds 0 and 1, no EOS or many."""
    rng = random.Random(f"{seed} {attempt}")
    size = rng.randint(1, 9)
    sampled = rng.random() < 0.3
    settings = DecodeConfig(
        max_new_tokens=rng.choice([1, 2, rng.randint(1, 12), rng.randint(8, 40), rng.randint(8, 40)]),
        slot_size=size,
        block_size=size + rng.choice([0, rng.randint(0, 8), rng.randint(0, 40)]),
        slot_threshold=rng.choice([0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0]),
        token_threshold=rng.choice([0.0, 0.1, 0.3, 0.3, 0.5, 0.7, 0.9, 1.0]),
        temperature=rng.choice([0.5, 1.0, 1.5]) if sampled else 0.0,
        top_k=rng.choice([0, 0, 1, 3]),
        top_p=rng.choice([1.0, 1.0, 0.9, 0.5]),
        seed=rng.randint(0, 10_000),
        ignore_eos=rng.random() < 0.1,
        **ablation(rng),
    )
    eos = rng.choice([(EOS,), (EOS,), (EOS, 2), (7, EOS)])
    model = HashModel(
        seed=rng.randint(0, 1 << 40), mask=MASK, eos=eos, agreement=rng.choice([0.0, 4.0, 8.0, 12.0]),
        noise=rng.choice([1.0, 3.0]), eos_rate=rng.choice([0.0, 0.03, 0.1, 0.4]),
    )  # fmt: skip
    prompt = tuple(rng.randint(1, 11) for _ in range(rng.randint(1, 6)))
    return Case(prompt, settings.resolve(), eos, model)


@cache
def expected(seed: int) -> tuple[Case, oracle.Result]:
    """A case that is decided clearly, and what the oracle says; near ties are redrawn."""
    for attempt in range(100):
        case = drawn(seed, attempt)
        result = oracle.decode(recomputed(case.model), case.prompt, case.settings, MASK, case.eos)
        if result.margin >= NEAR:
            return case, result
    raise AssertionError("no clear case in 100 draws")


def by_round(commits: Sequence[Committed | oracle.Commit]) -> list[list[tuple[int, int]]]:
    """What each round committed, as sorted (position, token) pairs."""
    rounds: dict[int, list[tuple[int, int]]] = {}
    for commit in commits:
        rounds.setdefault(commit.round, []).extend(zip(commit.positions, commit.tokens, strict=True))
    assert list(rounds) == sorted(rounds)
    return [sorted(pairs) for pairs in rounds.values()]


def run(prompt: Sequence[int], settings: DecodeConfig, eos: Sequence[int], model: Model) -> Driven:
    return drive(decode(prompt, settings, TokenIds(mask=MASK, eos=tuple(eos))), Script(model, barred=(MASK,)))


def agree(driven: Driven, result: oracle.Result) -> None:
    (finished,) = driven.of(Finished)
    assert driven.events[-1] == finished
    assert finished.tokens == result.tokens
    assert (finished.reason, finished.eos) == (result.finish_reason, result.eos)
    assert by_round(driven.of(Committed)) == by_round(result.commits)
    assert result.rounds <= driven.forwards <= result.forwards


@pytest.mark.parametrize("seed", SETTINGS)
def test_decoder_equals_oracle(seed: int) -> None:
    case, result = expected(seed)
    agree(run(case.prompt, case.settings, case.eos, case.model), result)
    assert MASK not in result.tokens
    assert len(result.tokens) + result.eos <= (case.settings.max_new_tokens or 0)


def test_random_settings_visit_every_branch() -> None:
    """The test above proves little if its settings never complete, never stop, never go out of order."""
    seen = dict.fromkeys(
        ["completed", "whole", "stop", "length", "out of order", "dropped", "short last slot", "completed eos"], 0
    )
    for seed in SETTINGS:
        case, result = expected(seed)
        n, k = case.settings.max_new_tokens or 0, case.settings.slot_size or 0
        order = [position for commit in result.commits for position in commit.positions]
        ends = set() if case.settings.ignore_eos else set(case.eos)
        seen["completed"] += any(c.completed for c in result.commits)
        seen["completed eos"] += any(c.completed and ends & set(c.tokens) for c in result.commits)
        seen["whole"] += any(not c.completed and len(c.tokens) > k for c in result.commits)
        seen[result.finish_reason] += 1
        seen["out of order"] += order != sorted(order)
        seen["dropped"] += len(order) > len(result.tokens) + result.eos
        seen["short last slot"] += n % k > 0 and max(order) == n - 1
    assert min(seen.values()) >= 15, seen


def test_fusing_saves_forwards_where_all_is_accepted() -> None:
    """tau_token 0 accepts every draft: after the first select one forward a round is enough."""
    settings = DecodeConfig(
        max_new_tokens=40, slot_size=4, block_size=20, slot_threshold=1.0, token_threshold=0.0
    ).resolve()
    model = HashModel(seed=5, eos=(EOS,), eos_rate=0.0)
    result = oracle.decode(recomputed(model), (3, 4), settings, MASK, (EOS,))
    driven = run((3, 4), settings, (EOS,), model)
    agree(driven, result)
    assert (result.rounds, result.forwards, driven.forwards) == (10, 20, 11)


# --- cases made by hand -----------------------------------------------------------------------------------------------

P = 2  # prompt length of these cases
PROMPT = (10, 11)


def text_of(position: int) -> int:
    return 2 + position % 7


def by_hand(rule: Callable[[Told], Mapping[int, float]], **settings: float) -> oracle.Result:
    """Decode with the oracle and the decoder; they agree, and what they agree on is returned for the test to judge."""
    config = DecodeConfig(**{"token_threshold": 0.5, "slot_threshold": 0.9, **settings}).resolve()  # type: ignore[arg-type]
    model = ToldModel(rule)
    result = oracle.decode(recomputed(model), PROMPT, config, MASK, (EOS,))
    agree(run(PROMPT, config, (EOS,), model), result)
    return result


def target(column: Told) -> int:
    """The response position that a column predicts: a mask its own, another token the next one."""
    return column.position - P + (column.token != MASK)


def knows(column: Told, position: int, token: int) -> bool:
    return (token, P + position) in column.seen


def test_slots_between_chosen_ones_are_generated_after_eos() -> None:
    """docs/traps.md, 6: slots 3 and 5 chosen, EOS in 5; slots 0, 1, 2 and 4 follow, 6 and 7 are closed."""

    def rule(column: Told) -> Mapping[int, float]:
        at = target(column)
        token = EOS if at == 22 else text_of(at)
        if column.token == MASK and at // 4 not in (3, 5) and not knows(column, 12, text_of(12)):
            return {token: 0.5}
        return {token: 0.95}

    result = by_hand(rule, max_new_tokens=32, slot_size=4, block_size=32)
    assert result.tokens == tuple(text_of(i) for i in range(22))
    assert (result.finish_reason, result.eos, result.rounds, result.forwards) == ("stop", True, 2, 4)
    assert [c.positions for c in result.commits] == [
        (12, 13, 14, 15, 20, 21, 22), (*range(12), *range(16, 20)),
    ]  # fmt: skip


def test_eos_in_a_draft_that_is_not_accepted_has_no_effect() -> None:
    """Slots 0 and 1 chosen; slot 1's second token fails, its third is EOS. It is drafted anew, then without EOS."""

    def rule(column: Told) -> Mapping[int, float]:
        at, second_round = target(column), knows(column, 3, text_of(3))
        if column.token == MASK and at == 5 and second_round:
            return {11: 0.95}
        if column.token == MASK and at == 6 and not second_round:
            return {EOS: 0.95}
        if column.token != MASK and at == 5:
            return {11: 0.8, text_of(5): 0.1}
        if column.token == text_of(5) and at == 6:
            return {EOS: 0.95}
        return {text_of(at): 0.95}

    result = by_hand(rule, max_new_tokens=8, slot_size=4, block_size=8)
    assert result.tokens == (*(text_of(i) for i in range(5)), 11, text_of(6), text_of(7))
    assert (result.finish_reason, result.eos, result.forwards) == ("length", False, 4)
    assert [c.positions for c in result.commits] == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_eos_in_the_first_slot_that_is_not_full_commits_up_to_it() -> None:
    """One slot, its third token EOS, its fourth refused: no complete, two forwards, two tokens."""

    def rule(column: Told) -> Mapping[int, float]:
        at = target(column)
        if at == 2:
            return {EOS: 0.95}
        return {text_of(at): 0.1 if column.token != MASK and at == 3 else 0.95}

    result = by_hand(rule, max_new_tokens=4, slot_size=4, block_size=4)
    assert result.tokens == (text_of(0), text_of(1))
    assert (result.eos, result.forwards) == (True, 2)
    assert not result.commits[0].completed


def test_eos_of_verify_commits_the_whole_slots_before_it() -> None:
    """Slots 0, 1, 2 chosen, all accepted, EOS is the first token of slot 1: slot 2 is closed."""

    def rule(column: Told) -> Mapping[int, float]:
        at = target(column)
        return {EOS if at == 4 else text_of(at): 0.95}

    result = by_hand(rule, max_new_tokens=12, slot_size=4, block_size=12)
    assert result.tokens == tuple(text_of(i) for i in range(4))
    assert [c.positions for c in result.commits] == [(0, 1, 2, 3, 4)]


def test_complete_with_eos_drops_later_slots_and_finishes_earlier_ones() -> None:
    """Slots 0, 1, 2 chosen; slot 0 fails at its second token; slot 1's own run holds EOS; slot 2 is dropped."""

    def rule(column: Told) -> Mapping[int, float]:
        at = target(column)
        if column.token == text_of(0) and at == 1:
            return {text_of(1): 0.1, 11: 0.8}  # slot 0: refused in verify
        if column.token == MASK and at == 1 and knows(column, 0, text_of(0)):
            assert not any(position >= P + 4 for _, position in column.seen), "a slot saw its sibling"
            return {11: 0.95}  # re-drafted in complete
        return {EOS if at == 5 else text_of(at): 0.95}

    result = by_hand(rule, max_new_tokens=12, slot_size=4, block_size=12)
    assert result.tokens == (text_of(0), 11, text_of(2), text_of(3), text_of(4))
    assert (result.finish_reason, result.forwards, result.rounds) == ("stop", 4, 1)
    assert result.commits[0].positions == (0, 1, 2, 3, 4, 5) and result.commits[0].completed


def test_complete_gains_at_least_one_token_a_turn() -> None:
    """Nothing but free tokens is ever accepted: a slot of 5 takes 4 turns, 2 forwards each."""

    def rule(column: Told) -> Mapping[int, float]:
        return {text_of(target(column)): 0.95 if column.token == MASK else 0.1}

    result = by_hand(rule, max_new_tokens=5, slot_size=5, block_size=5)
    assert result.tokens == tuple(text_of(i) for i in range(5))
    assert (result.rounds, result.forwards) == (1, 2 + 2 * 4)


def test_an_earlier_eos_drops_what_stood_committed_after_it() -> None:
    """Round 0 commits slot 2 (no EOS); then slot 0 ends with EOS: slot 1 is closed, slot 2 is seen but not output."""

    def rule(column: Told) -> Mapping[int, float]:
        at = target(column)
        late = knows(column, 8, text_of(8))
        if column.token == MASK and not late:
            return {text_of(at): 0.95 if at >= 8 else 0.5}
        return {EOS if late and at == 2 else text_of(at): 0.95}

    result = by_hand(rule, max_new_tokens=12, slot_size=4, block_size=12)
    assert result.tokens == (text_of(0), text_of(1))
    assert [c.positions for c in result.commits] == [(8, 9, 10, 11), (0, 1, 2)]
    assert result.finish_reason == "stop"


def test_equal_scores_choose_the_earliest_slot_and_equal_tokens_the_lowest_id() -> None:
    def rule(column: Told) -> Mapping[int, float]:
        return {4: 0.375, 3: 0.375}

    result = by_hand(rule, max_new_tokens=6, slot_size=2, block_size=6, token_threshold=0.25)
    assert result.tokens == (3,) * 6
    assert [c.positions for c in result.commits] == [(0, 1), (2, 3), (4, 5)]


def test_a_probability_equal_to_its_threshold_does_not_exceed_it() -> None:
    """Scores of 0.5 choose no slot but the best; a token verified at 0.5 is refused and drafted anew as 11."""

    def rule(column: Told) -> Mapping[int, float]:
        at = target(column)
        anew = column.token == MASK and at % 2 == 1 and knows(column, at - 1, text_of(at - 1))
        return {11 if anew else text_of(at): 0.5}

    result = by_hand(rule, max_new_tokens=4, slot_size=2, block_size=4, slot_threshold=0.5, token_threshold=0.5)
    assert result.tokens == (text_of(0), 11, text_of(2), 11)
    assert [(c.positions, c.completed) for c in result.commits] == [((0, 1), True), ((2, 3), True)]
    assert result.forwards == 8


def test_blocks_hold_whole_slots_only() -> None:
    """b=7, k=3: two slots a block; a surer slot of a later block waits."""

    def rule(column: Told) -> Mapping[int, float]:
        at = target(column)
        return {text_of(at): 0.99 if at >= 6 else 0.95}

    result = by_hand(rule, max_new_tokens=11, slot_size=3, block_size=7)
    assert [c.positions for c in result.commits] == [tuple(range(6)), tuple(range(6, 11))]


@dataclass
class Watched(Script):
    """Writes down the line of (token, position) that each row of each request sees."""

    lines: list[list[tuple[int, int]]] = field(default_factory=list)

    def __call__(self, request: Forward) -> Answer:
        answer = super().__call__(request)
        for row, segment in enumerate(request.segments):
            own = [c for c, s in zip(self.last[: row + 1], request.segments, strict=False) if s == segment]
            self.lines.append([(c.token, c.position) for c in self.cache + own])
        return answer


def test_worked_example_of_the_method() -> None:
    """METHOD 2: P=3, n=8, k=4, slot 1 first. Buffer: x0 x1 x2 | r4 r5 r6 r7 | M M M M at 0 1 2 | 7 8 9 10 | 3 4 5 6."""

    def rule(column: Told) -> Mapping[int, float]:
        at = column.position - 3 + (column.token != MASK)
        unsure = column.token == MASK and at < 4 and (text_of(4), 7) not in column.seen
        return {text_of(at): 0.5 if unsure else 0.95}

    config = DecodeConfig(
        max_new_tokens=8, slot_size=4, block_size=8, slot_threshold=0.9, token_threshold=0.4
    ).resolve()
    watched = Watched(ToldModel(rule))
    driven = drive(decode((9, 10, 11), config, TokenIds(mask=MASK, eos=(EOS,))), watched)
    prompt = [(9, 0), (10, 1), (11, 2)]
    slot_1 = [(text_of(i), 3 + i) for i in range(4, 8)]
    slot_0 = [(text_of(i), 3 + i) for i in range(4)]
    masks = [(MASK, 3 + i) for i in range(8)]
    first = driven.requests[0]
    assert list(zip(first.tokens, first.positions, strict=True)) == prompt + masks
    assert prompt + slot_1 + masks[:4] in watched.lines  # the last mask of the second selection
    assert prompt + slot_1 + slot_0 in watched.lines  # the last draft of the second verification
    assert [c.positions for c in driven.of(Committed)] == [(4, 5, 6, 7), (0, 1, 2, 3)]
    assert driven.events[-1] == Finished("length", tuple(text_of(i) for i in range(8)), False)
    assert driven.forwards <= 4


# --- a tiny transformer: cached == recomputed under the recorded visibility -------------------------------------------


class Store:
    """Keys and values by plain concatenation; the rows of the last forward wait until some of them are kept."""

    def __init__(self, layers: int) -> None:
        self.kept: list[tuple[Tensor, Tensor] | None] = [None] * layers
        self.last: list[tuple[Tensor, Tensor] | None] = [None] * layers

    @property
    def length(self) -> int:
        return 0 if self.kept[0] is None else self.kept[0][0].shape[2]

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.last[layer] = (k, v)
        before = self.kept[layer]
        return (k, v) if before is None else (torch.cat((before[0], k), 2), torch.cat((before[1], v), 2))

    def keep(self, rows: Sequence[int]) -> None:
        for layer, (before, last) in enumerate(zip(self.kept, self.last, strict=True)):
            if rows and last is not None:
                k, v = last[0][:, :, list(rows)], last[1][:, :, list(rows)]
                self.kept[layer] = (
                    (k, v) if before is None else (torch.cat((before[0], k), 2), torch.cat((before[1], v), 2))
                )


@dataclass
class Cached:
    """Answers requests from a transformer with a cache that only ever grows."""

    model: Transformer
    store: Store

    def __call__(self, request: Forward) -> Answer:
        self.store.keep(request.keep)
        rows, before = len(request.tokens), self.store.length
        mask = torch.ones(rows, before + rows, dtype=torch.bool)
        segments = torch.tensor(request.segments)
        mask[:, before:] = (segments[:, None] == segments[None, :]).tril()
        out = softmax(self.model, request.tokens, request.positions, mask, self.store)
        return answered(request, lambda row: out[row], barred=(MASK,))


@torch.no_grad()
def softmax(
    model: Transformer, tokens: Sequence[int], positions: Sequence[int], mask: Tensor, store: Store | None = None
) -> Tensor:
    """Probabilities, float32 [rows, V]."""
    hidden = model(torch.tensor([tokens]), torch.tensor([positions]), mask[None, None], store)
    return model.logits(hidden)[0].float().softmax(-1)


def tiny(seed: int) -> Transformer:
    config = ModelConfig(
        "qwen3", vocab_size=14, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, qk_norm=True, initializer_range=0.4,
    )  # fmt: skip
    return Transformer(config).eval().initialize(torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", range(24))
def test_cached_equals_recomputed_under_the_recorded_visibility(seed: int) -> None:
    model = tiny(seed)
    for attempt in range(100):
        rng = random.Random(f"tiny {seed} {attempt}")
        size = rng.randint(1, 6)
        settings = DecodeConfig(
            max_new_tokens=rng.randint(5, 30), slot_size=size, block_size=size + rng.randint(0, 24),
            slot_threshold=rng.choice([0.1, 0.2, 0.4]), token_threshold=rng.choice([0.0, 0.02, 0.1, 0.3]),
            ignore_eos=rng.random() < 0.5, **ablation(rng),
        ).resolve()  # fmt: skip
        prompt = [rng.randint(2, 13) for _ in range(rng.randint(1, 8))]
        result = oracle.decode(partial(softmax, model), prompt, settings, MASK, (EOS,))
        if result.margin >= NEAR:
            break
    store = Store(model.config.num_hidden_layers)
    agree(drive(decode(prompt, settings, TokenIds(mask=MASK, eos=(EOS,))), Cached(model, store)), result)
    same_keys_and_values(model, store, result)


def same_keys_and_values(model: Transformer, store: Store, result: oracle.Result) -> None:
    """What the cache holds is what one forward gives when every token sees what it saw when it was committed."""
    visible = torch.zeros(len(result.buffer), len(result.buffer), dtype=torch.bool)
    for i, column in enumerate(result.buffer):
        visible[i, list(column.seen)] = True
    whole = Store(model.config.num_hidden_layers)
    softmax(model, [c.token for c in result.buffer], [c.position for c in result.buffer], visible, whole)
    for cached, recomputed_ in zip(store.kept, whole.last, strict=True):
        if cached is not None and recomputed_ is not None:
            for ours, theirs in zip(cached, recomputed_, strict=True):
                torch.testing.assert_close(ours, theirs[:, :, : ours.shape[2]], atol=1e-4, rtol=1e-4)
