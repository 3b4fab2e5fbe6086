"""Model folders of other projects: fields of config.json and names of tensors, in terms of Hugging Face's own layouts.

    LLaDA   a Llama in the names of OLMo (GSAI-ML/LLaDA-8B-Base, -Instruct)
    Dream   a Qwen2 by another `model_type` (Dream-org/Dream-v0-Base-7B, -Instruct-7B)

Contract: a `Layout` translates; it reads no files. `defaults` are decoding settings that it carries and does not know.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from refusion.config import UserError


@dataclass(frozen=True)
class Layout:
    """How a folder differs from that of `model_type`, which is one of ours."""

    model_type: str = ""  # "": the folder's own
    defaults: Mapping[str, Any] = field(default_factory=dict)
    mask_token_id: int | None = None  # where the folder names none
    fields: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # ours -> theirs: the first that is set
    required: tuple[str, ...] = ()  # of theirs
    fixed: Mapping[str, Any] = field(default_factory=dict)  # theirs -> the only value that our forward pass computes
    tensors: Mapping[str, str] = field(default_factory=dict)  # ours -> theirs, without `.weight`; `*` is the layer

    def translated(self, raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
        """config.json in our fields. Raises `UserError` naming the file and the field that is missing or not supported."""
        for name in self.required:
            if raw.get(name) is None:
                raise UserError(f"{path}: {name} is missing")
        for name, value in self.fixed.items():
            given = raw.get(name)
            if given is not None and given != value:
                raise UserError(f"{path}: {name} {given!r} is not supported (known: {value!r})")
        ours = dict(raw)
        for name, theirs in self.fields.items():
            ours[name] = next((raw[key] for key in theirs if raw.get(key) is not None), None)
        return ours | ({"model_type": self.model_type} if self.model_type else {})

    def stored(self, name: str) -> str:
        """Under which name one of our tensors is stored.

        >>> LAYOUTS["llada"].stored("model.layers.7.mlp.gate_proj.weight")
        'model.transformer.blocks.7.ff_proj.weight'
        """
        layer = re.search(r"\d+", name)
        number = layer.group() if layer else ""
        stem = name.removesuffix(".weight").replace(f".{number}.", ".*.", 1) if layer else name.removesuffix(".weight")
        return self.tensors[stem].replace("*", number) + ".weight" if stem in self.tensors else name


PLAIN = Layout()

LLADA = Layout(
    "llama", {"method": "llada"}, 126336,
    fields={
        "hidden_size": ("d_model",), "num_hidden_layers": ("n_layers",), "num_attention_heads": ("n_heads",),
        "num_key_value_heads": ("n_kv_heads", "n_heads"), "intermediate_size": ("mlp_hidden_size",),
        "vocab_size": ("embedding_size", "vocab_size"), "max_position_embeddings": ("max_sequence_length",),
        "tie_word_embeddings": ("weight_tying",),
    },
    required=("d_model", "n_layers", "n_heads", "mlp_hidden_size", "vocab_size", "rms_norm_eps", "rope_theta"),
    fixed={
        "block_type": "llama", "block_group_size": 1, "layer_norm_type": "rms", "activation_type": "silu", "rope": True,
        "alibi": False, "attention_layer_norm": False, "include_bias": False, "include_qkv_bias": False,
        "bias_for_layer_norm": False, "layer_norm_with_affine": True, "input_emb_norm": False, "scale_logits": False,
        "multi_query_attention": False,
    },
    tensors={
        "model.embed_tokens": "model.transformer.wte", "model.norm": "model.transformer.ln_f",
        "lm_head": "model.transformer.ff_out",
    } | {
        f"model.layers.*.{ours}": f"model.transformer.blocks.*.{theirs}"
        for ours, theirs in (
            ("input_layernorm", "attn_norm"), ("self_attn.q_proj", "q_proj"), ("self_attn.k_proj", "k_proj"),
            ("self_attn.v_proj", "v_proj"), ("self_attn.o_proj", "attn_out"), ("post_attention_layernorm", "ff_norm"),
            ("mlp.gate_proj", "ff_proj"), ("mlp.up_proj", "up_proj"), ("mlp.down_proj", "ff_out"),
        )
    },
)  # fmt: skip
DREAM = Layout("qwen2", {"method": "dream"}, 151666)

LAYOUTS = {"llada": LLADA, "Dream": DREAM}  # by model_type
