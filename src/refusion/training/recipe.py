"""A recipe: one TOML file that says everything about a training run.

Contract: `load` turns a file (and overrides) into a `Recipe` of frozen dataclasses. Whatever is wrong in it is a `UserError` of
one line that names the file and the key, and for a misspelt name the nearest known one.
"""

from __future__ import annotations

import math
import tomllib
import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from refusion.config import LARGEST_SHAPE, UserError, nearest
from refusion.methods.registry import METHODS


@dataclass(frozen=True)
class DataRecipe:
    """What is trained on."""

    suite: str = "nano"  # the procedural suite
    train: tuple[str, ...] | None = None  # files instead of the suite; training/files.py says of what shape
    validation: tuple[str, ...] | None = None  # the same to validate on
    weights: tuple[float, ...] | None = None  # how often an epoch takes each file of `train`; None: once
    too_long: str = "drop"  # what becomes of a row of a file that is longer than the context; "cut": its end is lost
    rows_per_family: int = 50_000
    family_weights: tuple[float, ...] | None = None  # multiply it, one for each of the suite's families; None: all 1
    seed: int = 0
    infill_fraction: float = 0.0  # rows with text after the gap
    vocabulary: int = 1024  # size of the byte-level BPE, when it is learnt


@dataclass(frozen=True)
class ModelRecipe:
    """Either a folder to continue from (`start`), or the shape of a fresh Qwen3."""

    start: str | None = None
    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 32
    max_position_embeddings: int = 512


