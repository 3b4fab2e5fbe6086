"""Model folders in Hugging Face's layout: reading, checking and writing them.

Contract: a folder that is read is checked whole (files, names, shapes) before any weight is used; every complaint is a
`UserError` of one line that names the file. A folder that is written appears whole or not at all, and replacing one
never leaves none. This module knows no method: `mask_token_id` and `defaults` are values that it carries.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from refusion.config import LARGEST_SHAPE, UserError, nearest
from refusion.models.layouts import LAYOUTS, PLAIN, Layout
from refusion.models.rope import FIELDS, KINDS, RopeScaling, yarn_attention
from refusion.models.tokenizer import Tokenizer, one_line, read_json, special_ids
from refusion.models.transformer import ModelConfig, Transformer

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # safetensors' names
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


WEIGHTS = Path(__file__).parent.parent / "weights"  # the models that come with the package


def packaged_models() -> list[str]:
    """Names of the models that come with the package."""
    return sorted(path.parent.name for path in WEIGHTS.glob("*/config.json"))


def resolve_folder(name_or_path: str | Path) -> Path:
    """A model's folder: by the name of one that comes with the package, by path, or by hub id `org/name`, fetched where
    `huggingface_hub` is installed.

    Raises `UserError` when there is no such folder, or when the hub has or gives nothing.
    """
    if not isinstance(name_or_path, str | Path):
        raise UserError(f"model must be a name or a folder, got {name_or_path!r}")
    packaged = packaged_models()
    if str(name_or_path) in packaged:
        return WEIGHTS / str(name_or_path)
    folder = _local_folder(name_or_path)
    if folder is not None:
        return folder
    name = str(name_or_path)
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name, re.ASCII):
        raise UserError(f"no such model folder: {_shown(name)}{nearest(name, packaged)}")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(f"no such model folder: {name} (for a hub id: pip install huggingface_hub)") from None
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"]))
    except Exception as error:  # offline, unknown, gated, disk full, ...: each has its own class there
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(f"no such model folder: {name}, and the hub gave nothing for it ({reason})") from None


def _local_folder(name: str | Path) -> Path | None:
    """The folder at a path; None where there is nothing."""
    try:
        path = Path(name).expanduser()
        if str(name) and path.is_dir():
            if not (path / "config.json").exists() and (path / "last" / "config.json").exists():
                raise UserError(f"{path}: is a training run; its models are {path / 'last'} and {path / 'best'}")
            return path
        if path.exists():
            raise UserError(f"{path}: is a file, not a model folder")
    except (OSError, RuntimeError) as error:  # too long, in a folder that may not be read, the home of an unknown user
        reason = error.strerror if isinstance(error, OSError) else one_line(error)
        raise UserError(f"no such model folder: {_shown(str(name))} ({reason})") from None
    return None


def _shown(name: str) -> str:
    """A name as one line of bearable length."""
    plain = name if name.isprintable() else ascii(name)
    return plain if len(plain) <= 200 else f"{plain[:200]}... ({len(name):,} characters)"


# --- config.json and generation_config.json


@dataclass(frozen=True)
class FolderConfig:
    """What a model folder says about itself, without its weights."""

    model: ModelConfig
    architecture: str  # as in `architectures`, "Qwen3ForCausalLM"
    mask_token_id: int | None  # None: a plain autoregressive model
    eos_token_ids: tuple[int, ...]  # of generation_config.json, config.json and the tokenizer, in this order
    bos_token_id: int | None
    pad_token_id: int | None
    defaults: dict[str, Any]  # decoding settings: generation_config.json, key `refusion`
    raw: dict[str, Any]  # config.json as it stands
    layout: Layout = PLAIN  # of a folder in other names than Hugging Face's

    @property
    def parameters(self) -> int:
        """Number of weights, tied ones counted once."""
        return count_parameters(self.model)


def count_parameters(config: ModelConfig) -> int:
    """Number of weights of a shape, tied ones counted once."""
    with torch.device("meta"):
        return sum(p.numel() for p in Transformer(config).parameters())


class _Fields:
    """Typed access to a JSON file's fields; complaints name the file and the field. null counts as absent."""

    def __init__(self, raw: Mapping[str, Any], path: Path, prefix: str = "") -> None:
        self.raw, self.path, self.prefix = raw, path, prefix  # prefix: of a table within the file, "rope_scaling."

    def fail(self, message: str) -> UserError:
        return UserError(f"{self.path}: {self.prefix}{message}")

    def whole(self, name: str, default: int | None = None) -> int:
        value = self.raw.get(name)
        value = default if value is None else value
        if value is None:
            raise self.fail(f"{name} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.fail(f"{name} must be a whole number of at least 1, got {value!r:.40}")
        if value > LARGEST_SHAPE.get(name, value):
            raise self.fail(f"{name} must be at most {LARGEST_SHAPE[name]:,}, got {value!r:.40}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.raw.get(name)
        value = default if value is None else value
        if value is None:
            raise self.fail(f"{name} is missing")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e300:
            raise self.fail(f"{name} must be a number above 0, got {value!r:.40}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.raw.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.fail(f"{name} must be true or false, got {value!r:.40}")
        return value

    def table(self, name: str) -> dict[str, Any]:
        value = self.raw.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.fail(f"{name} must be an object, got {value!r:.40}")
        return dict(value or {})

    def ids(self, name: str) -> tuple[int, ...]:
        """Token ids: one number or a list of them."""
        value = self.raw.get(name)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in values):
            raise self.fail(f"{name} must be a token id or a list of them, got {value!r:.40}")
        return tuple(values)

    def id(self, name: str) -> int | None:
        """One token id."""
        value = self.raw.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise self.fail(f"{name} must be a token id, got {value!r:.40}")
        return value

    def texts(self, name: str) -> list[str]:
        value = self.raw.get(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(entry, str) for entry in value)):
            raise self.fail(f"{name} must be a list of texts, got {value!r:.40}")
        return list(value or ())


def read_config(folder: str | Path) -> FolderConfig:
    """Read and check config.json, generation_config.json and the tokenizer's special ids. Weights are not touched."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"no such model folder: {folder}")
    raw = read_json(folder / "config.json")
    layout = LAYOUTS.get(str(raw.get("model_type")), PLAIN)
    config = _Fields(layout.translated(raw, folder / "config.json"), folder / "config.json")
    path = folder / "generation_config.json"
    generation = _Fields(read_json(path) if path.exists() else {}, path)
    model = _model_config(config)
    named = special_ids(folder)
    eos, bos, pad = (
        [*generation.ids(name), *config.ids(name), *([named[token]] if token in named else [])]
        for name, token in (("eos_token_id", "eos_token"), ("bos_token_id", "bos_token"), ("pad_token_id", "pad_token"))
    )
    mask = config.id("mask_token_id")
    if mask is not None and mask >= model.vocab_size:
        raise config.fail(f"mask_token_id {mask!s:.40} is outside the vocabulary ({model.vocab_size} entries)")
    if mask is None and named.get("mask_token", model.vocab_size) < model.vocab_size:
        mask = named["mask_token"]
    if mask is None and layout.mask_token_id is not None and layout.mask_token_id < model.vocab_size:
        mask = layout.mask_token_id
    architecture = (config.texts("architectures") or [ARCHITECTURES[model.model_type]])[0]
    return FolderConfig(
        model, architecture, mask, tuple(dict.fromkeys(eos)), bos[0] if bos else None, pad[0] if pad else None,
        {**layout.defaults, **generation.table("refusion")}, dict(raw), layout,
    )  # fmt: skip


def model_config(raw: Mapping[str, Any], path: Path) -> ModelConfig:
    """The shape that the fields of a config.json describe; `path` is what a complaint names."""
    return _model_config(_Fields(raw, path))


def _model_config(config: _Fields) -> ModelConfig:
    kind = str(config.raw.get("model_type"))
    if kind not in ARCHITECTURES:
        raise config.fail(f"model_type {kind!r} is not supported (known: {', '.join([*ARCHITECTURES, *LAYOUTS])})")
    if config.raw.get("hidden_act", "silu") != "silu":
        raise config.fail(f"hidden_act {config.raw['hidden_act']!r} is not supported (known: silu)")
    if config.raw.get("quantization_config"):
        raise config.fail("quantization_config: quantised weights are not supported")
    hidden, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    bias = kind != "qwen2" and config.flag("attention_bias")
    theta, scaling = _rope(config)
    shape = ModelConfig(
        model_type=kind,
        vocab_size=config.whole("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.whole("intermediate_size"),
        num_hidden_layers=config.whole("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=config.whole("num_key_value_heads", heads),
        head_dim=config.whole("head_dim", 128 if kind == "qwen3" else max(hidden // heads, 1)),  # as in transformers
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=config.whole("max_position_embeddings", 2048 if kind == "llama" else 32768),
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        qkv_bias=bias or kind == "qwen2",
        o_bias=bias,
        mlp_bias=kind == "llama" and config.flag("mlp_bias"),
        qk_norm=kind == "qwen3",
        initializer_range=config.number("initializer_range", 0.02),
    )
    _check_shape(config, shape)
    return shape


def _check_shape(config: _Fields, shape: ModelConfig) -> None:
    """What the single fields do not show: heads that fit together, and attention that really is full."""
    heads, groups = shape.num_attention_heads, shape.num_key_value_heads
    if heads % groups:
        raise config.fail(f"num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({groups})")
    if shape.head_dim % 2:
        raise config.fail(f"head_dim must be even, got {shape.head_dim}")
    if shape.model_type != "llama" and config.flag("use_sliding_window") and config.raw.get("sliding_window"):
        window, full = config.whole("sliding_window"), config.raw.get("max_window_layers", 28)
        windowed = not isinstance(full, int) or full < shape.num_hidden_layers
        if "layer_types" in config.raw:
            windowed = "sliding_attention" in config.texts("layer_types")
        if windowed and window < shape.max_position_embeddings:
            raise config.fail(f"sliding_window ({window}) is in use, which is not supported")


def _rope(config: _Fields) -> tuple[float, RopeScaling | None]:
    """Base of the rotary embedding, and how it is stretched: all in `rope_parameters` (new), or `rope_theta` beside
    `rope_scaling` (old)."""
    name = "rope_scaling" if config.raw.get("rope_scaling") else "rope_parameters"
    table = _Fields(config.table(name), config.path, f"{name}.")
    kind = table.raw.get("rope_type", table.raw.get("type", "default"))
    if kind not in ("default", *KINDS) or any(isinstance(value, dict) for value in table.raw.values()):
        known = ", ".join(repr(k) for k in ("default", *KINDS))
        raise config.fail(f"{name}: rope_type {kind!r} is not supported (known: {known})")
    if table.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0)) != 1.0:
        raise config.fail("partial_rotary_factor other than 1 is not supported")
    theta = table.number("rope_theta", config.number("rope_theta", 10000.0))
    return theta, None if kind == "default" else _rope_scaling(table, config, kind)


def _rope_scaling(table: _Fields, config: _Fields, kind: str) -> RopeScaling:
    factor = table.number("factor")
    if kind == "linear":
        return RopeScaling(kind, factor)
    context = config.raw.get("max_position_embeddings")
    context = table.whole("original_max_position_embeddings", context if isinstance(context, int) else None)
    if kind == "llama3":
        low, high = table.number("low_freq_factor"), table.number("high_freq_factor")
        if low >= high:
            raise table.fail(f"low_freq_factor ({low:g}) must be less than high_freq_factor ({high:g})")
        return RopeScaling(kind, factor, context, low, high)
    usual = yarn_attention(factor)
    if table.raw.get("mscale") and table.raw.get("mscale_all_dim"):
        usual = yarn_attention(factor, table.number("mscale")) / yarn_attention(factor, table.number("mscale_all_dim"))
    return RopeScaling(
        kind, factor, context, beta_fast=table.number("beta_fast", 32.0), beta_slow=table.number("beta_slow", 1.0),
        attention_factor=table.number("attention_factor", usual), truncate=table.flag("truncate", True),
    )  # fmt: skip


# --- weights: reading


def load_model(
    folder: str | Path, device: str | torch.device | None = None, dtype: str | torch.dtype | None = None
) -> Transformer:
    """The model of a folder, in eval mode.

    device: None = CUDA where there is one, else the CPU. dtype: "float32", "bfloat16" or a torch dtype; None = float32
    on the CPU and the stored one elsewhere. One tensor at a time is converted, so the peak is the model and one tensor.
    Raises `UserError` naming the file when anything is missing, broken or does not fit config.json.
    """
    folder = Path(folder)
    described = read_config(folder)
    config, layout = described.model, described.layout
    place = _device(device)
    with torch.device("meta"):
        model = Transformer(config)
    names = {layout.stored(name): name for name in model.state_dict()}
    files = _tensor_files(folder)
    shapes = {layout.stored(name): tuple(t.shape) for name, t in model.state_dict().items()}
    stored = _check_tensors(folder, files, shapes, config, layout)
    wanted = _dtype(dtype) or (torch.float32 if place.type == "cpu" else stored)
    state: dict[str, Tensor] = {}
    for file in sorted(set(files.values())):
        with _opened(file) as tensors:
            for name in (n for n, f in files.items() if f == file and not _ignored(n)):
                # A copy even where nothing changes: it is aligned, and independent of the file.
                state[names[name]] = tensors.get_tensor(name).to(device=place, dtype=wanted, copy=True)
    _assign(model, state, folder)
    return model.eval()


def _assign(model: Transformer, state: dict[str, Tensor], folder: Path) -> None:
    """Put loaded tensors in place of the meta ones, and tie the output head again."""
    embedding, head = state["model.embed_tokens.weight"], state.pop("lm_head.weight", None)
    if model.config.tie_word_embeddings:
        if head is not None and not torch.equal(head, embedding):
            raise UserError(f"{folder}: lm_head.weight differs from the embedding, but tie_word_embeddings is true")
        head = embedding
    assert head is not None
    model.load_state_dict({**state, "lm_head.weight": head}, assign=True)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
        if place.type == "meta":
            raise RuntimeError("nothing can be computed there")
    except (RuntimeError, AssertionError, NotImplementedError, ImportError, TypeError) as error:
        raise UserError(f"device {str(device)!r} cannot be used ({one_line(error)[:100]})") from None
    return place


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    known = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if known is not None and not isinstance(known, torch.dtype):
        raise UserError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if (known is None and dtype is not None) or (known is not None and not known.is_floating_point):
        raise UserError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return known


def _ignored(name: str) -> bool:
    """Old Llama folders also store the rotary frequencies, which follow from the config."""
    return name.endswith("rotary_emb.inv_freq")


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """A safetensors file; its header is checked against its length."""
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except FileNotFoundError:
        raise UserError(f"{file}: no such file") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: broken or cut short ({one_line(error)})") from None


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Which file holds which tensor: model.safetensors, or else the shards that the index names."""
    if (folder / SINGLE).exists():
        shards = [folder / SINGLE]
    elif (path := folder / INDEX).exists():
        names = read_json(path).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(n, str) and Path(n).name == n for n in names.values()):
            raise UserError(f"{path}: weight_map must map tensors to files of this folder")
        shards = [folder / name for name in sorted(set(names.values()))]
    else:
        raise UserError(f"{folder}: holds no weights ({SINGLE} or {INDEX})")
    files: dict[str, Path] = {}
    for shard in shards:
        with _opened(shard) as tensors:
            files |= dict.fromkeys(tensors.keys(), shard)
    return files


