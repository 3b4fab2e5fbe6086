"""From tasks to batches: rows tokenised once into a file, then read in an order that depends on seed and step alone.

Contract: the batch of a step is a pure function of (data, seed, step); a resumed run sees the same batches as one that was
never interrupted. This module knows no model and no loss.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from refusion.methods.base import Example, Objective, TrainingRow

Ints = NDArray[np.int64]


class RowStore:
    """Prompts and answers as token ids in one flat array. `ids`: all tokens; `bounds`: [rows, 3] start, end of prompt, end."""

    def __init__(self, ids: NDArray[np.uint16 | np.uint32], bounds: Ints) -> None:
        self.ids, self.bounds = ids, bounds

    def __len__(self) -> int:
        return len(self.bounds)

    @property
    def lengths(self) -> Ints:
        return self.bounds[:, 2] - self.bounds[:, 0]

    def within(self, context: int) -> RowStore:
        """The rows of at most `context` tokens."""
        fit = self.lengths <= context
        return self if fit.all() else RowStore(self.ids, self.bounds[fit])

    def pair(self, row: int) -> tuple[Ints, Ints]:
        """Prompt and answer ids; the answer ends with end-of-sequence."""
        start, middle, end = self.bounds[row]
        return self.ids[start:middle].astype(np.int64), self.ids[middle:end].astype(np.int64)

    @staticmethod
    def build(pairs: Iterable[tuple[list[int], list[int]]]) -> RowStore:
        """Rows from pairs of prompt and answer ids. Flat arrays from the start: a list of Python's integers of millions of
        tokens takes gigabytes."""
        flat, bounds = array.array("I"), array.array("q")
        for prompt, answer in pairs:
            assert answer, "an answer has at least its end-of-sequence"
            start = len(flat)
            flat.extend(prompt)
            middle = len(flat)
            flat.extend(answer)
            bounds.extend((start, middle, len(flat)))
        return RowStore(np.array(flat, dtype=np.uint32), np.array(bounds, dtype=np.int64).reshape(-1, 3))

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part.npz")
        try:
            np.savez(part, ids=self.ids, bounds=self.bounds)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)  # what a full disk took of it

    @staticmethod
    def load(path: Path) -> RowStore:
        with np.load(path) as data:
            return RowStore(data["ids"], data["bounds"])


class Mixture:
    """Rows of several stores as one. In an epoch, a store's rows are taken `weights` times: 2 is twice each, 0.5 a half of them,
    drawn anew every epoch."""

    def __init__(self, stores: Sequence[RowStore], weights: Sequence[float] | None = None) -> None:
        self.stores = list(stores)
        self.weights = [1.0] * len(self.stores) if weights is None else list(weights)
        assert len(self.weights) == len(self.stores) > 0
        self._starts = np.cumsum([0, *(len(store) for store in self.stores)])
        self.lengths: Ints = np.concatenate([store.lengths for store in self.stores])
        self.per_epoch = sum(round(weight * len(store)) for weight, store in zip(self.weights, self.stores, strict=True))

    def __len__(self) -> int:
        return int(self._starts[-1])

    def pair(self, row: int) -> tuple[Ints, Ints]:
        """Prompt and answer ids; the answer ends with end-of-sequence, unless it was cut."""
        store = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self.stores[store].pair(row - int(self._starts[store]))

    def epoch(self, rng: np.random.Generator) -> Ints:
        """The numbers of an epoch's rows, shuffled."""
        taken = []
        for start, store, weight in zip(self._starts, self.stores, self.weights, strict=False):
            whole, part = divmod(round(weight * len(store)), len(store))
            taken += [np.arange(len(store)) + start] * whole
            taken += [rng.permutation(len(store))[:part] + start] if part else []
        return rng.permutation(np.concatenate(taken)) if taken else np.empty(0, dtype=np.int64)


def cached_store(path: Path, fingerprint: object, build: Callable[[], RowStore]) -> RowStore:
    """The store at `path` if it was made from the same `fingerprint` (any JSON value); else build and save it."""
    digest = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()[:16]
    path = path.with_name(f"{path.stem}-{digest}.npz")
    with contextlib.suppress(OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):  # damaged: made anew
        return RowStore.load(path)
    store = build()
    store.save(path)
    return store


def question(prompt: Ints, answer: Ints) -> Example:
    """An ordinary row: the answer (with end-of-sequence) follows the prompt."""
    return Example(prompt, np.arange(len(prompt)), answer, len(prompt))


