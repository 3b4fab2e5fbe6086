"""How a training row is corrupted: METHOD 3 by hand, by property and by frequency."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from refusion.config import UserError
from refusion.methods.base import Example, TokenIds, TrainingRow
from refusion.methods.refusion import corrupt
from refusion.methods.refusion.corrupt import AR, MDM, ReFusionObjective, choose_slots
from refusion.training.data import infilling, question

MASK, EOS = 3, 2
IDS = TokenIds(MASK, (EOS,))
HELPS: dict[str, Any] = {"autoregressive_fraction": 0.25, "partial_slot_fraction": 0.5, "eos_fill": True}


def example(prompt: int, answer: int) -> Example:
    """Tokens that are all different, and none of them special but the last: 100.. and 200.. and end-of-sequence."""
    return question(100 + np.arange(prompt), np.append(200 + np.arange(answer - 1), EOS))


def rows(objective: ReFusionObjective, of: Example, count: int, seed: int = 0) -> list[TrainingRow]:
    return [objective.row(of, np.random.default_rng([seed, i])) for i in range(count)]


def same(one: TrainingRow, other: TrainingRow) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(vars(one).values(), vars(other).values(), strict=True))


# --- by hand


def scripted(monkeypatch: pytest.MonkeyPatch, *masked: bool) -> None:
    monkeypatch.setattr(corrupt, "choose_slots", lambda count, kind, rng, *_: (np.array(masked), 0.5))


def test_worked_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one in the module's docstring: prompt `p q`, answer `a b c d e`, k = 2, slots 1 and 2 masked."""
    scripted(monkeypatch, False, True, True)
    p, q, a, b, c, d, e = 10, 11, 12, 13, 14, 15, EOS
    row = ReFusionObjective(IDS, (2,)).row(question(np.array([p, q]), np.array([a, b, c, d, e])), np.random.default_rng(0))
    assert row.tokens.tolist() == [p, q, a, b, MASK, MASK, MASK]
    assert row.positions.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert row.targets.tolist() == [-1, -1, b, -1, c, d, e]
    assert row.losses[row.targets >= 0].tolist() == [AR, MDM, MDM, MDM]
    assert row.weights.tolist() == [1.0] * 7


def test_worked_example_of_the_method_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """METHOD 2: P = 3, n = 8, k = 4, slot 1 clean: positions 0 1 2 | 7 8 9 10 | 3 4 5 6."""
    scripted(monkeypatch, True, False)
    row = ReFusionObjective(IDS, (4,)).row(example(3, 8), np.random.default_rng(0))
    assert row.positions.tolist() == [0, 1, 2, 7, 8, 9, 10, 3, 4, 5, 6]
    assert row.tokens.tolist() == [100, 101, 102, 204, 205, 206, EOS, MASK, MASK, MASK, MASK]
    assert row.targets.tolist() == [-1, -1, -1, 205, 206, EOS, -1, 200, 201, 202, 203]


def test_end_of_sequence_fills_the_last_slot_and_clean_slots_stop_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    objective = ReFusionObjective(IDS, (4,), eos_fill=True)
    for masked, tail in ((True, [MASK] * 4), (False, [204, EOS])):
        scripted(monkeypatch, False, masked, masked, masked, masked)
        row = objective.row(example(1, 6), np.random.default_rng(3))
        assert row.tokens[5 : 5 + len(tail)].tolist() == tail or not masked
        asked = row.targets[row.tokens == MASK]
        assert asked.tolist() == ([204] + [EOS] * (len(asked) - 1) if masked else [])
        assert Counter(row.tokens.tolist())[EOS] == (0 if masked else 1)


# --- unrolled rows


def unrolled(of: Example, seed: int = 0, **settings: Any) -> TrainingRow:
    return ReFusionObjective(IDS, unrolled_fraction=1.0, **settings).row(of, np.random.default_rng(seed))


