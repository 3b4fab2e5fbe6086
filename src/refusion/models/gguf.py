"""Models in GGUF files (llama.cpp's format) as ours: shape, tokenizer and dequantised weights. Extra `[gguf]`.

    general.architecture     llama, qwen2, qwen3
    tokenizer.ggml.model     gpt2 (byte-level byte-pair), cut as one of `CUTS` says
    weights                  whatever the `gguf` package dequantises: F32, F16, BF16, Q8_0, Q4_1, ...

Contract: reads one file; what is missing or not supported is a `UserError` that names it. Weights come out in float32, with
Hugging Face's names and row order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from refusion.config import UserError
from refusion.models.tokenizer import QWEN2_PATTERN, Spec, Tokenizer, one_line

ARCHITECTURES = ("llama", "qwen2", "qwen3")
LLAMA3_PATTERN = QWEN2_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
# tokenizer.ggml.pre -> how text is cut before merging: None is GPT-2's own rule, "digits" takes every digit alone first
CUTS = {"smollm": "digits", "qwen2": QWEN2_PATTERN, "llama-bpe": LLAMA3_PATTERN, "gpt-2": None, "default": None}
CONTROL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
STEMS = {  # theirs -> ours, within a layer
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True)
class GgufModel:
    """What a GGUF file holds."""

    config: dict[str, Any]  # fields of a config.json
    tokenizer: Tokenizer
    license: str | None
    tensors: list[Any]  # the package's readers
    path: Path

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor by our name, float32, one at a time."""
        from gguf.quants import dequantize

        heads, groups = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        for stored in self.tensors:
            name = our_name(stored.name)
            if name is None:
                raise UserError(f"{self.path}: tensor {stored.name} is not supported")
            try:
                weight = torch.from_numpy(dequantize(stored.data, stored.tensor_type).copy()).float()
            except Exception as error:  # a type that the package does not know, a file cut short
                raise UserError(f"{self.path}: tensor {stored.name} cannot be read ({one_line(error)})") from None
            if self.config["model_type"] == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
                weight = unpermuted(weight, heads if "q_proj" in name else groups)
            yield name, weight


def our_name(name: str) -> str | None:
    """
    >>> our_name("blk.3.attn_q.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer and layer[2] in STEMS:
        return f"model.layers.{layer[1]}.{STEMS[layer[2]]}.{layer[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{OUTER[stem]}.{kind}" if stem in OUTER else None


def unpermuted(weight: Tensor, heads: int) -> Tensor:
    """Rows of q or k in Hugging Face's order: llama.cpp stores the two halves of each head interleaved."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