def infilling(prompt: Ints, answer: Ints, rng: np.random.Generator) -> Example:
    """A gap of 3-24 tokens in the answer; the text after it stands before it in the buffer, at its own positions.

    Half of the gaps fit exactly; the others have up to 8 positions too many and end early with end-of-sequence.
    """
    size = int(rng.integers(3, min(24, len(answer) - 2) + 1))
    first = int(rng.integers(0, len(answer) - size))
    gap, after = answer[first : first + size], answer[first + size :]
    room = size
    if rng.random() < 0.5:
        gap = np.append(gap, answer[-1])  # end-of-sequence ends the gap
        room = len(gap) + int(rng.integers(0, 8))
    start = len(prompt) + first
    context = np.concatenate([prompt, answer[:first], after])
    positions = np.concatenate([np.arange(start), start + room + np.arange(len(after))])
    return Example(context, positions, gap, start, room)


@dataclass(frozen=True)
class Batch:
    """Padded rows [B, T] (right padding, of segment -1: no token sees it) and how many targets of each loss are in the batch."""

    tokens: Ints
    positions: Ints
    targets: Ints
    losses: Ints
    weights: NDArray[np.float32]
    counts: tuple[int, ...]  # targets of each loss
    segments: Ints
    prefixes: Ints
    bidirectional: NDArray[np.bool_]  # [B]

    @property
    def real_tokens(self) -> int:
        return int(self._lengths.sum())

    @property
    def _lengths(self) -> Ints:
        return np.asarray((self.tokens >= 0).sum(1))


def collate(rows: list[TrainingRow], losses: int, multiple: int = 1) -> Batch:
    """Pad rows to the longest, or to the next `multiple` of tokens; padding has token -1, position 0, segment -1 and no
    target."""
    width = -(-max(len(row.tokens) for row in rows) // multiple) * multiple

    def pad(arrays: list[Ints], value: int) -> Ints:
        out = np.full((len(arrays), width), value, dtype=np.int64)
        for i, values in enumerate(arrays):
            out[i, : len(values)] = values
        return out

    targets = pad([row.targets for row in rows], -1)
    which = pad([row.losses for row in rows], 0)
    weights = np.zeros((len(rows), width), dtype=np.float32)
    for i, row in enumerate(rows):
        weights[i, : len(row.weights)] = row.weights
    counts = tuple(int(((which == loss) & (targets >= 0)).sum()) for loss in range(losses))
    return Batch(
        pad([r.tokens for r in rows], -1), pad([r.positions for r in rows], 0), targets, which, weights, counts,
        pad([r.segments for r in rows], -1), pad([r.prefixes for r in rows], 0), np.array([r.bidirectional for r in rows]),
    )  # fmt: skip


class Batches:
    """Batches of one epoch after another, rows of like length together.

    Rows are shuffled, cut into groups of `group` batches, sorted by length within a group, and the batches of a group shuffled.
    """

    def __init__(
        self, store: RowStore | Mixture, objective: Objective, batch_size: int, seed: int, *, infill_fraction: float = 0.0,
        group: int = 50,
    ) -> None:  # fmt: skip
        self.store = store if isinstance(store, Mixture) else Mixture([store])
        assert self.store.per_epoch >= batch_size >= 1
        self.objective, self.batch_size, self.seed = objective, batch_size, seed
        self.infill_fraction, self.group = infill_fraction, group
        self._epoch, self._plan = -1, np.empty((0, batch_size), dtype=np.int64)

    @property
    def steps_per_epoch(self) -> int:
        return self.store.per_epoch // self.batch_size

    def rows_of(self, step: int) -> Ints:
        """Row numbers of the global batch of a step."""
        epoch, index = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._plan = epoch, self._make_plan(epoch)
        rows: Ints = self._plan[index]
        return rows

    def _make_plan(self, epoch: int) -> Ints:
        rng = np.random.default_rng([self.seed, 1, epoch])
        order = self.store.epoch(rng)[: self.steps_per_epoch * self.batch_size]
        lengths, plan = self.store.lengths, []
        for chunk in np.split(order, range(self.group * self.batch_size, len(order), self.group * self.batch_size)):
            chunk = chunk[np.argsort(lengths[chunk], kind="stable")].reshape(-1, self.batch_size)
            plan.append(chunk[rng.permutation(len(chunk))])
        return np.concatenate(plan)

    def rows(self, step: int) -> Iterator[TrainingRow]:
        """The corrupted rows of a step, each from a generator of its own seeded by (seed, step, place in the batch)."""
        for place, number in enumerate(self.rows_of(step)):
            rng = np.random.default_rng([self.seed, 2, step, place])
            prompt, answer = self.store.pair(int(number))
            wants_gap = rng.random() < self.infill_fraction and len(answer) >= 5
            example = infilling(prompt, answer, rng) if wants_gap else question(prompt, answer)
            yield self.objective.row(example, rng)

    def batch(self, step: int) -> Batch:
        return collate(list(self.rows(step)), len(self.objective.losses))
