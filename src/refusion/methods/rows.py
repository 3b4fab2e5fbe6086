"""Building blocks of training rows that several methods share. Numpy only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from refusion.methods.base import Example, TrainingRow


class RowBuilder:
    """Appends runs of tokens with consecutive positions to the context of an example."""

    def __init__(self, example: Example) -> None:
        self._runs = [_Run(example.context, example.context_positions, np.full(len(example.context), -1), 0)]
        self._segments = 0

    def __len__(self) -> int:
        return sum(len(run.tokens) for run in self._runs)

    def new_segment(self) -> int:
        """A number for a segment besides the row itself, which is segment 0."""
        self._segments += 1
        return self._segments

    def add(
        self, tokens: NDArray[np.int64], position: int, targets: NDArray[np.int64], loss: int, *,
        first_weight: float = 1.0, segment: int = 0, prefix: int = 0,
    ) -> None:  # fmt: skip
        """`first_weight`: weight of the run's first target. `segment`, `prefix`: see `TrainingRow`."""
        positions = np.arange(position, position + len(tokens))
        self._runs.append(_Run(tokens, positions, targets, loss, first_weight, segment, prefix))

    def build(self, weights: Mapping[int, float], bidirectional: bool = False) -> TrainingRow:
        """The whole row; `weights` multiplies the weights of a loss's targets where it is not 1."""
        runs = self._runs

        def spread(values: list[int]) -> NDArray[np.int64]:
            return np.repeat(np.array(values), [len(run.tokens) for run in runs])

        losses = spread([run.loss for run in runs])
        per_token = np.ones(len(losses), dtype=np.float32)
        for loss, weight in weights.items():
            per_token[losses == loss] = weight
        start = 0
        for run in runs:
            if len(run.tokens):
                per_token[start] *= run.first_weight
            start += len(run.tokens)
        return TrainingRow(
            np.concatenate([run.tokens for run in runs]), np.concatenate([run.positions for run in runs]),
            np.concatenate([run.targets for run in runs]), losses, per_token,
            spread([run.segment for run in runs]), spread([run.prefix for run in runs]), bidirectional,
        )  # fmt: skip


@dataclass(frozen=True)
class _Run:
    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    targets: NDArray[np.int64]
    loss: int
    first_weight: float = 1.0
    segment: int = 0
    prefix: int = 0


def next_token_row(example: Example, loss: int, prompt_loss: bool = False) -> TrainingRow:
    """Context and answer in order; every answer token is asked for by the one before it, the first one too."""
    tokens = np.concatenate([example.context, example.answer])
    positions = np.concatenate([example.context_positions, example.start + np.arange(len(example.answer))])
    targets = np.append(tokens[1:], -1)
    if not prompt_loss:
        targets[: len(example.context) - 1] = -1
    losses, zeros = np.full(len(tokens), loss), np.zeros(len(tokens), dtype=np.int64)
    return TrainingRow(tokens, positions, targets, losses, np.ones(len(tokens), dtype=np.float32), zeros, zeros)