def _check_tensors(
    folder: Path, files: Mapping[str, Path], shapes: Mapping[str, tuple[int, ...]], config: ModelConfig, layout: Layout
) -> torch.dtype:
    """Compare the names and shapes of all stored tensors with the model's; returns the stored dtype."""
    head, embedding = layout.stored("lm_head.weight"), layout.stored("model.embed_tokens.weight")
    missing = [n for n in shapes if n not in files and not (n == head and config.tie_word_embeddings)]
    if missing:
        where = folder / (SINGLE if (folder / SINGLE).exists() else INDEX)
        raise UserError(f"{where}: tensor {missing[0]} is missing{_others(missing)}")
    unexpected = [name for name in files if name not in shapes and not _ignored(name)]
    if unexpected:
        name = unexpected[0]
        raise UserError(f"{files[name]}: tensor {name} does not belong to a {config.model_type} model of this shape"
                        f"{_others(unexpected)}")  # fmt: skip
    stored = torch.float32
    for file in sorted(set(files.values())):
        with _opened(file) as tensors:
            for name in (n for n in shapes if files.get(n) == file):
                piece = tensors.get_slice(name)
                if tuple(piece.get_shape()) != shapes[name]:
                    raise UserError(f"{file}: tensor {name} has shape {list(piece.get_shape())}, "
                                    f"but config.json asks for {list(shapes[name])}")  # fmt: skip
                if piece.get_dtype() not in STORED:
                    raise UserError(f"{file}: tensor {name} has dtype {piece.get_dtype()}, which is not supported")
                if name == embedding:
                    stored = STORED[piece.get_dtype()]
    return stored


