"""Optimizer and learning-rate schedule, from a recipe."""

from __future__ import annotations

import math

import torch
from torch import nn

from refusion.training.recipe import TrainingRecipe


def learning_rate(step: int, recipe: TrainingRecipe) -> float:
    """Rate of a step (from 0): linear warm-up, then WSD (stable, linear decay) or cosine, down to `min_lr_ratio`."""
    if step < recipe.warmup_steps:
        return recipe.lr * (step + 1) / recipe.warmup_steps
    left = recipe.max_steps - step
    if recipe.schedule == "cosine":
        progress = (step - recipe.warmup_steps) / max(1, recipe.max_steps - recipe.warmup_steps)
        factor = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    else:
        factor = min(1.0, left / max(1, int(recipe.decay_fraction * recipe.max_steps)))
    return recipe.lr * (recipe.min_lr_ratio + (1 - recipe.min_lr_ratio) * max(0.0, factor))


class Optimizers:
    """AdamW for everything, or Muon for the matrices of the layers and AdamW for the rest. Norms, biases and embeddings do
    not decay."""

    def __init__(self, model: nn.Module, recipe: TrainingRecipe) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        matrices = [p for name, p in named if p.dim() == 2 and "embed" not in name and "lm_head" not in name]
        chosen = {id(p) for p in matrices}
        rest = [p for _, p in named if id(p) not in chosen]
        self.parameters = [p for _, p in named]
        betas, decay = (recipe.beta1, recipe.beta2), recipe.weight_decay
        self._optimizers: list[torch.optim.Optimizer] = []
        if recipe.optimizer == "muon":
            # the update's size is matched to AdamW's, so that one rate serves both
            self._optimizers.append(
                torch.optim.Muon(matrices, lr=recipe.lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
            )
            self._optimizers.append(torch.optim.AdamW(rest, lr=recipe.lr, betas=betas, weight_decay=0.0, fused=True))
        else:
            groups = [{"params": matrices, "weight_decay": decay}, {"params": rest, "weight_decay": 0.0}]
            self._optimizers.append(torch.optim.AdamW(groups, lr=recipe.lr, betas=betas, fused=True))

    def step(self, lr: float, clip: float) -> float:
        """Clip to norm `clip` (0: not at all), step at rate `lr`, clear the gradients.

        Returns the gradients' norm before clipping; if it is not finite, the weights are left as they are.
        """
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, clip if clip > 0 else math.inf)
        if not torch.isfinite(norm):
            return float(norm)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def state_dict(self) -> list[dict[str, object]]:
        return [optimizer.state_dict() for optimizer in self._optimizers]

    def load_state_dict(self, states: list[dict[str, object]]) -> None:
        for optimizer, state in zip(self._optimizers, states, strict=True):
            optimizer.load_state_dict(state)
