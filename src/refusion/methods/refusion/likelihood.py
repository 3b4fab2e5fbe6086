"""How likely a given answer is, by the training objective: a generator that knows no model (`methods.base`).

Written left to right in slots, an answer's probability is a product that the model gives exactly: a slot's first token is
predicted at a mask that sees everything before the slot, and each further token by the one before it, as in verify.
(Slots in another order would give another factorisation of the same kind.)

k = 2, answer a b c d e; `|` parts segments, which do not see each other:

    prompt       p q
    slot 0       M0 | a b        checks: M0 -> a, a -> b      keep: a, b
    slot 1       M2 | c d        checks: M2 -> c, c -> d      keep: c, d
    slot 2       M4              checks: M4 -> e
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence

from refusion.methods.base import Answer, Forward, TokenIds


def likelihood(
    prompt: Sequence[int], answer: Sequence[int], ids: TokenIds, slot_size: int
) -> Generator[Forward, Answer, tuple[float, bool]]:
    """Natural logarithm of the answer's probability after `prompt` (both at least one token), and whether every token of it
    is the likeliest one at its place. An end-of-sequence counts like any other token."""
    assert len(prompt) > 0 and len(answer) > 0 and slot_size >= 1 and ids.mask is not None
    yield Forward(tuple(prompt), tuple(range(len(prompt))), (0,) * len(prompt))
    keep = tuple(range(len(prompt)))
    total, greedy = 0.0, True
    for first in range(0, len(answer), slot_size):
        tokens = tuple(answer[first : first + slot_size])
        start = len(prompt) + first
        asked = tuple(range(len(tokens)))  # the mask, and every token but the last
        reply = yield Forward(
            (ids.mask, *tokens), (start, *range(start, start + len(tokens))), (1, *(0,) * len(tokens)), asked,
            tuple(zip(asked, tokens, strict=True)), keep=keep,
        )  # fmt: skip
        total += sum(math.log(p) if p > 0 else -math.inf for p in reply.checks)
        greedy = greedy and reply.tokens == tokens
        keep = tuple(range(1, 1 + len(tokens)))
    return total, greedy