class _Fields:
    """The key-value pairs of a file."""

    def __init__(self, fields: Any, path: Path, architecture: str = "") -> None:
        self.fields, self.path, self.architecture = fields, path, architecture

    def get(self, name: str, default: Any = None) -> Any:
        entry = self.fields.get(name)
        return default if entry is None else entry.contents()

    def need(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise UserError(f"{self.path}: {name} is missing")
        return value

    def own(self, name: str) -> Any:
        """A field of the architecture."""
        return self.need(f"{self.architecture}.{name}")


def read(path: Path) -> GgufModel:
    """Read a GGUF file's description; its weights are read when they are asked for."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise UserError(f"{path}: reading GGUF needs the package gguf: pip install 'refusion[gguf]'") from None
    try:
        reader = GGUFReader(path)
    except FileNotFoundError:
        raise UserError(f"no such model file: {path}") from None
    except Exception as error:  # whatever a broken header leads to
        raise UserError(f"{path}: not a GGUF file that can be read ({one_line(error)})") from None
    architecture = str(_Fields(reader.fields, path).need("general.architecture"))
    if architecture not in ARCHITECTURES:
        raise UserError(f"{path}: architecture {architecture!r} is not supported (known: {', '.join(ARCHITECTURES)})")
    fields = _Fields(reader.fields, path, architecture)
    names = {tensor.name for tensor in reader.tensors}
    if "rope_freqs.weight" in names:
        raise UserError(f"{path}: stretched rotary frequencies (rope_freqs.weight) are not supported; convert the original folder")
    return GgufModel(_config(fields, names), _tokenizer(fields), fields.get("general.license"), list(reader.tensors), path)


def _config(fields: _Fields, names: set[str]) -> dict[str, Any]:
    heads, hidden = int(fields.own("attention.head_count")), int(fields.own("embedding_length"))
    kind = fields.architecture
    config = {
        "model_type": kind, "vocab_size": len(fields.need("tokenizer.ggml.tokens")), "hidden_size": hidden,
        "intermediate_size": int(fields.own("feed_forward_length")), "num_hidden_layers": int(fields.own("block_count")),
        "num_attention_heads": heads, "num_key_value_heads": int(fields.get(f"{kind}.attention.head_count_kv", heads)),
        "head_dim": int(fields.get(f"{kind}.attention.key_length", hidden // heads)),
        "rms_norm_eps": float(fields.own("attention.layer_norm_rms_epsilon")),
        "rope_theta": float(fields.get(f"{kind}.rope.freq_base", 10000.0)),
        "max_position_embeddings": int(fields.own("context_length")), "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": kind != "qwen2" and "blk.0.attn_q.bias" in names,
        **{f"{name}_token_id": fields.get(f"tokenizer.ggml.{key}_token_id")
           for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))},
    }  # fmt: skip
    scaling = fields.get(f"{kind}.rope.scaling.type", "none")
    if scaling != "none":
        stretch = {"rope_type": scaling, "factor": float(fields.own("rope.scaling.factor"))}
        if scaling == "yarn":
            stretch["original_max_position_embeddings"] = int(fields.own("rope.scaling.original_context_length"))
        config["rope_scaling"] = stretch
    return config


def _tokenizer(fields: _Fields) -> Tokenizer:
    kind, cut = fields.need("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise UserError(f"{fields.path}: tokenizer.ggml.model {kind!r} is not supported (known: gpt2); convert the original folder")
    if cut not in CUTS:
        raise UserError(f"{fields.path}: tokenizer.ggml.pre {cut!r} is not supported (known: {', '.join(CUTS)})")
    texts = fields.need("tokenizer.ggml.tokens")
    kinds = fields.get("tokenizer.ggml.token_type", [1] * len(texts))
    named = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    ids = {name: fields.get(f"tokenizer.ggml.{key}_token_id") for name, key in named.items()}
    specials = {name: texts[i] for name, i in ids.items() if i is not None}
    template = fields.get("tokenizer.chat_template")
    spec = _spec(texts, kinds, fields.get("tokenizer.ggml.merges", []), CUTS[cut], ignore_merges=cut == "llama-bpe")
    return Tokenizer(spec, specials, {} if template is None else {"default": template}, source=str(fields.path))


def _spec(texts: list[str], kinds: list[int], merges: list[str], cut: str | None, ignore_merges: bool) -> Spec:
    """The tokenizer.json of a byte-level byte-pair tokenizer."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    cutter: Spec = {**byte_level, "use_regex": True}
    if cut == "digits":
        cutter = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, cutter]}
    elif cut is not None:
        split = {"type": "Split", "pattern": {"Regex": cut}, "behavior": "Isolated", "invert": False}
        cutter = {"type": "Sequence", "pretokenizers": [split, {**byte_level, "use_regex": False}]}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": i, "content": text, "special": kind == CONTROL, **plain}
        for i, (text, kind) in enumerate(zip(texts, kinds, strict=True)) if kind in (CONTROL, USER_DEFINED)
    ]  # fmt: skip
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "",
        "fuse_unk": False, "byte_fallback": False, "ignore_merges": ignore_merges,
        "vocab": {text: i for i, text in enumerate(texts)}, "merges": [merge.split(" ") for merge in merges],
    }  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": {"type": "NFC"} if cut == QWEN2_PATTERN else None, "pre_tokenizer": cutter,
        "post_processor": {**byte_level, "use_regex": False}, "decoder": {**byte_level, "use_regex": False}, "model": model,
    }  # fmt: skip
