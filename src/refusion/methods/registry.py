"""All methods by name. A new method is one file with a decoder and an objective, its settings in `config`, and a line here.

Contract: this is the only place that knows which methods there are; training, decoding, the command line and the reports ask it.
Objectives are imported when they are made: they want numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from refusion.config import (
    CONFIGS,
    AutoregressiveConfig,
    BlockConfig,
    DecodeConfig,
    DreamConfig,
    GenerationConfig,
    LladaConfig,
)
from refusion.methods import autoregressive, block, masked
from refusion.methods.base import Answer, Decoder, Forward, Objective, TokenIds
from refusion.methods.refusion import decode as refusion
from refusion.methods.refusion.likelihood import likelihood

Decode = Callable[[Sequence[int], Any, TokenIds], Decoder]
Likelihood = Callable[[Sequence[int], Sequence[int], Any, TokenIds], Generator[Forward, Answer, tuple[float, bool]]]
MakeObjective = Callable[[TokenIds, Mapping[str, Any]], Objective]  # token ids, a recipe's [objective] without `method`


@dataclass(frozen=True)
class Method:
    """How text is written (`config`, `decode`) and how a model is taught to (`objective`).

    needs_mask: whether a model without a mask token cannot write so. settings: keys of a recipe's [objective] that the
    objective takes; all others are ignored, and said to be. by_token: whether a model that learnt it predicts the next token, so
    that it can write token by token as well.
    """

    config: type[GenerationConfig]
    decode: Decode
    objective: MakeObjective
    settings: frozenset[str]
    needs_mask: bool = True
    by_token: bool = False
    likelihood: Likelihood | None = None  # of a given answer, where the method has one that is exact

    @property
    def name(self) -> str:
        return self.config.method


def _autoregressive_objective(ids: TokenIds, settings: Mapping[str, Any]) -> Objective:
    from refusion.methods.autoregressive import AutoregressiveObjective

    return AutoregressiveObjective(**settings)


def _refusion_objective(ids: TokenIds, settings: Mapping[str, Any]) -> Objective:
    from refusion.methods.refusion.corrupt import ReFusionObjective

    return ReFusionObjective(ids, **settings)


def _block_objective(ids: TokenIds, settings: Mapping[str, Any]) -> Objective:
    return block.BlockObjective(ids, **settings)


def _llada_objective(ids: TokenIds, settings: Mapping[str, Any]) -> Objective:
    return masked.MaskedObjective(ids, **settings)


def _dream_objective(ids: TokenIds, settings: Mapping[str, Any]) -> Objective:
    return masked.MaskedObjective(ids, shifted=True, **settings)


REFUSION = Method(
    DecodeConfig, refusion.decode, _refusion_objective,
    frozenset({
        "slot_sizes", "slot_weights", "corruption", "normalisation", "noise_schedule", "noise_range", "mdm_scale",
        "autoregressive_fraction", "partial_slot_fraction", "eos_fill", "unrolled_fraction", "first_token_weight",
    }),
    likelihood=lambda prompt, answer, settings, ids: likelihood(prompt, answer, ids, settings.slot_size),
    by_token=True,
)  # fmt: skip
AUTOREGRESSIVE = Method(
    AutoregressiveConfig, autoregressive.decode, _autoregressive_objective, frozenset({"prompt_loss"}), needs_mask=False,
    likelihood=lambda prompt, answer, settings, ids: autoregressive.likelihood(prompt, answer), by_token=True,
)  # fmt: skip
LLADA = Method(LladaConfig, masked.decode_llada, _llada_objective, frozenset({"answer_length"}))
DREAM = Method(DreamConfig, masked.decode_dream, _dream_objective, frozenset({"answer_length", "context_p"}))
BD3LM = Method(BlockConfig, block.decode, _block_objective, frozenset({"block_sizes", "noise_range"}))

METHODS = {method.name: method for method in (REFUSION, AUTOREGRESSIVE, LLADA, DREAM, BD3LM)}
assert {name: method.config for name, method in METHODS.items()} == CONFIGS


def method_of(config: GenerationConfig) -> Method:
    """The method that takes these settings."""
    return METHODS[config.method]
