"""Linear layers with weights in oneDNN's blocked layout: faster on a CPU, and a row's result does not depend on how
many rows stand beside it (tests/test_prepack.py shows both layouts).

Contract: `prepack` is applied to a model from outside, for inference only: the plain weights are given up.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """Stands in for an `nn.Linear`."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.bias = None if linear.bias is None else linear.bias.detach()

    @property
    def weight(self) -> Tensor:
        """The packed weight: good for asking its dtype and device, not its values."""
        weight: Tensor = self.packed
        return weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out


def can_prepack(model: nn.Module) -> bool:
    """Whether this build of torch has the operators and the model is on a CPU in a type that they take."""
    parameter = next(model.parameters())
    if parameter.device.type != "cpu" or parameter.dtype not in (torch.float32, torch.bfloat16):
        return False
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # type: ignore[no-untyped-call]
        return False
    return parameter.dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@torch.no_grad()
def prepack(model: nn.Module) -> nn.Module:
    """Replace every `nn.Linear` in place, where that is possible."""
    if can_prepack(model):
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if type(child) is nn.Linear:
                    setattr(module, name, PackedLinear(child))
    return model
