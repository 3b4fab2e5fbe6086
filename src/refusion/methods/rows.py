"""Building blocks of training rows that several methods share. Numpy only."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from refusion.methods.base import Example, TrainingRow


class RowBuilder:
    """Appends runs of tokens with consecutive positions to the context of an example."""

    def __init__(self, example: Example) -> None:
        self._tokens = [example.context]
        self._positions = [example.context_positions]
        self._targets = [np.full(len(example.context), -1)]
        self._losses = [np.zeros(len(example.context), dtype=np.int64)]

    def add(self, tokens: NDArray[np.int64], position: int, targets: NDArray[np.int64], loss: int) -> None:
        self._tokens.append(tokens)
        self._positions.append(np.arange(position, position + len(tokens)))
        self._targets.append(targets)
        self._losses.append(np.full(len(tokens), loss))

    def build(self, weights: Mapping[int, float]) -> TrainingRow:
        """The whole row; `weights` gives the weight of a loss's targets where it is not 1."""
        losses = np.concatenate(self._losses)
        per_token = np.ones(len(losses), dtype=np.float32)
        for loss, weight in weights.items():
            per_token[losses == loss] = weight
        return TrainingRow(
            np.concatenate(self._tokens), np.concatenate(self._positions), np.concatenate(self._targets),
            losses, per_token,
        )  # fmt: skip


def next_token_row(example: Example, loss: int, prompt_loss: bool = False) -> TrainingRow:
    """Context and answer in order; every answer token is asked for by the one before it, the first one too."""
    tokens = np.concatenate([example.context, example.answer])
    positions = np.concatenate([example.context_positions, example.start + np.arange(len(example.answer))])
    targets = np.append(tokens[1:], -1)
    if not prompt_loss:
        targets[: len(example.context) - 1] = -1
    zeros = np.full(len(tokens), loss)
    return TrainingRow(tokens, positions, targets, zeros, np.ones(len(tokens), dtype=np.float32))
