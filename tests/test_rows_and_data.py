"""From pairs of prompt and answer to padded batches: pure functions of (data, seed, step)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refusion.methods.autoregressive import AutoregressiveObjective
from refusion.methods.base import Objective, TokenIds
from refusion.methods.refusion.corrupt import ReFusionObjective
from refusion.methods.rows import RowBuilder, next_token_row
from refusion.training.data import Batch, Batches, RowStore, cached_store, collate, infilling, question

MASK, EOS = 3, 2
PROMPT, ANSWER = np.array([10, 11, 12]), np.array([20, 21, 22, 23, EOS])
HYBRID = ReFusionObjective(
    TokenIds(MASK, (EOS,)), (4, 8, 16), (1, 2, 1), autoregressive_fraction=0.25, partial_slot_fraction=0.2, eos_fill=True
)


def pairs(count: int, seed: int = 0) -> Iterator[tuple[list[int], list[int]]]:
    """Rows of many lengths; the first token of each is its number."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        prompt = [1000 + number, *rng.integers(10, 900, rng.integers(1, 30)).tolist()]
        yield prompt, [*rng.integers(10, 900, rng.integers(0, 40)).tolist(), EOS]


@pytest.fixture(scope="module")
def store() -> RowStore:
    return RowStore.build(pairs(530))


def equal(one: Batch, other: Batch) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(vars(one).values(), vars(other).values(), strict=True))


# --- rows


def test_next_token_row() -> None:
    row = next_token_row(question(PROMPT, ANSWER), 0)
    assert row.tokens.tolist() == [10, 11, 12, 20, 21, 22, 23, EOS]
    assert row.positions.tolist() == list(range(8))
    assert row.targets.tolist() == [-1, -1, 20, 21, 22, 23, EOS, -1]
    assert row.losses.tolist() == [0] * 8 and row.weights.tolist() == [1.0] * 8


def test_next_token_row_with_loss_on_the_prompt() -> None:
    row = next_token_row(question(PROMPT, ANSWER), 1, prompt_loss=True)
    assert row.targets.tolist() == [11, 12, 20, 21, 22, 23, EOS, -1]
    assert row.losses.tolist() == [1] * 8


def test_row_builder_puts_runs_after_the_context() -> None:
    builder = RowBuilder(question(PROMPT, ANSWER))
    builder.add(np.array([22, 23]), 5, np.array([23, -1]), 0)
    builder.add(np.array([MASK, MASK]), 3, np.array([20, 21]), 1)
    row = builder.build({1: 0.25})
    assert row.tokens.tolist() == [10, 11, 12, 22, 23, MASK, MASK]
    assert row.positions.tolist() == [0, 1, 2, 5, 6, 3, 4]
    assert row.targets.tolist() == [-1, -1, -1, 23, -1, 20, 21]
    assert row.losses.tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert row.weights.tolist() == [1, 1, 1, 1, 1, 0.25, 0.25] and row.weights.dtype == np.float32


# --- gaps


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 20), st.integers(5, 90), st.integers(0, 10**6))
def test_infilling(prompt_length: int, answer_length: int, seed: int) -> None:
    prompt, answer = 100 + np.arange(prompt_length), np.append(200 + np.arange(answer_length - 1), EOS)
    of = infilling(prompt, answer, np.random.default_rng(seed))
    assert of.room is not None
    fits = of.answer[-1] != EOS
    size = len(of.answer) - (not fits)
    assert 3 <= size <= 24 and of.room - len(of.answer) in ((0,) if fits else range(8))
    # the text before the gap at its own positions, then the text after it at its own, behind the whole gap
    before = of.start
    assert of.context[:before].tolist() == [*prompt, *answer][:before]
    assert of.context_positions[:before].tolist() == list(range(before))
    after = of.context[before:]
    assert len(after) >= 1 and after.tolist() == answer[-len(after) :].tolist()
    assert of.context_positions[before:].tolist() == [of.start + of.room + i for i in range(len(after))]
    assert [*of.context[:before], *of.answer[:size], *after] == [*prompt, *answer]
    assert of.start >= prompt_length


def test_the_buffer_holds_the_text_after_the_gap_before_it() -> None:
    of = infilling(np.array([10, 11]), np.append(200 + np.arange(20), EOS), np.random.default_rng(5))
    row = ReFusionObjective(TokenIds(MASK, (EOS,)), (4,)).row(of, np.random.default_rng(0))
    after = row.positions[of.start : len(of.context)]
    gap = row.positions[len(of.context) :]
    assert len(after) and len(gap) and after.min() > gap.max()
    assert (row.targets[: len(of.context)] == -1).all()


def test_half_of_the_gaps_end_early() -> None:
    answer = np.append(200 + np.arange(30), EOS)
    made = [infilling(PROMPT, answer, np.random.default_rng(seed)) for seed in range(2000)]
    early = sum(of.answer[-1] == EOS for of in made)
    assert abs(early - 1000) < 4 * 500**0.5
    assert {len(of.answer) for of in made if of.answer[-1] != EOS} == set(range(3, 25))
    assert {of.start for of in made} >= {3, 4, 5}  # from the answer's first token on
    assert {of.room - len(of.answer) for of in made if of.room and of.answer[-1] == EOS} == set(range(8))