def test_worked_example_of_an_unrolled_row() -> None:
    """The one in the module's docstring: the order 0, 1, 2."""
    p, q, a, b, c, d, e = 10, 11, 12, 13, 14, 15, EOS
    of = question(np.array([p, q]), np.array([a, b, c, d, e]))
    row = next(
        row for row in (unrolled(of, seed, slot_sizes=(2,), first_token_weight=3.0) for seed in range(99)) if row.targets[1] == a
    )
    assert row.tokens.tolist() == [p, q, a, b, c, d, e] + [MASK] * 5
    assert row.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 2, 3, 4, 5, 6]
    assert row.targets.tolist() == [-1, a, b, c, d, e, -1, a, b, c, d, e]
    assert row.losses.tolist() == [AR] * 7 + [MDM] * 5
    assert row.segments.tolist() == [0] * 7 + [1, 1, 2, 2, 3]
    assert row.prefixes.tolist() == [0] * 7 + [2, 2, 4, 4, 6]
    assert row.weights.tolist() == [1.0] * 7 + [3, 1, 3, 1, 3]


@settings(max_examples=250, deadline=None)
@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 10**6), st.sampled_from([0.0, 0.5]), st.booleans())
def test_each_slot_of_an_unrolled_row_sees_what_was_written_before_it(
    size: int, length: int, seed: int, partial: float, fill: bool
) -> None:
    of = example(3, length)
    row = unrolled(of, seed, slot_sizes=(size,), partial_slot_fraction=partial, eos_fill=fill)
    clean = row.segments == 0
    assert sorted(row.tokens[clean][3:].tolist()) == sorted(of.answer.tolist()) and MASK not in row.tokens[clean]
    slots = list(dict.fromkeys((row.positions[clean][3:] - 3) // size))  # in the order of writing
    assert row.segments.max() == len(slots)
    before = 3
    for segment, slot in enumerate(slots, 1):
        own = row.segments == segment
        assert set(row.prefixes[own]) == {before}
        start, end = slot * size, min((slot + 1) * size, length)
        assert row.positions[own].tolist()[: end - start] == list(range(3 + start, 3 + end))
        there = np.where(row.tokens == MASK, row.targets, row.tokens)[own]
        assert there.tolist()[: end - start] == of.answer[start:end].tolist()
        assert set(there[end - start :]) <= {EOS} and (fill or len(there) == end - start) and len(there) <= size
        before += end - start
    in_order = slots == sorted(slots) and row.targets[2] >= 0
    asked = row.targets[clean]
    assert not in_order or asked.tolist() == [-1, -1, *of.answer, -1]
    assert in_order or (asked[:3] == -1).all()


def test_unrolled_rows_come_in_their_share_and_in_many_orders() -> None:
    of = example(2, 32)
    made = rows(ReFusionObjective(IDS, (4,), unrolled_fraction=0.4, autoregressive_fraction=0.2), of, 3000)
    are = [row for row in made if row.segments.any()]
    assert z(np.array([1] * len(are) + [0] * (3000 - len(are))), 0.4, 0.24) < 4
    in_order = np.array([row.targets[1] >= 0 for row in are])
    assert z(in_order, 0.5, 0.25) < 4
    orders = {tuple(row.positions[row.segments == 0]) for row in are}
    assert len(orders) > len(are) / 4
    assert z(np.array([row.targets[1] >= 0 and not row.segments.any() for row in made]), 0.2, 0.16) < 4


def test_rows_with_a_gap_are_never_unrolled() -> None:
    of = infilling(100 + np.arange(3), np.append(200 + np.arange(30), EOS), np.random.default_rng(0))
    assert all(not unrolled(of, seed).segments.any() for seed in range(20))


def test_the_first_token_of_every_masked_run_weighs_more() -> None:
    of = example(2, 19)
    for normalisation in ("targets", "upstream"):
        for fraction in (0.0, 1.0):
            common: dict[str, Any] = {"normalisation": normalisation, "unrolled_fraction": fraction, "partial_slot_fraction": 0.5}
            for seed in range(30):
                one = ReFusionObjective(IDS, (4,), **common).row(of, np.random.default_rng(seed))
                row = ReFusionObjective(IDS, (4,), first_token_weight=2.5, **common).row(of, np.random.default_rng(seed))
                heavy = row.weights / one.weights
                begins = (row.tokens == MASK) & (
                    ((row.positions - 2) % 4 == 0) | (np.roll(row.tokens, 1) != MASK)
                )
                assert np.allclose(heavy, np.where(begins, 2.5, 1.0))


# --- properties


@st.composite
def cases(draw: st.DrawFn) -> tuple[ReFusionObjective, Example, int]:
    objective = ReFusionObjective(
        IDS, tuple(draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))), None, draw(st.sampled_from(["count", "bernoulli"])),
        draw(st.sampled_from(["targets", "upstream"])), autoregressive_fraction=draw(st.sampled_from([0.0, 0.3])),
        partial_slot_fraction=draw(st.sampled_from([0.0, 0.5, 1.0])), eos_fill=draw(st.booleans()),
    )  # fmt: skip
    of = example(draw(st.integers(1, 6)), draw(st.integers(1, 50)))
    seed = draw(st.integers(0, 10**6))
    if len(of.answer) >= 5 and draw(st.booleans()):
        of = infilling(of.context, of.answer, np.random.default_rng(seed))
    return objective, of, seed