def _others(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


# --- weights: writing


def save_folder(
    path: str | Path, model: Transformer, tokenizer: Tokenizer | None, *, mask_token_id: int | None = None,
    eos_token_ids: Sequence[int] | None = None, bos_token_id: int | None = None, pad_token_id: int | None = None,
    defaults: Mapping[str, Any] | None = None, dtype: str | torch.dtype = "bfloat16",
    max_shard_bytes: int | None = None, extra_files: Mapping[str, str] | None = None,
    more: Callable[[Path], None] | None = None,
) -> Path:  # fmt: skip
    """Write a Hugging Face folder that `transformers` and `load_model` read; it appears whole or not at all.

    Token ids that are None are the tokenizer's; the chat template travels with the tokenizer. defaults: decoding
    settings for generation_config.json. extra_files: name -> text, say a model card. more: is called with the new
    folder before it appears, to write into it; an `OSError` of it is a failure to write. An existing model folder is
    replaced at once; anything else in the way is a `UserError`.
    """
    path, wanted = Path(path), _dtype(dtype)
    assert wanted is not None and (max_shard_bytes is None or max_shard_bytes > 0)
    if path.is_dir() and any(path.iterdir()) and not (path / "config.json").exists():
        raise UserError(f"{path}: is no model folder, and is not replaced by one")
    if tokenizer is not None:
        mask_token_id = tokenizer.mask_token_id if mask_token_id is None else mask_token_id
        bos_token_id = tokenizer.bos_token_id if bos_token_id is None else bos_token_id
        pad_token_id = tokenizer.pad_token_id if pad_token_id is None else pad_token_id
        if eos_token_ids is None and tokenizer.eos_token_id is not None:
            eos_token_ids = (tokenizer.eos_token_id,)
    eos = list(eos_token_ids or ())
    ids = {"bos_token_id": bos_token_id, "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
           "pad_token_id": pad_token_id}  # fmt: skip
    with replaced_folder(path) as new:
        mask = {} if mask_token_id is None else {"mask_token_id": mask_token_id}
        _write_json(new / "config.json", {**hf_config(model.config, wanted), **ids, **mask})
        settings = {"refusion": dict(defaults)} if defaults else {}
        _write_json(new / "generation_config.json", {k: v for k, v in ids.items() if v is not None} | settings)
        if tokenizer is not None:
            tokenizer.save(new)
        for name, text in (extra_files or {}).items():
            (new / name).write_text(text, encoding="utf-8")
        _write_tensors(new, model, wanted, max_shard_bytes)
        if more is not None:
            more(new)
    return path


def hf_config(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of a shape, in fields that transformers 4 and 5 both read. Token ids are not in it."""
    kind = config.model_type
    assert config.qk_norm == (kind == "qwen3") and (config.mlp_bias is False or kind == "llama")
    assert (config.qkv_bias, config.o_bias) == (True, False) if kind == "qwen2" else config.qkv_bias == config.o_bias
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "max_position_embeddings",
            "tie_word_embeddings", "initializer_range")  # fmt: skip
    shape = {name: getattr(config, name) for name in same}
    if kind == "llama":
        shape |= {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    elif kind == "qwen3":
        shape |= {"attention_bias": config.qkv_bias, "use_sliding_window": False}
    else:
        assert config.head_dim * config.num_attention_heads == config.hidden_size, "qwen2 has no head_dim of its own"
        del shape["head_dim"]
        shape |= {"use_sliding_window": False}
    scaling = config.rope_scaling
    stretch = {} if scaling is None else {name: asdict(scaling)[name] for name in FIELDS[scaling.rope_type]}
    rope = {"rope_type": "default", **stretch, "rope_theta": config.rope_theta}
    return {
        "architectures": [ARCHITECTURES[kind]], "model_type": kind, "hidden_act": "silu", "attention_dropout": 0.0,
        **shape, "rope_parameters": rope, "rope_scaling": stretch or None, "torch_dtype": str(dtype).removeprefix("torch."),
        "use_cache": True,
    }  # fmt: skip


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_tensors(folder: Path, model: Transformer, dtype: torch.dtype, max_bytes: int | None) -> None:
    """All weights as one file, or as shards of at most `max_bytes` each and their index."""
    tensors: dict[str, Tensor] = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    shards: list[list[str]] = [[]]
    sizes = {name: tensor.numel() * dtype.itemsize for name, tensor in tensors.items()}
    room = max_bytes or sum(sizes.values())
    for name, size in sizes.items():
        if shards[-1] and sum(sizes[n] for n in shards[-1]) + size > room:
            shards.append([])
        shards[-1].append(name)
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = [SINGLE]
    else:
        where = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        _write_json(folder / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where})
    for name, shard in zip(names, shards, strict=True):
        part = {n: tensors[n].detach().to("cpu", dtype).contiguous() for n in shard}
        save_file(part, folder / name, metadata={"format": "pt"})
        os.chmod(folder / name, 0o644)  # it comes out readable by its owner only


# --- folders that appear whole


@contextlib.contextmanager
def replaced_folder(path: str | Path) -> Iterator[Path]:
    """A new folder to fill, which takes the place of `path` when the block ends without an error.

    It is a hidden sibling until then, so a crash leaves the old folder as it was. Raises `UserError` when it cannot be
    written (disk full, no permission) or when `path` is a file.
    """
    path = Path(os.path.realpath(path))  # a link keeps pointing at the folder that is replaced
    if path.exists() and not path.is_dir():
        raise UserError(f"{path}: is a file, not a folder")
    new = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        new.mkdir(parents=True)
        yield new
        for file in (*sorted(new.rglob("*")), new):
            _fsync(file)
        _move_over(new, path)
        _fsync(path.parent)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be written ({one_line(error)})") from None
    finally:
        shutil.rmtree(new, ignore_errors=True)  # the unfinished folder; after an exchange, the old one


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _move_over(new: Path, path: Path) -> None:
    """Rename `new` to `path`; an existing folder is exchanged in one step where the system can, else set aside."""
    if not path.exists() or not any(path.iterdir()):
        os.replace(new, path)
    elif not _exchanged(new, path):
        aside = new.with_suffix(".old")
        os.replace(path, aside)
        try:
            os.replace(new, path)
        except OSError:
            os.replace(aside, path)
            raise
        shutil.rmtree(aside, ignore_errors=True)


def _exchanged(one: Path, other: Path) -> bool:
    """Swap two folders atomically (Linux: renameat2 with RENAME_EXCHANGE); False where that is not possible."""
    if sys.platform != "linux":
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    return rename is not None and rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0
