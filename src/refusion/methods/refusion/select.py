"""Select: which open slots are written in this round. Pure functions on plain numbers (docs/algorithm.md, "A
round")."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile


def score(probabilities: Sequence[float], kind: str = "first") -> float:
    """How sure a slot is, from the probabilities of its drafts: of the token at its first position (the paper), or their mean
    (an ablation)."""
    return probabilities[0] if kind == "first" else sum(probabilities) / len(probabilities)


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
