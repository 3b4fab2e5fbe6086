"""Chance: counter-based uniform numbers, and draws from shaped distributions (docs/algorithm.md, "Sampling").

Contract: a draw depends on its probabilities, the shaping and one uniform number, which depends on seed, round, turn
and position alone. So the same seed gives the same text alone, in a batch, and with fused forwards. Knows no model.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Shaping:
    """From which distribution drafts are taken. It never changes a probability that is reported (docs/algorithm.md, "Sampling")."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


GREEDY = Shaping()


def uniform(seed: int, round: int, turn: int, position: int) -> float:
    """A number in [0, 1). turn: 0 in select, 1, 2, ... in the turns of complete; position: relative to the response.

    >>> uniform(0, 0, 0, 0) == uniform(0, 0, 0, 0) != uniform(0, 0, 0, 1)
    True
    """
    digest = hashlib.blake2b(f"{seed} {round} {turn} {position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


def draw_rows(probabilities: Tensor, shaping: Shaping, uniforms: Tensor) -> Tensor:
    """One token for each row by inversion of the shaped distribution: int64 [R].

    probabilities: float32 [R, V], barred ids set to 0 (rows need not sum to 1). uniforms: [R] in [0, 1). Shaping in
    the usual order: temperature, then top-k, then top-p; of equals the lowest id comes first.
    """
    import torch

    assert shaping.temperature > 0
    ordered, ids = probabilities.sort(dim=-1, descending=True, stable=True)
    tempered = (ordered.log() / shaping.temperature).softmax(-1, dtype=torch.float64)
    if shaping.top_k > 0:
        tempered[:, shaping.top_k :] = 0.0
    if shaping.top_p < 1:
        total = tempered.sum(-1, keepdim=True)
        before = (tempered / total).cumsum(-1) - tempered / total  # probability of everything likelier
        tempered = tempered.masked_fill(before >= shaping.top_p, 0.0)
    cumulative = tempered.cumsum(-1)
    wanted = uniforms.to(cumulative).unsqueeze(-1) * cumulative[:, -1:]
    place = (cumulative <= wanted).sum(-1, keepdim=True)
    last = (tempered > 0).sum(-1, keepdim=True) - 1  # the kept ids are a prefix of the order
    return ids.gather(-1, torch.minimum(place, last)).squeeze(-1)


def draw(probabilities: Tensor, shaping: Shaping, u: float) -> int:
    """As `draw_rows`, for one row: float32 [V] -> token id."""
    import torch

    return int(draw_rows(probabilities[None], shaping, torch.tensor([u], dtype=torch.float64))[0])
