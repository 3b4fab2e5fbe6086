"""Settings as frozen dataclasses: one definition for Python, the command line, checkpoints and documentation.

Contract: a setting that is `None` is unset; `resolve` fills it from a model's generation_config.json (key
`refusion`) and then from the package's defaults. Every complaint is a `UserError` of one line that names the setting.
"""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

# What no model comes near. Up to here sizes can be multiplied and weights be counted; above, the arithmetic of torch
# overflows, or a mistyped number fills the memory.
LARGEST_SHAPE: Mapping[str, int] = {
    "vocab_size": 2**24, "hidden_size": 2**20, "intermediate_size": 2**22, "num_hidden_layers": 10_000,
    "num_attention_heads": 2**14, "num_key_value_heads": 2**14, "head_dim": 2**14, "max_position_embeddings": 2**31,
}  # fmt: skip


class UserError(ValueError):
    """Something that the user can put right. Its text is one line and names the setting or the file."""


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for a misspelt name: `; did you mean 'slot_size'?`, or nothing when no known name is near."""
    match = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {match[0]!r}?" if match else ""


def _strings(stop: Any) -> tuple[str, ...]:
    """One stop string or several, as a tuple."""
    strings = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, (list, tuple)) else (None,)
    if not all(isinstance(string, str) for string in strings):
        raise UserError(f"stop must be a string or a list of strings, got {stop!r}")
    if "" in strings:
        raise UserError("stop must not contain an empty string")
    return strings


C = TypeVar("C", bound="GenerationConfig")
M = TypeVar("M", bound="MaskedConfig")


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """What every way of decoding understands.

    Attributes (None: unset, see `resolve`):
        max_new_tokens: response budget n in tokens, at least 1, end-of-sequence included.
        temperature: 0 is greedy; above, from which distribution drafts are taken (docs/algorithm.md, "Sampling").
        top_k: draw from the k likeliest tokens; 0 is off.
        top_p: draw from the smallest set of tokens with at least this probability; 1 is off.
        seed: of every draw; the same seed gives the same text, alone or in a batch.
        stop: strings that end the text; they are not part of it.
        ignore_eos: treat end-of-sequence as an ordinary token.
    """

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    ignore_eos: bool | None = None

    method: ClassVar[str] = ""  # name of the method that takes these settings

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "max_new_tokens": 128, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0, "stop": (), "ignore_eos": False,
    }  # fmt: skip

    def __post_init__(self) -> None:
        if self.stop is not None:
            object.__setattr__(self, "stop", _strings(self.stop))
        self._at_least("max_new_tokens", 1, int)
        self._at_least("temperature", 0, float)
        self._at_least("top_k", 0, int)
        self._at_least("seed", 0, int)
        self._within("top_p", 0, 1)
        self._true_or_false("ignore_eos")
        if self.top_p == 0:
            raise UserError("top_p must be greater than 0, got 0")

    def _number(self, name: str, kind: type) -> float | None:
        value = getattr(self, name)
        if value is None:
            return None
        wanted = numbers.Integral if kind is int else numbers.Real  # numpy's numbers are of these kinds too
        endless = isinstance(value, float) and not math.isfinite(value)
        if isinstance(value, bool) or not isinstance(value, wanted) or endless:
            word = "a whole number" if kind is int else "a finite number"
            raise UserError(f"{name} must be {word}, got {value!r:.40}")
        plain: float = int(value) if isinstance(value, numbers.Integral) else float(value)
        object.__setattr__(self, name, plain)
        return plain

    def _at_least(self, name: str, least: int, kind: type) -> None:
        value = self._number(name, kind)
        if value is not None and value < least:
            raise UserError(f"{name} must be at least {least}, got {value!s:.40}")

    def _true_or_false(self, name: str) -> None:
        value = getattr(self, name)
        if value is not None and not isinstance(value, bool):
            raise UserError(f"{name} must be true or false, got {value!r:.40}")

    def _one_of(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value is not None and value not in choices:
            hint = nearest(value, choices) if isinstance(value, str) else ""
            raise UserError(f"{name} must be one of {', '.join(choices)}, got {value!r:.40}{hint}")

    def _within(self, name: str, low: float, high: float) -> None:
        value = self._number(name, float)
        if value is not None and not low <= value <= high:
            raise UserError(f"{name} must be between {low} and {high}, got {value}")

    def resolve(self: C, model_defaults: Mapping[str, Any] | None = None) -> C:
        """A copy without unset settings: given ones first, then the model's, then the package's defaults.

        Raises `UserError` when the whole does not fit together, or when a model's default is not valid.
        """
        known = {f.name for f in fields(self)}
        filled = {**self.DEFAULTS, **{k: v for k, v in (model_defaults or {}).items() if k in known and v is not None}}
        unset = {name: value for name, value in filled.items() if getattr(self, name) is None}
        whole = replace(self, **unset)
        whole._fit()
        return whole

    def _fit(self) -> None:
        """Checks that need all settings; overridden where there are any."""

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain JSON values, unset ones left out."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items() if v is not None}


@dataclass(frozen=True, kw_only=True)
class AutoregressiveConfig(GenerationConfig):
    """Token by token, left to right."""

    method: ClassVar[str] = "autoregressive"


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(GenerationConfig):
    """Slot-parallel decoding: select and infill (docs/algorithm.md, "A round"). On top of `GenerationConfig`:

    Attributes (None: unset, see `resolve`):
        slot_size: k, tokens per slot.
        block_size: b >= k, tokens per serial block; a block holds floor(b / k) slots.
        slot_threshold: choose slots whose first drafted token is likelier than this, 0 to 1.
        token_threshold: accept drafted tokens that are verified as likelier than this, 0 to 1.

    For ablations (the defaults are the paper's method):
        slot_order: "confidence": any slots over the threshold; "left_to_right": the first open slot, and those after it
            as long as they are over the threshold.
        slot_score: what is held against the threshold: the probability of a slot's "first" draft; the "mean" of all its drafts;
            or e to the negative "entropy" of the distribution that the first one is from.
        recompute: compute the keys and values of slots that were finished side by side once more, each seeing the others.
    """

    method: ClassVar[str] = "refusion"
    ORDERS: ClassVar[tuple[str, ...]] = ("confidence", "left_to_right")
    SCORES: ClassVar[tuple[str, ...]] = ("first", "mean", "entropy")

    slot_size: int | None = None
    block_size: int | None = None
    slot_threshold: float | None = None
    token_threshold: float | None = None
    slot_order: str | None = None
    slot_score: str | None = None
    recompute: bool | None = None

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **GenerationConfig.DEFAULTS, "slot_size": 8, "block_size": 32, "slot_threshold": 0.9, "token_threshold": 0.4,
        "slot_order": "confidence", "slot_score": "first", "recompute": False,
    }  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least("slot_size", 1, int)
        self._at_least("block_size", 1, int)
        self._within("slot_threshold", 0, 1)
        self._within("token_threshold", 0, 1)
        self._one_of("slot_order", self.ORDERS)
        self._one_of("slot_score", self.SCORES)
        self._true_or_false("recompute")
        if self.slot_size is not None and self.block_size is not None:
            self._fit()

    def resolve(self, model_defaults: Mapping[str, Any] | None = None) -> DecodeConfig:
        """As in `GenerationConfig`; a default block grows to a larger given slot, and a default slot shrinks to a
        smaller given block, so that setting one of the two alone is never an error."""
        defaults = {**self.DEFAULTS, **{k: v for k, v in (model_defaults or {}).items() if v is not None}}
        if self.slot_size is not None and self.block_size is None:
            defaults["block_size"] = max(defaults["block_size"], self.slot_size)
        if self.block_size is not None and self.slot_size is None:
            defaults["slot_size"] = min(defaults["slot_size"], self.block_size)
        return super().resolve(defaults)

    def _fit(self) -> None:
        assert self.slot_size is not None and self.block_size is not None
        if self.block_size < self.slot_size:
            raise UserError(f"block_size must be at least slot_size ({self.slot_size}), got {self.block_size}")


@dataclass(frozen=True, kw_only=True)
class MaskedConfig(GenerationConfig):
    """Masked diffusion (docs/algorithm.md, "Masked diffusion"): what LLaDA and Dream share. On top of `GenerationConfig`:

    Attributes (None: unset, see `resolve`):
        block_size: tokens per block; blocks are written left to right, their tokens in any order. 0: one block for all.
        steps: forwards over which the response is spread, shared out among the blocks by their length, at least one for
            each; 0: one for each token.
        confidence_threshold: instead, write every token of the block that is likelier than this, at least one (Fast-dLLM);
            0 is off.
        factor: instead, write the n likeliest for the largest n with (n + 1) * (1 - probability of the n-th) < factor, at
            least one (Fast-dLLM); 0 is off.
        cache: which keys and values of a block's first forward serve the block's other forwards (Fast-dLLM, approximate):
            "none", "prefix" (of all that stands before the block) or "dual" (and of all that stands after it).
    """

    block_size: int | None = None
    steps: int | None = None
    confidence_threshold: float | None = None
    factor: float | None = None
    cache: str | None = None

    CACHES: ClassVar[tuple[str, ...]] = ("none", "prefix", "dual")
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **GenerationConfig.DEFAULTS, "block_size": 32, "steps": 0, "confidence_threshold": 0.0, "factor": 0.0,
        "cache": "none",
    }  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least("block_size", 0, int)
        self._at_least("steps", 0, int)
        self._within("confidence_threshold", 0, 1)
        self._at_least("factor", 0, float)
        self._one_of("cache", self.CACHES)
        self._fit()

    def resolve(self: M, model_defaults: Mapping[str, Any] | None = None) -> M:
        """As in `GenerationConfig`; of confidence_threshold and factor, a given one switches off a default other one."""
        defaults = dict(model_defaults or {})
        for given, other in (("confidence_threshold", "factor"), ("factor", "confidence_threshold")):
            if getattr(self, given):
                defaults[other] = 0.0
        return super().resolve(defaults)

    def _fit(self) -> None:
        if self.confidence_threshold and self.factor:
            raise UserError("confidence_threshold and factor cannot both be set")


@dataclass(frozen=True, kw_only=True)
class LladaConfig(MaskedConfig):
    """Masked diffusion as in LLaDA. On top of `MaskedConfig`:

    Attributes (None: unset, see `resolve`):
        remasking: which tokens of a forward are kept: "low_confidence" (the likeliest) or "random".
    """

    method: ClassVar[str] = "llada"

    remasking: str | None = None

    REMASKING: ClassVar[tuple[str, ...]] = ("low_confidence", "random")
    DEFAULTS: ClassVar[Mapping[str, Any]] = {**MaskedConfig.DEFAULTS, "remasking": "low_confidence"}

    def __post_init__(self) -> None:
        super().__post_init__()
        self._one_of("remasking", self.REMASKING)


@dataclass(frozen=True, kw_only=True)
class DreamConfig(MaskedConfig):
    """Masked diffusion as in Dream: the output at a position predicts the next one. On top of `MaskedConfig`:

    Attributes (None: unset, see `resolve`):
        order: which tokens of a forward are kept: "origin" (by chance), "maskgit_plus" (the likeliest), "topk_margin"
            (those furthest ahead of the second likeliest) or "entropy" (those of the lowest entropy).
    """

    method: ClassVar[str] = "dream"

    order: str | None = None

    ORDERS: ClassVar[tuple[str, ...]] = ("origin", "maskgit_plus", "topk_margin", "entropy")
    DEFAULTS: ClassVar[Mapping[str, Any]] = {**MaskedConfig.DEFAULTS, "block_size": 0, "order": "entropy"}

    def __post_init__(self) -> None:
        super().__post_init__()
        self._one_of("order", self.ORDERS)


@dataclass(frozen=True, kw_only=True)
class BlockConfig(GenerationConfig):
    """Block diffusion (methods/block.py). On top of `GenerationConfig`:

    Attributes (None: unset, see `resolve`):
        block_size: tokens per block; one that the model was trained with.
        block_steps: most forwards per block, each of which commits an equal share of it; 0: one for each token.
        confidence_threshold: also commit every token that is likelier than this, 0 to 1; 1 is off.
    """

    method: ClassVar[str] = "bd3lm"

    block_size: int | None = None
    block_steps: int | None = None
    confidence_threshold: float | None = None

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **GenerationConfig.DEFAULTS, "block_size": 8, "block_steps": 0, "confidence_threshold": 0.9,
    }  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least("block_size", 1, int)
        self._at_least("block_steps", 0, int)
        self._within("confidence_threshold", 0, 1)


CONFIGS: Mapping[str, type[GenerationConfig]] = {  # by method
    config.method: config for config in (DecodeConfig, AutoregressiveConfig, LladaConfig, DreamConfig, BlockConfig)
}