def written(of: Example, row: TrainingRow) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Tokens, places in the answer and targets of the part of a row that is no context."""
    at = len(of.context)
    return row.tokens[at:], row.positions[at:] - of.start, row.targets[at:]


@settings(max_examples=250, deadline=None)
@given(cases())
def test_every_token_of_the_answer_stands_once_clean_or_asked_for(case: tuple[ReFusionObjective, Example, int]) -> None:
    objective, of, seed = case
    row = objective.row(of, np.random.default_rng(seed))
    tokens, places, targets = written(of, row)
    there = np.where(tokens == MASK, targets, tokens)
    order = np.argsort(places)
    length = len(of.answer)
    assert places[order].tolist()[:length] == list(range(length))
    assert there[order].tolist()[:length] == of.answer.tolist()
    assert len(set(places.tolist())) == len(places)
    beyond = order[length:]  # only with eos_fill: end-of-sequence, always asked for
    assert not len(beyond) or objective.eos_fill
    assert (tokens[beyond] == MASK).all() and (targets[beyond] == EOS).all()
    if of.room is not None:
        assert places.max() < of.room


@settings(max_examples=250, deadline=None)
@given(cases())
def test_what_is_asked_for(case: tuple[ReFusionObjective, Example, int]) -> None:
    objective, of, seed = case
    row = objective.row(of, np.random.default_rng(seed))
    at = len(of.context)
    assert row.tokens[:at].tolist() == of.context.tolist()
    assert row.positions[:at].tolist() == of.context_positions.tolist()
    whole = not (row.tokens == MASK).any() and row.targets[at - 1] >= 0  # left whole and in order
    assert (row.targets[: at - whole] == -1).all()  # nothing of the prompt; its last token asks for the answer's first
    assert not (row.targets == MASK).any()
    assert (row.losses[row.tokens == MASK] == MDM).all() and (row.targets[row.tokens == MASK] >= 0).all()
    clean = np.flatnonzero((row.tokens != MASK) & (row.targets >= 0))
    assert (row.losses[clean] == AR).all() and (row.weights[clean] == 1).all()
    for i in clean:  # the next token, which stands next to it in the buffer and in the text
        assert row.targets[i] == row.tokens[i + 1]
        assert whole or row.positions[i + 1] == row.positions[i] + 1
    assert not whole or (row.targets[at - 1 : -1] == of.answer).all()


@settings(max_examples=250, deadline=None)
@given(cases())
def test_the_same_seed_gives_the_same_row(case: tuple[ReFusionObjective, Example, int]) -> None:
    objective, of, seed = case
    before = [of.context.copy(), of.answer.copy(), of.context_positions.copy()]
    one, other = (objective.row(of, np.random.default_rng(seed)) for _ in range(2))
    assert same(one, other)
    assert all(np.array_equal(a, b) for a, b in zip(before, (of.context, of.answer, of.context_positions), strict=True))


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 9), st.integers(1, 60), st.integers(0, 10**6))
def test_masked_slots_stand_after_the_clean_ones_in_ascending_order(size: int, length: int, seed: int) -> None:
    of = example(2, length)
    row = ReFusionObjective(IDS, (size,), corruption="bernoulli").row(of, np.random.default_rng(seed))
    tokens, places, targets = written(of, row)
    first = int((tokens != MASK).sum())
    assert (tokens[:first] != MASK).all() and (np.diff(places[first:]) > 0).all()
    clean = places[:first].tolist()
    slots = list(dict.fromkeys(place // size for place in clean))
    assert clean == [p for s in slots for p in range(s * size, min((s + 1) * size, length))]  # whole slots, each in order
    ends = [i for i in range(first) if i + 1 == first or places[i + 1] // size != places[i] // size]
    assert (targets[ends] == -1).all() and (np.delete(targets[:first], ends) >= 0).all()


def test_clean_slots_stand_in_every_order_equally_often() -> None:
    orders: Counter[tuple[int, ...]] = Counter()
    for row in rows(ReFusionObjective(IDS, (2,)), example(1, 6), 4000):
        clean = row.positions[1:][row.tokens[1:] != MASK]
        if len(clean) == 4:
            orders[tuple(clean[::2])] += 1
    total = sum(orders.values())
    assert len(orders) == 6 and total > 1000  # two of three slots, in both orders
    assert all(abs(n / total - 1 / 6) < 5 * (5 / 36 / total) ** 0.5 for n in orders.values())


# --- which slots are masked


class Fixed:
    """A generator whose first number makes t what we say."""

    def __init__(self, t: float) -> None:
        self.t, self.rng = t, np.random.default_rng(0)

    def random(self, size: int | None = None) -> Any:
        return 1 - self.t if size is None else self.rng.random(size)

    def permutation(self, count: int) -> Any:
        return self.rng.permutation(count)


@pytest.mark.parametrize(("t", "count", "masked"), [
    (1.0, 4, 4), (1.0, 1, 1), (0.999, 1, 0), (0.75, 4, 3), (0.5, 5, 2), (0.25, 4, 1), (0.2, 4, 0), (1e-9, 7, 0), (0.5, 1, 0),
])  # fmt: skip
def test_count_masks_exactly_floor_of_t_times_slots(t: float, count: int, masked: int) -> None:
    assert choose_slots(count, "count", Fixed(t))[0].sum() == masked  # type: ignore[arg-type]


def z(values: NDArray[Any], mean: float, variance: float) -> float:
    """By how many standard deviations the mean of values differs from what it should be."""
    return abs(float(np.mean(values)) - mean) / (variance / len(values)) ** 0.5


def test_count_masks_every_number_of_slots_and_every_slot_equally_often() -> None:
    rng = np.random.default_rng(1)
    drawn = np.array([choose_slots(5, "count", rng)[0] for _ in range(8000)])
    for number in range(5):  # floor(5 t): 0..4, each for a fifth of all t; 5 only at t = 1
        assert z(drawn.sum(1) == number, 0.2, 0.16) < 4
    for slot in range(5):
        assert z(drawn[:, slot], 0.4, 0.24) < 4


def test_bernoulli_masks_each_slot_alone_with_the_probability_it_reports() -> None:
    rng = np.random.default_rng(2)
    drawn = [choose_slots(6, "bernoulli", rng) for _ in range(8000)]
    masked, p = np.array([m for m, _ in drawn]), np.array([p for _, p in drawn])
    assert p.min() > 0.001 and p.max() <= 1.0 + 1e-12
    assert z(p, 0.5005, 0.999**2 / 12) < 4 and z(p**2, 0.999**2 / 3 + 0.001 * 0.999 + 1e-6, 0.09) < 4  # uniform
    for slot in range(6):
        assert z(masked[:, slot] - p, 0.0, float(np.mean(p * (1 - p)))) < 4
    pairs = (masked[:, 0] - p) * (masked[:, 1] - p)
    assert z(pairs, 0.0, float(np.mean((p * (1 - p)) ** 2))) < 4  # given p, slots are independent
    assert choose_slots(3, "bernoulli", Fixed(1.0))[1] == pytest.approx(1.0)  # type: ignore[arg-type]
    assert choose_slots(3, "bernoulli", Fixed(1e-12))[1] == pytest.approx(0.001)  # type: ignore[arg-type]


def test_slot_sizes_are_drawn_by_their_weights() -> None:
    """Answer of 16: one slot of 16 is never masked ("count", t < 1), of 4 slots of 4 some are in 3 rows of 4."""
    of = example(1, 16)
    for weights, share in ((None, 0.5), ((3.0, 1.0), 0.75), ((0.0, 2.0), 0.0)):
        made = rows(ReFusionObjective(IDS, (4, 16), weights), of, 3000)
        masks = np.array([(row.tokens == MASK).any() for row in made])
        assert z(masks, 0.75 * share, max(0.75 * share * (1 - 0.75 * share), 1e-9)) < 4


@pytest.mark.parametrize("kind", ["count", "bernoulli"])
def test_upstream_weights_are_one_over_p_times_length(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[float] = []

    def spy(count: int, corruption: str, rng: np.random.Generator, *noise: Any) -> tuple[NDArray[np.bool_], float]:
        masked, p = choose_slots(count, corruption, rng, *noise)
        reported.append(p)
        return masked, p

    monkeypatch.setattr(corrupt, "choose_slots", spy)
    objective = ReFusionObjective(IDS, (4,), corruption=kind, normalisation="upstream")
    made = rows(objective, example(2, 22), 50)
    for row, p in zip(made, reported, strict=True):
        assert np.allclose(row.weights, np.where(row.losses == MDM, 1 / (p * 22), 1.0))
    assert objective.losses[1].per == "rows" and ReFusionObjective(IDS).losses[1].per == "targets"


def test_upstream_loss_is_an_unbiased_mean_over_the_answer() -> None:
    """The expected sum of weights over a row is 1: each token counts 1/length, whatever t."""
    objective = ReFusionObjective(IDS, (1,), corruption="bernoulli", normalisation="upstream")
    sums = np.array([row.weights[row.tokens == MASK].sum() for row in rows(objective, example(1, 40), 4000)])
    assert z(sums, 1.0, float(sums.var())) < 4


# --- the three helps


def test_autoregressive_rows() -> None:
    objective = ReFusionObjective(IDS, (4,), autoregressive_fraction=0.3)
    of = example(3, 9)
    whole = [row for row in rows(objective, of, 3000) if row.targets[2] >= 0]
    assert z(np.array([1] * len(whole) + [0] * (3000 - len(whole))), 0.3, 0.21) < 4
    for row in whole[:20]:
        assert row.tokens.tolist() == [*of.context, *of.answer] and row.positions.tolist() == list(range(12))
        assert row.targets.tolist() == [-1, -1, *of.answer, -1]
        assert (row.losses == AR).all()
    assert all(row.targets[2] < 0 for row in rows(ReFusionObjective(IDS, (4,)), of, 300))  # off by default


def test_partial_slots_keep_a_random_clean_beginning() -> None:
    """Slots of 8 with the end masked: beginnings of 1..7 tokens, equally often, in half of the masked slots."""
    of = example(2, 32)
    begun: Counter[int] = Counter()
    masked_slots = 0
    for row in rows(ReFusionObjective(IDS, (8,), partial_slot_fraction=0.5), of, 1500):
        tokens, places, targets = written(of, row)
        for slot in range(4):
            inside = np.flatnonzero(places // 8 == slot)
            mask = tokens[inside] == MASK
            if not mask.any():
                continue
            known = int((~mask).sum())
            masked_slots += 1
            begun[known] += 1
            assert (np.diff(inside) == 1).all() and (np.diff(places[inside]) == 1).all()  # one run, in its place in the text
            assert not mask[:known].any() and mask[known:].all()
            assert known == 0 or targets[inside[known - 1]] == -1  # what follows is asked for at the mask, not twice
    assert z(np.array([k > 0 for k in begun.elements()]), 0.5, 0.25) < 4
    assert set(begun) == set(range(8))
    for known in range(1, 8):
        assert z(np.array([k == known for k in begun.elements() if k]), 1 / 7, 6 / 49) < 4
    plain = rows(ReFusionObjective(IDS, (8,)), of, 300)
    assert all((written(of, row)[0] == MASK).sum() % 8 == 0 for row in plain)  # off by default


def test_partial_slots_never_hold_the_end_of_the_answer_as_known() -> None:
    of = example(2, 11)
    for row in rows(ReFusionObjective(IDS, (8,), partial_slot_fraction=1.0, eos_fill=True), of, 500):
        tokens, places, _ = written(of, row)
        last = tokens[(places >= 8) & (places < 16)]
        if (last == MASK).any():
            assert EOS not in last[last != MASK]


def test_end_of_sequence_fill() -> None:
    of = example(2, 11)
    lengths = Counter()
    for row in rows(ReFusionObjective(IDS, (4,), corruption="bernoulli", eos_fill=True), of, 3000):
        tokens, places, targets = written(of, row)
        beyond = places >= 11
        assert (targets[beyond] == EOS).all() and (tokens[beyond] == MASK).all()
        lengths[int(places.max()) // 4] += 1
    assert set(lengths) == {2, 3, 4, 5}  # its own last slot, and at times 1-3 slots more
    assert lengths[2] > 0.6 * 3000
    without = rows(ReFusionObjective(IDS, (4,), corruption="bernoulli"), of, 300)
    assert all(written(of, row)[1].max() < 11 for row in without)  # off by default


def test_a_gap_that_fits_exactly_is_not_filled_and_a_wide_one_is_filled_up_to_its_room() -> None:
    objective = ReFusionObjective(IDS, (4,), corruption="bernoulli", eos_fill=True)
    prompt, answer = 100 + np.arange(3), np.append(200 + np.arange(39), EOS)
    most: dict[bool, int] = Counter()
    for seed in range(2000):
        of = infilling(prompt, answer, np.random.default_rng(seed))
        assert of.room is not None
        row = objective.row(of, np.random.default_rng([seed, 1]))
        _, places, _ = written(of, row)
        assert places.max() < of.room
        ends = of.answer[-1] == EOS
        assert ends or len(places) == of.room == len(of.answer)
        most[bool(places.max() == of.room - 1)] += ends
    assert most[True] > 200  # the room is used


def test_rows_with_a_gap_are_never_left_in_order() -> None:
    objective = ReFusionObjective(IDS, (4,), autoregressive_fraction=1.0)
    of = infilling(100 + np.arange(3), np.append(200 + np.arange(30), EOS), np.random.default_rng(0))
    assert any((row.tokens == MASK).any() for row in rows(objective, of, 20))
    assert all(row.targets[len(of.context) - 1] == -1 for row in rows(objective, of, 20))


def test_all_helps_together_hit_every_kind_of_row() -> None:
    kinds = Counter()
    for row in rows(ReFusionObjective(IDS, (4, 8), (1, 2), **HELPS), example(4, 21), 400):
        mask = row.tokens == MASK
        kinds["whole"] += bool(row.targets[3] >= 0)
        kinds["masked"] += bool(mask.any())
        kinds["beyond"] += bool((row.positions >= 25).any())
    assert min(kinds.values()) > 40 and len(kinds) == 3


# --- misuse


@pytest.mark.parametrize(("setting", "message"), [
    ({"ids": TokenIds(None, (EOS,))}, "mask token"),
    ({"slot_sizes": ()}, "slot_sizes"), ({"slot_sizes": (4, 0)}, "slot_sizes"),
    ({"slot_weights": (1.0,)}, "slot_weights"), ({"slot_weights": (0.0,) * 4}, "slot_weights"),
    ({"slot_weights": (1.0, -1.0, 1.0, 1.0)}, "slot_weights"), ({"slot_weights": (float("nan"),) * 4}, "slot_weights"),
    ({"corruption": "counts"}, "corruption"), ({"normalisation": "upsteam"}, "normalisation"),
    ({"unrolled_fraction": 1.5}, "unrolled_fraction"), ({"unrolled_fraction": 0.6, "autoregressive_fraction": 0.5}, "together"),
    ({"first_token_weight": 0.0}, "first_token_weight"), ({"first_token_weight": float("inf")}, "first_token_weight"),
    ({"autoregressive_fraction": 1.5}, "autoregressive_fraction"), ({"partial_slot_fraction": -0.1}, "partial_slot_fraction"),
])  # fmt: skip
def test_misuse_is_one_line_that_names_the_setting(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        ReFusionObjective(**{"ids": IDS, **setting})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "share"),
    [({}, 0.5), ({"noise_range": (0.3, 0.5)}, 0.4), ({"noise_schedule": "cosine"}, 2 / np.pi), ({"noise_range": (1.0, 1.0)}, 1.0),
     ({"noise_schedule": "cosine", "noise_range": (0.5, 1.0)}, 0.5 + 1 / np.pi)],
)  # fmt: skip
@pytest.mark.parametrize("corruption", ["count", "bernoulli"])
def test_how_much_is_masked(settings: dict[str, Any], share: float, corruption: str) -> None:
    objective = ReFusionObjective(TokenIds(3, (2,)), corruption=corruption, **settings)
    rng = np.random.default_rng(0)
    masked = [choose_slots(400, corruption, rng, objective._noise)[0].mean() for _ in range(3000)]
    assert np.mean(masked) == pytest.approx(share, abs=0.02)
    low, high = settings.get("noise_range", (0.0, 1.0))
    assert low - 0.1 <= min(masked) and max(masked) <= high + 0.1


@pytest.mark.parametrize(
    "settings", [{"noise_schedule": "linear"}, {"noise_range": (0.5,)}, {"noise_range": (0.8, 0.3)}, {"noise_range": (0.0, 0.0)}]
)
def test_noise_that_is_none(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(settings))):
        ReFusionObjective(TokenIds(3, (2,)), **settings)
