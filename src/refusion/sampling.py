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


def draw_rows(logits: Tensor, shaping: Shaping, uniforms: Tensor) -> Tensor:
    """One token for each row by inversion of the shaped distribution: int64 [R].

    logits: [R, V] up to a constant a row, barred ids at -inf. uniforms: [R] in [0, 1). Shaping in the usual order:
    temperature, then top-k, then top-p; of equals the lowest id comes first.
    """
    assert shaping.temperature > 0
    ordered, ids = logits.double().sort(dim=-1, descending=True, stable=True)
    tempered = ((ordered - ordered[:, :1]) / float(shaping.temperature)).softmax(-1)
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
    return ids.gather(-1, place.minimum(last)).squeeze(-1)


def draw(probabilities: Tensor, shaping: Shaping, u: float) -> int:
    """As `draw_rows`, for one row of probabilities, barred ids at 0: float32 [V] -> token id."""
    return int(draw_rows(probabilities.log()[None], shaping, probabilities.new_tensor([u]).double())[0])