@dataclass(frozen=True)
class ObjectiveRecipe:
    """How rows are corrupted; see the methods' own objectives."""

    method: str  # see methods/registry.py
    prompt_loss: bool = False
    slot_sizes: tuple[int, ...] = (4, 8, 16, 32)
    slot_weights: tuple[float, ...] | None = None
    corruption: str = "count"
    normalisation: str = "targets"
    noise_schedule: str = "uniform"
    mdm_scale: float = 1.0
    autoregressive_fraction: float = 0.0
    partial_slot_fraction: float = 0.0
    eos_fill: bool = False
    unrolled_fraction: float = 0.0
    first_token_weight: float = 1.0
    block_sizes: tuple[int, ...] = (8,)
    noise_range: tuple[float, ...] = (0.0, 1.0)
    answer_length: int = 128  # of masked diffusion: answers are padded with end-of-sequence to this many tokens
    context_p: float = 0.0

    @property
    def decoding(self) -> dict[str, Any]:
        """Settings that a trained model's folder names: the method, and of what length the answers or blocks are that it has
        learnt."""
        known, own = METHODS[self.method].settings, {}
        if "answer_length" in known:
            own["max_new_tokens"] = self.answer_length
        if "block_sizes" in known:
            own["block_size"] = sorted(self.block_sizes)[len(self.block_sizes) // 2]
        return {"method": self.method, **own}


@dataclass(frozen=True)
class TrainingRecipe:
    """The loop."""

    max_steps: int
    batch_size: int = 32  # sequences in the global batch
    micro_batch_size: int | None = None  # sequences in one forward; default: the whole batch
    packed_length: int = 0  # tokens of a sequence that rows of a forward are packed into; 0: every row is a sequence
    seed: int = 0
    optimizer: str = "adamw"  # "adamw" or "muon" (matrices by Muon, the rest by AdamW)
    lr: float = 2e-3
    min_lr_ratio: float = 0.0
    warmup_steps: int = 100
    schedule: str = "wsd"  # "wsd": warm-up, stable, linear decay; "cosine"
    decay_fraction: float = 0.2  # of max_steps, for wsd
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.98
    clip: float = 1.0
    ema: float = 0.0  # decay of averaged weights, which are then what is validated and saved; 0: none
    autocast: bool = True  # bf16
    checkpointing: bool = False  # compute layers again for their gradients: less memory, a third slower
    save_every: int = 500
    log_every: int = 20
    threads: int | None = None


@dataclass(frozen=True)
class ValidationRecipe:
    """What is measured on the way."""

    every: int = 500  # losses
    rows: int = 256
    decode_every: int = 0  # accuracy and tokens per forward; 0 = never
    decode_limit: int = 12  # items of each family


@dataclass(frozen=True)
class Recipe:
    objective: ObjectiveRecipe
    training: TrainingRecipe
    data: DataRecipe = field(default_factory=DataRecipe)
    model: ModelRecipe = field(default_factory=ModelRecipe)
    validation: ValidationRecipe = field(default_factory=ValidationRecipe)
    name: str = ""

    def __post_init__(self) -> None:
        for section in (self.data, self.model, self.objective, self.training, self.validation):
            label = type(section).__name__.removesuffix("Recipe").lower()
            for entry in fields(section):
                _check(label, entry.name, getattr(section, entry.name))
        if self.training.lr == 0:
            raise UserError("training.lr must be greater than 0, got 0.0")
        if (self.data.train is None) != (self.data.validation is None):
            raise UserError("data.train and data.validation must be given together")
        if self.data.train is not None and self.model.start is None:
            raise UserError("data.train needs model.start: a vocabulary is learnt on the suite only")
        shares = self.data.weights
        if shares is not None and (len(shares) != len(self.data.train or ()) or sum(shares) <= 0):
            raise UserError("data.weights must have one entry for each file of data.train, and not all of them 0")
        weights, sizes = self.objective.slot_weights, self.objective.slot_sizes
        if not sizes:
            raise UserError("objective.slot_sizes must not be empty")
        if weights is not None and (len(weights) != len(sizes) or sum(weights) <= 0):
            raise UserError("objective.slot_weights must have one entry for each of slot_sizes, and not all of them 0")
        if self.model.head_dim % 2:
            raise UserError(f"model.head_dim must be even, got {self.model.head_dim}")
        heads, groups = self.model.num_attention_heads, self.model.num_key_value_heads
        if heads % groups:
            raise UserError(f"model.num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({groups})")


def ignored(recipe: Recipe) -> list[str]:
    """Settings that were given and have no effect, by their full names."""
    method = recipe.objective.method
    idle = {f.name for f in fields(ObjectiveRecipe)} - METHODS[method].settings - {"method"}
    names = [f"objective.{f.name}" for f in fields(ObjectiveRecipe)
             if f.name in idle and getattr(recipe.objective, f.name) != f.default]  # fmt: skip
    if method == "autoregressive" and recipe.data.infill_fraction and recipe.objective.prompt_loss:
        names.append("data.infill_fraction")
    return names


CHOICES: dict[str, tuple[str, ...]] = {
    "data.suite": ("nano",),
    "data.too_long": ("drop", "cut"),
    "objective.method": tuple(METHODS),
    "objective.corruption": ("count", "bernoulli"),
    "objective.noise_schedule": ("uniform", "cosine"),
    "objective.normalisation": ("targets", "upstream"),
    "training.optimizer": ("adamw", "muon"),
    "training.schedule": ("wsd", "cosine"),
}
SHARES = {  # settings between 0 and 1
    "infill_fraction", "autoregressive_fraction", "partial_slot_fraction", "unrolled_fraction", "min_lr_ratio",
    "decay_fraction", "beta1", "beta2", "ema", "context_p", "noise_range",
}  # fmt: skip
# Whole numbers that may be 0; all others are at least 1.
FROM_ZERO = {"seed", "packed_length", "warmup_steps", "every", "decode_every"}
# Generous: what is larger fills the memory, or does not fit the numbers of torch and numpy.
LARGEST: Mapping[str, float] = {
    **LARGEST_SHAPE, "vocabulary": 1_000_000, "seed": 2**63 - 1, "threads": 1024, "batch_size": 1_000_000,
    "micro_batch_size": 1_000_000, "packed_length": 1_000_000, "slot_sizes": 1_000_000, "rows_per_family": 100_000_000,
    "rows": 10_000_000, "decode_limit": 1_000_000, "family_weights": 1000, "weights": 1000,
}  # fmt: skip
LARGEST_OTHER = 1_000_000_000  # steps, and numbers of every other kind


def _check_size(name: str, key: str, number: float) -> None:
    most = LARGEST.get(name, LARGEST_OTHER)
    if most < number < math.inf:  # that it is finite is another check
        raise UserError(f"{key} must be at most {most:,}, got {_short(number)}")


def _check(section: str, name: str, value: Any) -> None:
    """The range of one setting. Numbers of every kind are finite and never below 0."""
    key = f"{section}.{name}"
    if key in CHOICES and value not in CHOICES[key]:
        raise UserError(f"{key} must be one of {', '.join(CHOICES[key])}, got {value!r}{nearest(value, CHOICES[key])}")
    if key == "data.vocabulary" and value < 300:
        raise UserError(f"{key} must be at least 300 (256 bytes, the special tokens, and some to learn), got {_short(value)}")
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, int) and not isinstance(number, bool):
            least = 0 if name in FROM_ZERO else 1
            if number < least:
                raise UserError(f"{key} must be at least {least}, got {_short(number)}")
            _check_size(name, key, number)
        elif isinstance(number, float):
            if name in SHARES and not 0 <= number <= 1:
                raise UserError(f"{key} must be between 0 and 1, got {number}")
            if (name.startswith("beta") or name == "ema") and number == 1:
                raise UserError(f"{key} must be less than 1, got 1.0")
            if not math.isfinite(number) or number < 0:
                raise UserError(f"{key} must be a finite number of at least 0, got {number}")
            _check_size(name, key, number)


