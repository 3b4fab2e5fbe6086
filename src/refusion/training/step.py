"""One optimisation step's arithmetic: rows in, losses out, normalised over the global batch.

Contract: `accumulate` adds gradients whose sum over micro-batches equals that of the whole batch at once. It knows no
method, no schedule and no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from refusion.methods.base import Loss
from refusion.models.transformer import Transformer
from refusion.training.data import Batch

CHUNK = {"cpu": 2**23, "other": 2**26}  # logits held at once


def visible(batch: Batch) -> Tensor:
    """Which tokens (last axis) each token sees, bool [B or 1, 1, T, T]: `TrainingRow` has the rule, within a document."""
    width = batch.tokens.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    if batch.segments.max() == 0 and batch.documents.max() == 0 and not batch.bidirectional.any():
        return causal[None, None]
    segments, prefixes, documents = map(torch.from_numpy, (batch.segments, batch.prefixes, batch.documents))
    own = segments[:, :, None] == segments[:, None, :]
    shared = torch.arange(width) < prefixes[:, :, None]
    either_way = torch.from_numpy(batch.bidirectional)[:, :, None]
    seen = (own & (causal | either_way)) | (shared & causal)
    return (seen & (documents[:, :, None] == documents[:, None, :]))[:, None]


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropies of rows, and their sum with weights, whose gradient is made on the way: the logits [N, V] are never held, but
    a chunk of them at a time."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """hidden: [N, D]; head: [V, D]; targets: int64 [N]; weights: float32 [N]; dtype: of the products. Returns the weighted sum
        and, without a gradient, the cross-entropies [N], both float32."""
        wants_hidden, wants_head = ctx.needs_input_grad[:2]
        rows = max(1, CHUNK.get(hidden.device.type, CHUNK["other"]) // len(head))
        narrow, matrix = hidden.to(dtype), head.to(dtype)
        entropies = torch.empty(len(hidden), device=hidden.device)
        of_hidden = torch.empty_like(hidden) if wants_hidden else None
        of_head = torch.zeros_like(head) if wants_head else None
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            logits = (narrow[part] @ matrix.T).float()  # [rows, V]
            total = logits.logsumexp(-1, keepdim=True)
            entropies[part] = (total - logits.gather(1, targets[part, None]))[:, 0]
            if not wants_hidden and not wants_head:
                continue
            slope = logits.sub_(total).exp_()
            slope.scatter_add_(1, targets[part, None], torch.full_like(total, -1.0))
            slope = slope.mul_(weights[part, None]).to(dtype)
            if of_hidden is not None:
                of_hidden[part] = slope @ matrix
            if of_head is not None:
                of_head += slope.T @ narrow[part]
        ctx.save_for_backward(of_hidden, of_head)
        ctx.mark_non_differentiable(entropies)
        return (entropies * weights).sum(), entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_head = ctx.saved_tensors
        return (
            None if of_hidden is None else of_hidden * grads[0], None if of_head is None else of_head * grads[0], None, None, None,
        )  # fmt: skip


def loss_sums(model: Transformer, batch: Batch, scales: Tensor, autocast: bool) -> tuple[Tensor, Tensor]:
    """The sum of weighted cross-entropies, each times the scale of its loss, to take the gradient of; and the sums of each loss,
    float32 [losses], unscaled and without a gradient. The head is computed on rows with a target only."""
    device = model.lm_head.weight.device
    tokens = torch.from_numpy(batch.tokens).to(device).clamp(min=0)  # [B, T]; padding is seen by nobody
    positions = torch.from_numpy(batch.positions).to(device)
    rows = torch.from_numpy(batch.targets >= 0).to(device)
    mask = visible(batch).to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        hidden = model.model.norm(model(tokens, positions, mask)[rows])  # [targets, D]
    targets = torch.from_numpy(batch.targets).to(device)[rows]
    weights = torch.from_numpy(batch.weights).to(device)[rows]
    which = torch.from_numpy(batch.losses).to(device)[rows]
    head = model.lm_head.weight
    dtype = torch.bfloat16 if autocast else head.dtype
    total, entropies = _CrossEntropy.apply(hidden, head, targets, weights * scales.to(device)[which], dtype)  # type: ignore[no-untyped-call]
    return total, torch.zeros(len(scales), device=device).index_add(0, which, entropies * weights)


def divisors(losses: Sequence[Loss], counts: Sequence[int], rows: int) -> list[float]:
    """What each loss's sum is divided by: its targets or the rows of the global batch, never zero."""
    return [float(max(1, rows if loss.per == "rows" else count)) for loss, count in zip(losses, counts, strict=True)]


def accumulate(
    model: Transformer, micro_batches: Sequence[Batch], losses: Sequence[Loss], autocast: bool = False
) -> dict[str, float]:
    """Forward and backward over the micro-batches of one global batch. Returns `loss` and `loss_<name>` for each."""
    counts = [sum(batch.counts[i] for batch in micro_batches) for i in range(len(losses))]
    rows = sum(batch.rows for batch in micro_batches)
    divisor = torch.tensor(divisors(losses, counts, rows))
    scales = torch.tensor([loss.scale for loss in losses]) / divisor
    total = torch.zeros(len(losses))
    for batch in micro_batches:
        weighted, sums = loss_sums(model, batch, scales, autocast)
        weighted.backward()  # type: ignore[no-untyped-call]
        total += sums.cpu() / divisor
    report = {f"loss_{loss.name}": float(value) for loss, value in zip(losses, total, strict=True)}
    report["loss"] = sum(loss.scale * float(value) for loss, value in zip(losses, total, strict=True))
    return report


@torch.no_grad()
def evaluate(
    model: Transformer, batches: Sequence[Batch], losses: Sequence[Loss], autocast: bool = False
) -> dict[str, float]:
    """Mean losses over fixed batches, without gradients."""
    model.eval()
    sums = torch.zeros(len(losses))
    for batch in batches:
        sums += loss_sums(model, batch, torch.ones(len(losses)), autocast)[1].cpu()
    counts = [sum(batch.counts[i] for batch in batches) for i in range(len(losses))]
    values = sums / torch.tensor(divisors(losses, counts, sum(b.rows for b in batches)))
    return {f"loss_{loss.name}": float(value) for loss, value in zip(losses, values, strict=True)}
