"""All methods by name. A new method is one file with a decoder and an objective, its settings in `config`, and a line here.

Contract: this is the only place that knows which methods there are; training, decoding, the command line and the reports ask it.
Objectives are imported when they are made: they want numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from refusion.config import CONFIGS, AutoregressiveConfig, DecodeConfig, DreamConfig, GenerationConfig, LladaConfig
from refusion.methods import autoregressive, masked
from refusion.methods.base import Decoder, Objective, TokenIds
from refusion.methods.refusion import decode as refusion

Decode = Callable[[Sequence[int], Any, TokenIds], Decoder]
MakeObjective = Callable[[TokenIds, Mapping[str, Any]], Objective]  # token ids, a recipe's [objective] without `method`


@dataclass(frozen=True)
class Method:
    """How text is written (`config`, `decode`) and how a model is taught to (`objective`).

    needs_mask: whether a model without a mask token cannot write so. settings: keys of a recipe's [objective] that the
    objective takes; all others are ignored, and said to be.
    """

    config: type[GenerationConfig]
    decode: Decode
    objective: MakeObjective
    settings: frozenset[str]
    needs_mask: bool = True

    @property
    def name(self) -> str:
        return self.config.method


def _autoregressive_objective(ids: TokenIds, settings: Mapping[str, Any]) -> Objective:
    from refusion.methods.autoregressive import AutoregressiveObjective

    return AutoregressiveObjective(**settings)


def _refusion_objective(ids: TokenIds, settings: Mapping[str, Any]) -> Objective:
    from refusion.methods.refusion.corrupt import ReFusionObjective

    return ReFusionObjective(ids, **settings)


def _llada_objective(ids: TokenIds, settings: Mapping[str, Any]) -> Objective:
    return masked.MaskedObjective(ids, **settings)


def _dream_objective(ids: TokenIds, settings: Mapping[str, Any]) -> Objective:
    return masked.MaskedObjective(ids, shifted=True, **settings)


REFUSION = Method(
    DecodeConfig, refusion.decode, _refusion_objective,
    frozenset({
        "slot_sizes", "slot_weights", "corruption", "normalisation", "mdm_scale", "autoregressive_fraction",
        "partial_slot_fraction", "eos_fill", "unrolled_fraction", "first_token_weight",
    }),
)  # fmt: skip
AUTOREGRESSIVE = Method(
    AutoregressiveConfig, autoregressive.decode, _autoregressive_objective, frozenset({"prompt_loss"}), needs_mask=False
)
LLADA = Method(LladaConfig, masked.decode_llada, _llada_objective, frozenset({"answer_length"}))
DREAM = Method(DreamConfig, masked.decode_dream, _dream_objective, frozenset({"answer_length", "context_p"}))

METHODS = {method.name: method for method in (REFUSION, AUTOREGRESSIVE, LLADA, DREAM)}
assert {name: method.config for name, method in METHODS.items()} == CONFIGS


def method_of(config: GenerationConfig) -> Method:
    """The method that takes these settings."""
    return METHODS[config.method]
