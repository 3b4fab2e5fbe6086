"""Answers a decoder's forward requests with a model and a cache: one request, one model.

Contract: probabilities are those of the full float32 softmax; drafts never take [MASK] or an id without a token
(docs/algorithm.md, "Sampling"). Knows no slots and no text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from refusion.cache import KeyValueCache, aligned
from refusion.config import UserError
from refusion.methods.base import Answer, Forward
from refusion.models.transformer import Transformer
from refusion.sampling import draw_rows

# Kernels take other paths for the last 1-3 rows. With rows in fours, a row gives the same float32 bits however many
# rows stand beside it (tests/test_prepack.py); it costs nothing that could be measured.
ROW_MULTIPLE = 4


def barred_ids(vocab_size: int, token_ids: Iterable[int], mask: int | None) -> Tensor:
    """Bool [V]: ids that must never be drafted, because they are [MASK] or stand for no token."""
    barred = torch.ones(vocab_size, dtype=torch.bool)
    barred[[i for i in token_ids if i < vocab_size]] = False
    if mask is not None:
        barred[mask] = True
    return barred


def visibility(
    segments: Sequence[int], cached: int, rows: int, columns: int, device: torch.device, bidirectional: bool = False,
    chained: bool = False,
) -> Tensor:
    """Bool [1, 1, rows, columns]: every row sees the cache and the rows of its own segment, up to itself or all of them;
    `chained`: and the rows of segments with lower numbers.

    rows, columns: at least len(segments) and cached + rows; what is too much is padding, which nobody sees (a padding
    row sees itself, so that its softmax is a number).

    >>> visibility((0, 0, 1), 1, 3, 4, torch.device("cpu"))[0, 0].int().tolist()
    [[1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]
    """
    segment = -1 - torch.arange(rows, device=device)
    segment[: len(segments)] = torch.tensor(segments, device=device)
    mask = torch.zeros(rows, columns, dtype=torch.bool, device=device)
    mask[: len(segments), :cached] = True
    new = segment[:, None] == segment[None, :]
    new = new if bidirectional else new.tril_()
    if chained:
        new |= (segment[None, :] >= 0) & (segment[None, :] < segment[:, None])
    mask[:, cached : cached + rows] = new
    return mask[None, None]


class Runner:
    """One request's cache, and the model to fill it; counts forwards and rows."""

    def __init__(self, model: Transformer, barred: Tensor, capacity: int) -> None:
        config, weight = model.config, model.lm_head.weight
        self.model, self.barred, self.device = model, barred, weight.device
        self.cache = KeyValueCache(
            config.num_hidden_layers, config.num_key_value_heads, config.head_dim, capacity, weight.dtype, weight.device
        )
        self.forwards, self.rows = 0, 0

    @torch.inference_mode()
    def __call__(self, forward: Forward) -> Answer:
        """Run one forward. Its rows stay forgotten unless the next forward's `keep` names them."""
        self.cache.keep(forward.keep)
        if forward.cut is not None:
            assert not forward.keep
            self.cache.truncate(forward.cut)
        self.forwards += 1
        self.rows += len(forward.tokens)
        padding = (0,) * (-len(forward.tokens) % ROW_MULTIPLE)
        rows = len(forward.tokens) + len(padding)
        self.cache.reserve(rows)
        tokens = torch.tensor([forward.tokens + padding], device=self.device)
        positions = torch.tensor([forward.positions + padding], device=self.device)
        cached = self.cache.length
        columns = aligned(cached + rows)
        mask = visibility(
            forward.segments, cached, rows, columns, self.device, forward.bidirectional, forward.chained
        )
        hidden = self.model(tokens, positions, mask, self.cache)[0]
        return self._answer(hidden, forward)

    def _answer(self, hidden: Tensor, forward: Forward) -> Answer:
        """The output head on the rows that are asked for, and on no others. hidden: [T, D]."""
        asked = [*forward.drafts, *(row for row, _ in forward.checks)]
        if not asked:
            return Answer()
        rows = sorted(set(asked))
        place = {row: i for i, row in enumerate(rows)}
        index = torch.tensor(rows, device=self.device)
        logits = self.model.logits(hidden[index]).float()  # [asked rows, V]
        probabilities = logits.softmax(-1)
        if not bool(torch.isfinite(probabilities).all()):
            raise UserError("the model's outputs are not finite: its weights are broken, or too large for their type")
        wanted = [place[row] for row in forward.drafts]
        tokens = self._take(logits[wanted].masked_fill(self.barred, float("-inf")), forward)
        values = probabilities[wanted].gather(-1, tokens[:, None])[:, 0]
        checks = probabilities[[place[r] for r, _ in forward.checks], [token for _, token in forward.checks]]
        return Answer(tuple(tokens.tolist()), tuple(values.tolist()), tuple(checks.tolist()))

    def _take(self, logits: Tensor, forward: Forward) -> Tensor:
        """One token for each draft row: the likeliest (of equals the lowest id), or a draw."""
        if forward.shaping.temperature == 0:
            return logits.argmax(-1)
        uniforms = torch.tensor(forward.uniforms, dtype=torch.float64, device=self.device)
        return draw_rows(logits, forward.shaping, uniforms)
