"""Select: which open slots are written in this round. Pure functions on plain numbers (docs/algorithm.md, "A
round")."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile

from refusion.methods.base import Answer


def sureness(answer: Answer) -> list[float]:
    """How sure each draft is, 0 to 1: its probability; where entropies were asked for (an ablation), e to the negative one:
    one over the number of tokens that it is as good as drawn from.

    >>> sureness(Answer(tokens=(7,), probabilities=(0.5,), scores=(-math.log(4),)))
    [0.25]
    """
    return [math.exp(score) for score in answer.scores] or list(answer.probabilities)


def score(sure: Sequence[float], kind: str = "first") -> float:
    """How sure a slot is, from its drafts: the one at its first position (the paper), or the "mean" of all (an ablation)."""
    return sum(sure) / len(sure) if kind == "mean" else sure[0]


def choose(scores: Sequence[float], threshold: float, order: str = "confidence") -> list[int]:
    """Indices of all scores over `slot_threshold`; if there is none, of the best one, the earliest if several are.

    order "left_to_right" (an ablation): the first, and those behind it as long as they are over the threshold.

    >>> choose([0.95, 0.2, 0.99], 0.9)
    [0, 2]
    >>> choose([0.1, 0.3, 0.3], 0.9)
    [1]
    >>> choose([0.1, 0.95, 0.2, 0.99], 0.9, "left_to_right")
    [0, 1]
    """
    if order == "left_to_right":
        behind = takewhile(lambda i: scores[i] > threshold, range(1, len(scores)))
        return [0, *behind]
    over = [i for i, score in enumerate(scores) if score > threshold]
    return over or [max(range(len(scores)), key=lambda i: (scores[i], -i))]
