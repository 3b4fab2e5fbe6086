"""Answers decoders' forward requests with a model and a cache for each: one request, or several at once.

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
from refusion.models.transformer import Part, Transformer
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


def surety(probabilities: Tensor, score: str) -> Tensor:
    """What `Forward.score` asks for, of each distribution: float32 [R, V] -> [R]; nothing ([0]) for "probability".

    >>> surety(torch.tensor([[0.5, 0.25, 0.25]]), "margin").tolist()
    [0.25]
    """
    if score == "margin":
        best = probabilities.topk(2, dim=-1).values
        return best[:, 0] - best[:, 1]
    if score == "entropy":
        entropy: Tensor = torch.special.entr(probabilities).sum(-1)
        return -entropy
    assert score == "probability"
    return probabilities.new_empty(0)


class Runner:
    """One request's cache, and the model to fill it; counts forwards and rows."""

    def __init__(self, model: Transformer, barred: Tensor, capacity: int) -> None:
        config, weight = model.config, model.lm_head.weight
        self.model, self.barred, self.device = model, barred, weight.device
        self.cache = KeyValueCache(
            config.num_hidden_layers, config.num_key_value_heads, config.head_dim, capacity, weight.dtype, weight.device
        )
        self.forwards, self.rows = 0, 0

    def __call__(self, forward: Forward) -> Answer:
        """Run one forward. Its rows stay forgotten unless the next forward's `keep` names them."""
        return together([(self, forward)])[0]

    def begin(self, forward: Forward, first: int) -> Part:
        """Ready the cache and say who sees whom; the forward's padded rows are rows `first`... of the whole."""
        self.cache.keep(forward.keep)
        if forward.cut is not None:
            assert not forward.keep
            self.cache.truncate(forward.cut)
        self.forwards += 1
        self.rows += len(forward.tokens)
        rows = padded(len(forward.tokens))
        self.cache.reserve(rows)
        cached = self.cache.length
        columns = aligned(cached + rows)
        mask = visibility(
            forward.segments, cached, rows, columns, self.device, forward.bidirectional, forward.chained
        )  # fmt: skip
        return Part(slice(first, first + rows), mask, self.cache)

    def answer(self, forward: Forward, rows: Sequence[int], logits: Tensor) -> Answer:
        """What the forward asks for. logits: float32 [R, V] of these `rows` of it, ascending."""
        probabilities = logits.softmax(-1)
        if not bool(torch.isfinite(probabilities).all()):
            raise UserError("the model's outputs are not finite: its weights are broken, or too large for their type")
        place = {row: i for i, row in enumerate(rows)}
        wanted = [place[row] for row in forward.drafts]
        tokens = self._take(logits[wanted].masked_fill(self.barred, float("-inf")), forward)
        values = probabilities[wanted].gather(-1, tokens[:, None])[:, 0]
        checks = probabilities[[place[r] for r, _ in forward.checks], [token for _, token in forward.checks]]
        scores = surety(probabilities[wanted], forward.score)
        return Answer(tuple(tokens.tolist()), tuple(values.tolist()), tuple(checks.tolist()), tuple(scores.tolist()))

    def _take(self, logits: Tensor, forward: Forward) -> Tensor:
        """One token for each draft row: the likeliest (of equals the lowest id), or a draw."""
        if forward.shaping.temperature == 0:
            return logits.argmax(-1)
        uniforms = torch.tensor(forward.uniforms, dtype=torch.float64, device=self.device)
        return draw_rows(logits, forward.shaping, uniforms)


def padded(rows: int) -> int:
    """Rows that a forward of `rows` rows is computed with."""
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


@torch.inference_mode()
def together(calls: Sequence[tuple[Runner, Forward]]) -> list[Answer]:
    """The forwards of several requests on one model at once, each with its own runner. In float32 on a CPU each answer is what
    it would be alone, to the bit."""
    parts, tokens, positions, first = [], [], [], 0
    for runner, forward in calls:
        parts.append(runner.begin(forward, first))
        rows = padded(len(forward.tokens))
        tokens += [*forward.tokens, *(0,) * (rows - len(forward.tokens))]
        positions += [*forward.positions, *(0,) * (rows - len(forward.tokens))]
        first += rows
    runner = calls[0][0]
    hidden = runner.model.together(
        torch.tensor([tokens], device=runner.device), torch.tensor([positions], device=runner.device), parts
    )[0]  # [T, D]
    return _answers(calls, parts, hidden)


def _answers(calls: Sequence[tuple[Runner, Forward]], parts: Sequence[Part], hidden: Tensor) -> list[Answer]:
    """The output head on the rows that are asked for, and on no others. hidden: [T, D]."""
    asked = [sorted({*forward.drafts, *(row for row, _ in forward.checks)}) for _, forward in calls]
    index = [part.rows.start + row for part, rows in zip(parts, asked, strict=True) for row in rows]
    if not index:
        return [Answer() for _ in calls]
    logits = calls[0][0].model.logits(hidden[torch.tensor(index, device=hidden.device)]).float()  # [asked rows, V]
    split = torch.split(logits, [len(rows) for rows in asked])
    return [
        runner.answer(forward, rows, own) if rows else Answer()
        for (runner, forward), rows, own in zip(calls, asked, split, strict=True)
    ]
