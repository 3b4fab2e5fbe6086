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
from itertools import accumulate
from pathlib import Path
from typing import Any

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
    """Padded sequences [B, T] and how many targets of each loss are in the batch. A sequence is one row, or several that are packed
    one behind the other, each a document of its own: no token sees one of another document, nor padding (document -1, right).
    """

    tokens: Ints
    positions: Ints
    targets: Ints
    losses: Ints
    weights: NDArray[np.float32]
    counts: tuple[int, ...]  # targets of each loss
    segments: Ints
    prefixes: Ints  # columns of the sequence, from the start of the token's document: `TrainingRow.prefixes`, moved with the row
    bidirectional: NDArray[np.bool_]
    documents: Ints  # 0, 1, ...; -1: padding
    rows: int

    @property
    def real_tokens(self) -> int:
        return int((self.tokens >= 0).sum())


def packed(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Rows by the sequence that they go into: the longest first, each into the first sequence of at most `room` tokens that has
    room for it. A row that is longer is alone.

    >>> packed([5, 9, 3, 2], 10)
    [[1], [0, 2, 3]]
    """
    sequences: list[list[int]] = []
    free: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        place = next((place for place, left in enumerate(free) if lengths[row] <= left), len(sequences))
        if place == len(sequences):
            sequences.append([])
            free.append(room)
        sequences[place].append(row)
        free[place] -= lengths[row]
    return sequences


def collate(rows: list[TrainingRow], losses: int, multiple: int = 1, packed_length: int = 0) -> Batch:
    """Pad rows to the longest, or to the next `multiple` of tokens. With a `packed_length`, rows are packed into sequences of up to
    so many tokens first. Padding has token -1, position 0, segment and document -1 and no target."""
    alone = [[row] for row in range(len(rows))]
    sequences = packed([len(row.tokens) for row in rows], packed_length) if packed_length else alone
    places = [
        (sequence, document, start, rows[row])
        for sequence, members in enumerate(sequences)
        for document, (row, start) in enumerate(zip(members, _starts(rows, members), strict=True))
    ]
    width = -(-max(start + len(row.tokens) for _, _, start, row in places) // multiple) * multiple

    def spread(values: Callable[[TrainingRow, int, int], Any], rest: float, dtype: Any = np.int64) -> Any:
        out = np.full((len(sequences), width), rest, dtype=dtype)
        for sequence, document, start, row in places:
            out[sequence, start : start + len(row.tokens)] = values(row, document, start)
        return out

    targets, which = spread(lambda row, *_: row.targets, -1), spread(lambda row, *_: row.losses, 0)
    return Batch(
        tokens=spread(lambda row, *_: row.tokens, -1),
        positions=spread(lambda row, *_: row.positions, 0),
        targets=targets,
        losses=which,
        weights=spread(lambda row, *_: row.weights, 0.0, np.float32),
        counts=tuple(int(((which == loss) & (targets >= 0)).sum()) for loss in range(losses)),
        segments=spread(lambda row, *_: row.segments, -1),
        prefixes=spread(lambda row, _, start: row.prefixes + start, 0),
        bidirectional=spread(lambda row, *_: row.bidirectional, False, bool),
        documents=spread(lambda _, document, __: document, -1),
        rows=len(rows),
    )


def _starts(rows: Sequence[TrainingRow], members: Sequence[int]) -> list[int]:
    """Where each of a sequence's rows begins."""
    return [0, *accumulate(len(rows[row].tokens) for row in members)][:-1]


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
