"""Autoregression: next-token training, and decoding one token a forward with a key/value cache."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from refusion.config import AutoregressiveConfig
from refusion.events import Committed, Drafted, Finished
from refusion.methods.base import Answer, Decoder, Example, Forward, Loss, TokenIds, TrainingRow
from refusion.sampling import Shaping, uniform

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class AutoregressiveObjective:
    """Mean cross-entropy of the next token, over answers or over whole rows."""

    prompt_loss: bool = False  # ask for the prompt's tokens too: teaches copying

    @property
    def losses(self) -> tuple[Loss, ...]:
        return (Loss("ar"),)

    def row(self, example: Example, rng: np.random.Generator) -> TrainingRow:
        from refusion.methods.rows import next_token_row  # numpy is wanted in training only

        return next_token_row(example, 0, self.prompt_loss)


def decode(prompt: Sequence[int], settings: AutoregressiveConfig, ids: TokenIds) -> Decoder:
    """Write a response to `prompt` (token ids, at least one) token by token. settings: resolved, nothing unset."""
    assert len(prompt) > 0 and settings.max_new_tokens is not None and settings.seed is not None
    assert settings.temperature is not None and settings.top_k is not None and settings.top_p is not None
    shaping = Shaping(settings.temperature, settings.top_k, settings.top_p)
    eos = () if settings.ignore_eos else ids.eos
    written: list[int] = []
    rows, start = tuple(prompt), 0
    keep: tuple[int, ...] = ()
    for place in range(settings.max_new_tokens):
        uniforms = (uniform(settings.seed, place, 0, place),) if shaping.temperature > 0 else ()
        positions = tuple(range(start, start + len(rows)))
        answer = yield Forward(
            rows, positions, (0,) * len(rows), (len(rows) - 1,), uniforms=uniforms, shaping=shaping, keep=keep
        )
        assert answer is not None
        yield Drafted(place, (place,), answer.tokens, answer.probabilities)
        yield Committed(place, (place,), answer.tokens)
        if answer.tokens[0] in eos:
            yield Finished("stop", tuple(written), True)
            return
        written.append(answer.tokens[0])
        keep, start, rows = tuple(range(len(rows))), start + len(rows), answer.tokens
    yield Finished("length", tuple(written), False)


def likelihood(prompt: Sequence[int], answer: Sequence[int]) -> Generator[Forward, Answer, tuple[float, bool]]:
    """Natural logarithm of the answer's probability after `prompt` (both at least one token), and whether every token of it
    is the likeliest one at its place."""
    assert len(prompt) > 0 and len(answer) > 0
    rows, tokens = (*prompt, *answer[:-1]), tuple(answer)
    asked = tuple(range(len(prompt) - 1, len(rows)))
    checks = tuple(zip(asked, tokens, strict=True))
    reply = yield Forward(rows, tuple(range(len(rows))), (0,) * len(rows), asked, checks)
    return sum(math.log(p) if p > 0 else -math.inf for p in reply.checks), reply.tokens == tokens