def load(path: Path, overrides: Mapping[str, str] | None = None) -> Recipe:
    """Read a recipe. `overrides`: dotted keys such as "training.max_steps" and their values as TOML text."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no such recipe: {path}") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # no TOML, no text, numbers of thousands of digits
        raise UserError(f"{path}: {error}") from None
    for key, text in (overrides or {}).items():
        _override(table, key.replace("-", "_"), text, str(path))
    return from_table(table, str(path))


def from_table(table: Mapping[str, Any], source: str) -> Recipe:
    """A recipe from TOML tables; `source` is what a complaint names."""
    recipe: Recipe = _build(Recipe, dict(table), source, "")
    return recipe


def _override(table: dict[str, Any], key: str, text: str, source: str) -> None:
    *sections, last = key.split(".")
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise UserError(f"{source}: cannot set {key!r}, since {section!r} is not a table")
    try:
        table[last] = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        table[last] = text


def _build(kind: Any, table: Any, source: str, prefix: str) -> Any:
    if not isinstance(table, dict):
        raise UserError(f"{source}: {prefix.rstrip('.')} must be a table, got {_short(table)}")
    known = {f.name: f for f in fields(kind)}
    hints = get_type_hints(kind)
    for key in table:
        if key not in known:
            raise UserError(f"{source}: unknown key {prefix + key!r}{_elsewhere(key) or nearest(key, known)}")
    for name, entry in known.items():
        if name not in table and entry.default is MISSING and entry.default_factory is MISSING:
            raise UserError(f"{source}: missing key {prefix + name!r}")
    values = {key: _convert(hints[key], value, source, prefix + key) for key, value in table.items()}
    try:
        return kind(**values)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None


def _elsewhere(key: str) -> str:
    """A hint for a key that stands in the wrong table."""
    homes = [f"{name}.{key}" for name, hint in get_type_hints(Recipe).items() if key in _names(hint)]
    return f"; did you mean {homes[0]!r}?" if len(homes) == 1 else ""


def _names(kind: Any) -> set[str]:
    return {f.name for f in fields(kind)} if is_dataclass(kind) else set()


def _short(value: object) -> str:
    """A value as one line of bearable length."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."


KINDS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}


def _convert(hint: Any, value: Any, source: str, key: str) -> Any:
    if is_dataclass(hint):
        return _build(hint, value, source, key + ".")
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(option for option in get_args(hint) if option is not type(None))
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise UserError(f"{source}: {key} must be a list, got {_short(value)}")
        return tuple(_convert(get_args(hint)[0], entry, source, key) for entry in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(max(-(10**300), min(10**300, value)))  # what is larger is too large for a float, and for any key
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise UserError(f"{source}: {key} must be {KINDS[hint]}, got {_short(value)}")
    return value
