"""Select: which open slots are written in this round. Pure functions on plain numbers (docs/algorithm.md, "A
round")."""

from __future__ import annotations

from collections.abc import Sequence


def choose(scores: Sequence[float], threshold: float) -> list[int]:
    """Indices of all scores over `slot_threshold`; if there is none, of the best one, the earliest if several are.

    A slot's score is the probability of the token drafted at its first position.

    >>> choose([0.95, 0.2, 0.99], 0.9)
    [0, 2]
    >>> choose([0.1, 0.3, 0.3], 0.9)
    [1]
    """
    over = [i for i, score in enumerate(scores) if score > threshold]
    return over or [max(range(len(scores)), key=lambda i: (scores[i], -i))]