# --- the store


def test_the_store_gives_back_its_rows(store: RowStore, tmp_path: Path) -> None:
    store.save(tmp_path / "a" / "rows.npz")
    for held in (store, RowStore.load(tmp_path / "a" / "rows.npz")):
        assert len(held) == 530
        for number, (prompt, answer) in enumerate(pairs(530)):
            assert [part.tolist() for part in held.pair(number)] == [prompt, answer]
            assert held.lengths[number] == len(prompt) + len(answer)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["rows.npz"]


def test_an_empty_store_and_an_empty_answer() -> None:
    assert len(RowStore.build([])) == 0
    with pytest.raises(AssertionError):
        RowStore.build([([1], [])])


def test_rows_are_made_once_for_each_fingerprint(tmp_path: Path) -> None:
    built: list[int] = []

    def build() -> RowStore:
        built.append(len(built))
        return RowStore.build([([len(built)], [EOS])])

    first = cached_store(tmp_path / "train.npz", ["a", 1], build)
    assert cached_store(tmp_path / "train.npz", ["a", 1], build).ids.tolist() == first.ids.tolist() and built == [0]
    assert cached_store(tmp_path / "train.npz", ["a", 2], build).ids.tolist() != first.ids.tolist() and built == [0, 1]


# --- batches


def test_padding_has_no_target_and_no_weight() -> None:
    rows = [next_token_row(question(PROMPT[:n], ANSWER[-n:]), n % 2) for n in (1, 3, 2)]
    batch = collate(rows, 2)
    assert batch.tokens.shape == (3, 6) and batch.real_tokens == 2 + 6 + 4
    for i, row in enumerate(rows):
        n = len(row.tokens)
        for name in ("tokens", "positions", "targets", "losses", "weights"):
            assert getattr(batch, name)[i, :n].tolist() == getattr(row, name).tolist()
        assert (batch.tokens[i, n:] == -1).all() and (batch.targets[i, n:] == -1).all() and (batch.weights[i, n:] == 0).all()
    assert batch.counts == (2, 4)


OBJECTIVES: dict[str, Any] = {"refusion": HYBRID, "autoregressive": AutoregressiveObjective(True)}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_batch_of_a_step_depends_on_data_seed_and_step_alone(store: RowStore, name: str) -> None:
    def fresh(seed: int = 7) -> Batches:
        return Batches(store, OBJECTIVES[name], 16, seed, infill_fraction=0.2 if name == "refusion" else 0.0, group=5)

    steps = [0, 1, 5, 32, 33, 34, 70]
    forward = {step: (batches := fresh()).batch(step) for step in steps}
    one = fresh()
    for step in [*reversed(steps), *steps]:  # across epochs, back and forth, repeatedly
        assert equal(one.batch(step), forward[step])
    assert equal(collate(list(batches.rows(70)), len(batches.objective.losses)), forward[70])
    assert not equal(fresh(8).batch(0), forward[0]) and not equal(forward[0], forward[1])


def test_an_epoch_shows_every_row_once_in_an_order_of_its_own(store: RowStore) -> None:
    batches = Batches(store, HYBRID, 16, 3, group=5)
    assert batches.steps_per_epoch == 33
    epochs = [[int(row) for step in range(33 * e, 33 * (e + 1)) for row in batches.rows_of(step)] for e in range(3)]
    for epoch in epochs:
        assert len(set(epoch)) == len(epoch) == 528  # two rows are over; other ones in the next epoch
    assert epochs[0] != epochs[1] != epochs[2]
    assert {row for epoch in epochs for row in epoch} == set(range(530))


def test_rows_of_like_length_stand_together(store: RowStore) -> None:
    batches = Batches(store, HYBRID, 16, 3, group=33)
    within = np.mean([np.ptp(store.lengths[batches.rows_of(step)]) for step in range(33)])
    assert within < 0.1 * np.ptp(store.lengths)
    mean = [store.lengths[batches.rows_of(step)].mean() for step in range(33)]
    assert mean != sorted(mean)  # and batches are shuffled


def test_the_share_of_rows_with_a_gap(store: RowStore) -> None:
    seen: Counter[str] = Counter()

    class Spy:
        losses = HYBRID.losses

        def row(self, example: Any, rng: np.random.Generator) -> Any:
            short = len(example.answer) < 5 and example.room is None
            seen["short" if short else "question" if example.room is None else "gap"] += 1
            return HYBRID.row(example, rng)

    objective: Objective = Spy()
    batches = Batches(store, objective, 16, 0, infill_fraction=0.1)
    for step in range(99):
        batches.batch(step)
    total = seen["gap"] + seen["question"]
    assert abs(seen["gap"] - 0.1 * total) < 4 * (0.09 * total) ** 0.5
    assert seen["short"] > 0  # an answer below 5 tokens has no gap


def test_rows_in_one_batch_are_corrupted_differently() -> None:
    store = RowStore.build([([10, 11], [*range(20, 60), EOS])] * 32)
    batch = Batches(store, ReFusionObjective(TokenIds(MASK, (EOS,)), (4,)), 32, 0).batch(0)
    assert len({row.tobytes() for row in batch.tokens}) > 25
