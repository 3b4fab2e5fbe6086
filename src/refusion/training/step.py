"""One optimisation step's arithmetic: rows in, losses out, normalised over the global batch.

Contract: `accumulate` adds gradients whose sum over micro-batches equals that of the whole batch at once. It knows no
method, no schedule and no files.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from refusion.methods.base import Loss
from refusion.models.transformer import Transformer
from refusion.training.data import Batch


def visible(batch: Batch) -> Tensor:
    """Which tokens (last axis) each token sees, bool [B or 1, 1, T, T]: `TrainingRow` has the rule."""
    width = batch.tokens.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    if batch.segments.max() == 0 and not batch.bidirectional.any():
        return causal[None, None]
    segments, prefixes = torch.from_numpy(batch.segments), torch.from_numpy(batch.prefixes)
    own = segments[:, :, None] == segments[:, None, :]
    shared = torch.arange(width) < prefixes[:, :, None]
    either_way = torch.from_numpy(batch.bidirectional)[:, None, None]
    return ((own & (causal | either_way)) | (shared & causal))[:, None]


def loss_sums(model: Transformer, batch: Batch, losses: int, autocast: bool) -> Tensor:
    """Sum of weighted cross-entropies for each loss, float32 [losses]. The head is computed on rows with a target
    only."""
    device = model.lm_head.weight.device
    tokens = torch.from_numpy(batch.tokens).to(device).clamp(min=0)  # [B, T]; padding is seen by nobody
    positions = torch.from_numpy(batch.positions).to(device)
    rows = torch.from_numpy(batch.targets >= 0).to(device)
    mask = visible(batch).to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        logits = model.logits(model(tokens, positions, mask)[rows])  # [targets, V]
    targets = torch.from_numpy(batch.targets).to(device)[rows]
    weights = torch.from_numpy(batch.weights).to(device)[rows]
    which = torch.from_numpy(batch.losses).to(device)[rows]
    entropy = F.cross_entropy(logits.float(), targets, reduction="none") * weights
    return torch.zeros(losses, device=device).index_add(0, which, entropy)


def divisors(losses: Sequence[Loss], counts: Sequence[int], rows: int) -> list[float]:
    """What each loss's sum is divided by: its targets or the rows of the global batch, never zero."""
    return [float(max(1, rows if loss.per == "rows" else count)) for loss, count in zip(losses, counts, strict=True)]


def accumulate(
    model: Transformer, micro_batches: Sequence[Batch], losses: Sequence[Loss], autocast: bool = False
) -> dict[str, float]:
    """Forward and backward over the micro-batches of one global batch. Returns `loss` and `loss_<name>` for each."""
    counts = [sum(batch.counts[i] for batch in micro_batches) for i in range(len(losses))]
    rows = sum(len(batch.tokens) for batch in micro_batches)
    scales = torch.tensor([loss.scale for loss in losses]) / torch.tensor(divisors(losses, counts, rows))
    total = torch.zeros(len(losses))
    for batch in micro_batches:
        sums = loss_sums(model, batch, len(losses), autocast)
        scale = scales.to(sums.device)
        (sums * scale).sum().backward()  # type: ignore[no-untyped-call]
        total += sums.detach().cpu() / torch.tensor(divisors(losses, counts, rows))
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
        sums += loss_sums(model, batch, len(losses), autocast).cpu()
    counts = [sum(batch.counts[i] for batch in batches) for i in range(len(losses))]
    values = sums / torch.tensor(divisors(losses, counts, sum(len(b.tokens) for b in batches)))
    return {f"loss_{loss.name}": float(value) for loss, value in zip(losses, values, strict=True)}
