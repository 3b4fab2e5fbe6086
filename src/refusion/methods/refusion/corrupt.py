"""Training rows of ReFusion: docs/algorithm.md, "Training" (paper, section 3.2). Numpy only; all chance comes from
the generator handed in.

Worked example: prompt `p q` at 0, 1; answer `a b c d e` at 2..6; k = 2, so slots [a b] [c d] [e]. If the slots 1 and
2 are masked:

    buffer     p  q  a  b  M  M  M        clean slots in random order, then masked slots in ascending order
    position   0  1  2  3  4  5  6        always the place in the text
    target     -  -  b  -  c  d  e        clean: next token inside the slot; masked: the token itself
    loss             ar    mdm mdm mdm

An unrolled row (a help of this project, not of the paper) holds every state of one order of writing at once. The same
example in the order 0, 1, 2; each masked copy of a slot sees the prompt, the slots written before it, and itself:

    buffer     p  q  a  b  c  d  e  |  M  M  |  M  M  |  M
    position   0  1  2  3  4  5  6  |  2  3  |  4  5  |  6
    sees             ...causal...   |  p q   |  ..b   |  ..d
    target     -  a  b  c  d  e  -  |  a  b  |  c  d  |  e
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from refusion.config import UserError
from refusion.methods.base import Example, Loss, TokenIds, TrainingRow
from refusion.methods.rows import RowBuilder, next_token_row

AR, MDM = 0, 1


@dataclass(frozen=True)
class ReFusionObjective:
    """The hybrid objective L_AR + lambda * L_MDM, and helps that small models need (docs/algorithm.md), off by
    default."""

    ids: TokenIds
    slot_sizes: tuple[int, ...] = (4, 8, 16, 32)
    slot_weights: tuple[float, ...] | None = None  # None: all alike
    corruption: str = "count"  # "count": exactly floor(t*K) slots; "bernoulli": each with p = 0.999 t + 0.001
    normalisation: str = "targets"  # "targets": mean over masked tokens; "upstream": CE / (p * length), mean over rows
    noise_schedule: str = "uniform"  # of t: "uniform" (paper), "cosine": t = sin(pi/2 u), more masks
    noise_range: tuple[float, ...] = (0.0, 1.0)  # bounds of t
    mdm_scale: float = 1.0  # lambda
    autoregressive_fraction: float = 0.0  # rows left whole and in order, next-token targets everywhere in the answer
    partial_slot_fraction: float = 0.0  # masked slots that keep a random clean beginning
    eos_fill: bool = False  # masked positions after the end of the answer ask for end-of-sequence
    unrolled_fraction: float = 0.0  # rows that hold every state of one order of writing, side by side
    first_token_weight: float = 1.0  # of a masked run's first token, which decoding accepts unchecked

    CORRUPTIONS: ClassVar[tuple[str, ...]] = ("count", "bernoulli")
    NORMALISATIONS: ClassVar[tuple[str, ...]] = ("targets", "upstream")
    SCHEDULES: ClassVar[tuple[str, ...]] = ("uniform", "cosine")

    def __post_init__(self) -> None:
        if self.ids.mask is None:
            raise UserError("the refusion objective needs a model with a mask token")
        if not self.slot_sizes or min(self.slot_sizes) < 1:
            raise UserError(f"slot_sizes must be positive, got {list(self.slot_sizes)}")
        if self.slot_weights is not None and len(self.slot_weights) != len(self.slot_sizes):
            raise UserError("slot_weights must have one entry for each of slot_sizes")
        if self.slot_weights is not None and (min(self.slot_weights) < 0 or not 0 < sum(self.slot_weights) < math.inf):
            raise UserError(f"slot_weights must be at least 0 and not all 0, got {list(self.slot_weights)}")
        if self.corruption not in self.CORRUPTIONS:
            raise UserError(f"corruption must be one of {', '.join(self.CORRUPTIONS)}, got {self.corruption!r}")
        if self.normalisation not in self.NORMALISATIONS:
            raise UserError(f"normalisation must be one of {', '.join(self.NORMALISATIONS)}, got {self.normalisation!r}")
        if self.noise_schedule not in self.SCHEDULES:
            raise UserError(f"noise_schedule must be one of {', '.join(self.SCHEDULES)}, got {self.noise_schedule!r}")
        low, high = self.noise_range if len(self.noise_range) == 2 else (0.0, 0.0)
        if not 0 <= low <= high <= 1 or high == 0:
            raise UserError(f"noise_range must be [low, high] with 0 <= low <= high <= 1, got {list(self.noise_range)}")
        for name in ("autoregressive_fraction", "partial_slot_fraction", "unrolled_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name} must be between 0 and 1, got {getattr(self, name)}")
        if self.autoregressive_fraction + self.unrolled_fraction > 1:
            raise UserError("autoregressive_fraction and unrolled_fraction must not be more than 1 together")
        if not 0 < self.first_token_weight < math.inf:
            raise UserError(f"first_token_weight must be greater than 0, got {self.first_token_weight}")

    def _noise(self, u: float) -> float:
        """t of a number between 0 and 1."""
        low, high = self.noise_range
        return low + (high - low) * (math.sin(math.pi / 2 * u) if self.noise_schedule == "cosine" else u)

    @property
    def losses(self) -> tuple[Loss, ...]:
        return (Loss("ar"), Loss("mdm", self.mdm_scale, "targets" if self.normalisation == "targets" else "rows"))

    def row(self, example: Example, rng: np.random.Generator) -> TrainingRow:
        """Corrupt one example: draw a slot size and t, mask slots, order them, set targets."""
        kind = rng.random() if example.room is None else 1.0
        if kind < self.autoregressive_fraction:
            return next_token_row(example, AR)
        size = self._slot_size(rng)
        if kind < self.autoregressive_fraction + self.unrolled_fraction:
            return self._unrolled(example, size, rng)
        answer = self._filled(example, size, rng)
        count = -(-len(answer) // size)
        masked, p = choose_slots(count, self.corruption, rng, self._noise)
        builder = RowBuilder(example)
        for slot in rng.permutation(np.flatnonzero(~masked)):
            self._add_clean(builder, example, answer, slot * size, size)
        for slot in np.flatnonzero(masked):
            self._add_masked(builder, example, answer, int(slot) * size, size, rng)
        return builder.build({MDM: self._weight(p, len(answer))})

    def _unrolled(self, example: Example, size: int, rng: np.random.Generator) -> TrainingRow:
        """The whole answer, slots in the order of writing; then each slot masked, seeing what was written before it.

        Half of the orders are left to right (then every token of the answer is asked for by the one before it, as in an
        autoregressive row); in the others a slot has moved by up to 3 places, or anywhere.
        """
        answer = example.answer
        count = -(-len(answer) // size)
        spread = int(rng.choice((0, 0, 3, count)))
        order = np.argsort(np.arange(count) + spread * rng.random(count), kind="stable")
        builder = RowBuilder(example)
        seen = []  # how much of the row each slot sees when it is masked
        for slot in order:
            seen.append(len(builder))
            self._add_clean(builder, example, answer, int(slot) * size, size)
        fill = self._filled(example, size, rng)[: count * size]
        for slot, prefix in zip(order, seen, strict=True):
            self._add_masked(builder, example, fill, int(slot) * size, size, rng, builder.new_segment(), prefix)
        row = builder.build({MDM: self._weight(1.0, len(answer))})
        if spread == 0:
            start, end = len(example.context), len(example.context) + len(answer)
            row.targets[start - 1 : end - 1] = answer
        return row

    def _weight(self, p: float, length: int) -> float:
        """Weight of a masked token's loss in a row of which each slot was masked with probability p."""
        return 1.0 if self.normalisation == "targets" else 1.0 / (p * length)

    def _slot_size(self, rng: np.random.Generator) -> int:
        if self.slot_weights is None:
            return int(rng.choice(self.slot_sizes))
        weights = np.asarray(self.slot_weights, dtype=float)
        return int(rng.choice(self.slot_sizes, p=weights / weights.sum()))

    def _filled(self, example: Example, size: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """The answer, and with `eos_fill` end-of-sequence up to the end of its last slot, at times 1-3 slots more."""
        answer = example.answer
        if not self.eos_fill or int(answer[-1]) not in self.ids.eos:
            return answer
        length = -(-len(answer) // size) * size
        if rng.random() < 0.3:
            length += size * int(rng.integers(1, 4))
        if example.room is not None:
            length = max(len(answer), min(length, example.room))
        return np.concatenate([answer, np.full(length - len(answer), answer[-1])])

    @staticmethod
    def _add_clean(builder: RowBuilder, example: Example, answer: NDArray[np.int64], start: int, size: int) -> None:
        tokens = answer[start : start + size]
        # what follows the end of the answer is only ever drafted, never kept: a clean slot stops at end-of-sequence
        tokens = tokens[: max(0, len(example.answer) - start)]
        if len(tokens) == 0:
            return
        targets = np.append(tokens[1:], -1)
        builder.add(tokens, example.start + start, targets, AR)

    def _add_masked(
        self, builder: RowBuilder, example: Example, answer: NDArray[np.int64], start: int, size: int,
        rng: np.random.Generator, segment: int = 0, prefix: int = 0,
    ) -> None:  # fmt: skip
        tokens = answer[start : start + size]
        real = min(len(tokens), len(example.answer) - start)  # before the fill
        known = 0
        if real > 1 and rng.random() < self.partial_slot_fraction:
            known = int(rng.integers(1, real))
        if known:
            targets = np.append(tokens[1:known], -1)
            builder.add(tokens[:known], example.start + start, targets, AR, segment=segment, prefix=prefix)
        assert self.ids.mask is not None
        builder.add(
            np.full(len(tokens) - known, self.ids.mask), example.start + start + known, tokens[known:], MDM,
            first_weight=self.first_token_weight, segment=segment, prefix=prefix,
        )  # fmt: skip


def choose_slots(
    count: int, corruption: str, rng: np.random.Generator, noise: Callable[[float], float] = lambda u: u
) -> tuple[NDArray[np.bool_], float]:
    """Which of `count` slots are masked, bool [count], and the probability p with which a slot was masked.

    t = noise(u), u ~ U(0, 1]. "count" (paper): exactly floor(t * count) slots. "bernoulli" (upstream): each alone with p = 0.999 t
    + 0.001.
    """
    t = noise(1.0 - rng.random())
    if corruption == "bernoulli":
        p = 0.999 * t + 0.001
        return rng.random(count) < p, p
    masked = np.zeros(count, dtype=bool)
    masked[rng.permutation(count)[: int(t * count)]] = True
    return masked, t
