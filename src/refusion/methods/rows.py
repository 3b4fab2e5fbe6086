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


def masked_row(
    example: Example, answer: NDArray[np.int64], masked: NDArray[np.bool_], mask: int, weights: NDArray[np.float64],
    shifted: bool,
) -> TrainingRow:  # fmt: skip
    """Context, and an answer of which some tokens are replaced by [MASK] and asked for; every token sees all others.

    answer, masked, weights: [L], in the order of the text; answer may be longer than the example's own. shifted: a token
    is asked for where the one before it in the text stands, the first one in the context (if it has one before it).
    """
    tokens = np.concatenate([example.context, np.where(masked, mask, answer)])
    places = len(example.context) + np.arange(len(answer))  # where each answer token is asked for
    if shifted:
        before = np.flatnonzero(example.context_positions == example.start - 1)
        places = np.concatenate([before, places[:-1]])
        offset = len(answer) - len(places)  # 1 without a token before the answer
        answer, masked, weights = answer[offset:], masked[offset:], weights[offset:]
    targets, per_token = np.full(len(tokens), -1), np.ones(len(tokens), dtype=np.float32)
    targets[places[masked]], per_token[places[masked]] = answer[masked], weights[masked]
    positions = np.concatenate([example.context_positions, example.start + np.arange(len(tokens) - len(example.context))])
    zeros = np.zeros(len(tokens), dtype=np.int64)
    return TrainingRow(tokens, positions, targets, zeros, per_token, zeros, zeros, bidirectional=True)


def padded(answer: NDArray[np.int64], length: int, token: int) -> NDArray[np.int64]:
    """The answer, followed by `token` up to a length; longer answers stay as they are."""
    return np.concatenate([answer, np.full(max(0, length - len(answer)), token)])


def context_weights(known: NDArray[np.int64], asked: NDArray[np.int64], p: float) -> NDArray[np.float64]:
    """Dream's weights: for each asked position, half the sum over known ones of Geo(p) at their distance. Positions [K],
    [A] -> [A].

    >>> context_weights(np.array([0, 1]), np.array([2, 3]), 0.5).tolist()     # (1/2 + 1/4) / 2, (1/4 + 1/8) / 2
    [0.375, 0.1875]
    """
    distance = np.abs(asked[:, None] - known[None, :])
    weights: NDArray[np.float64] = 0.5 * (p * (1 - p) ** np.maximum(distance - 1, 0) * (distance > 0)).sum(1)
    return weights


def next_token_row(example: Example, loss: int, prompt_loss: bool = False) -> TrainingRow:
    """Context and answer in order; every answer token is asked for by the one before it, the first one too."""
    tokens = np.concatenate([example.context, example.answer])
    positions = np.concatenate([example.context_positions, example.start + np.arange(len(example.answer))])
    targets = np.append(tokens[1:], -1)
    if not prompt_loss:
        targets[: len(example.context) - 1] = -1
    losses, zeros = np.full(len(tokens), loss), np.zeros(len(tokens), dtype=np.int64)
    return TrainingRow(tokens, positions, targets, losses, np.ones(len(tokens), dtype=np.float32), zeros, zeros)
