"""Rotary frequencies, plain or stretched for contexts longer than those of pre-training.

    linear   all positions divided by a factor (Chen et al. 2023, "position interpolation")
    llama3   only slow frequencies divided, with a soft border (Llama 3.1)
    yarn     the same by a ramp over the pairs of a head, and longer queries and keys (Peng et al. 2023, arXiv 2309.00071)

Contract: a `RopeScaling` is what a folder's config.json says; `frequencies` is arithmetic on it. Knows no files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeScaling:
    """Field names are those of Hugging Face's `rope_parameters`."""

    rope_type: str  # "linear", "llama3" or "yarn"
    factor: float
    original_max_position_embeddings: int = 0  # context of pre-training; llama3 and yarn
    low_freq_factor: float = 1.0  # llama3: what turns less often than this within that context is divided
    high_freq_factor: float = 4.0  # llama3: what turns more often stays
    beta_fast: float = 32.0  # yarn: as high_freq_factor
    beta_slow: float = 1.0  # yarn: as low_freq_factor
    attention_factor: float = 1.0  # yarn: queries and keys are multiplied by it
    truncate: bool = True  # yarn: borders of the ramp at whole pairs


FIELDS: dict[str, tuple[str, ...]] = {  # what each kind has, in the order in which it is written
    "linear": ("rope_type", "factor"),
    "llama3": ("rope_type", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("rope_type", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate"),
}
KINDS = tuple(FIELDS)


def yarn_attention(factor: float, weight: float = 1.0) -> float:
    """By how much yarn lengthens queries and keys, if its folder does not say (its paper, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device | None = None) -> Tensor:
    """Angle per position of every pair of a head, float32 [head_dim / 2].

    >>> frequencies(4, 10000.0, RopeScaling("linear", 2.0)).tolist()
    [0.5, 0.004999999888241291]
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    plain = 1.0 / theta**exponent  # rounded as Hugging Face rounds it: at position 30,000 an ulp is 0.002 rad
    if scaling is None:
        return plain
    if scaling.rope_type == "linear":
        return plain / scaling.factor
    kept = _turns(plain, scaling) if scaling.rope_type == "llama3" else _pairs(plain, head_dim, theta, scaling)
    return (1 - kept) * plain / scaling.factor + kept * plain


def _turns(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """llama3: how much of each frequency stays, by how often it turns within the context of pre-training."""
    turns = scaling.original_max_position_embeddings / (2 * math.pi / plain)
    return ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)


def _pairs(plain: Tensor, head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """yarn: the same, by a ramp that is linear over the pairs between those that turn `beta_fast` and `beta_slow` times."""

    def pair(turns: float) -> float:
        """Which pair turns so often within the context of pre-training."""
        return head_dim * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    number = torch.arange(len(plain), dtype=torch.float32, device=plain.device)
    return 1 - ((number - low) / max(high - low, 1e-3)).clamp(0, 1)
