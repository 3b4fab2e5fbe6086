"""Folders of LLaDA's and Dream's layout: tiny random copies, against references written from their definitions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import refusion
from refusion.config import UserError
from refusion.models.checkpoint import load_model, read_config, save_folder
from test_checkpoint import edit, edit_tensors, words

VOCAB, WIDTH, LAYERS, HEADS, INNER = 20, 16, 2, 4, 24
LLADA: dict[str, Any] = {  # config.json of LLaDA-8B, with small numbers
    "activation_type": "silu", "alibi": False, "alibi_bias_max": 8.0, "architectures": ["LLaDAModelLM"],
    "attention_dropout": 0.0, "attention_layer_norm": False, "attention_layer_norm_with_affine": True,
    "bias_for_layer_norm": False, "block_group_size": 1, "block_type": "llama", "d_model": WIDTH,
    "embedding_dropout": 0.0, "embedding_size": VOCAB, "eos_token_id": 2, "flash_attention": False,
    "include_bias": False, "include_qkv_bias": False, "init_device": "meta", "input_emb_norm": False,
    "layer_norm_type": "rms", "layer_norm_with_affine": True, "mask_token_id": 3, "max_sequence_length": 64,
    "mlp_hidden_size": INNER, "mlp_ratio": 4, "model_type": "llada", "multi_query_attention": None, "n_heads": HEADS,
    "n_kv_heads": HEADS, "n_layers": LAYERS, "pad_token_id": 2, "rms_norm_eps": 1e-5, "rope": True,
    "rope_full_precision": True, "rope_theta": 500000.0, "scale_logits": False, "vocab_size": VOCAB,
    "weight_tying": False,
}  # fmt: skip
DREAM: dict[str, Any] = {  # of Dream-7B
    "architectures": ["DreamModel"], "attention_dropout": 0.0, "bos_token_id": 2, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": WIDTH, "intermediate_size": INNER, "mask_token_id": 3,
    "max_position_embeddings": 64, "max_window_layers": LAYERS, "model_type": "Dream", "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS, "num_key_value_heads": 2, "pad_token_id": 2, "rms_norm_eps": 1e-6,
    "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
    "use_cache": True, "use_sliding_window": False, "vocab_size": VOCAB,
}  # fmt: skip
LLADA_PARTS = {
    "attn_norm": (WIDTH,), "q_proj": (WIDTH, WIDTH), "k_proj": (WIDTH, WIDTH), "v_proj": (WIDTH, WIDTH),
    "attn_out": (WIDTH, WIDTH), "ff_norm": (WIDTH,), "ff_proj": (INNER, WIDTH), "up_proj": (INNER, WIDTH),
    "ff_out": (WIDTH, INNER),
}  # fmt: skip
DREAM_PARTS = {
    "input_layernorm.weight": (WIDTH,), "self_attn.q_proj.weight": (WIDTH, WIDTH), "self_attn.q_proj.bias": (WIDTH,),
    "self_attn.k_proj.weight": (WIDTH // 2, WIDTH), "self_attn.k_proj.bias": (WIDTH // 2,),
    "self_attn.v_proj.weight": (WIDTH // 2, WIDTH), "self_attn.v_proj.bias": (WIDTH // 2,),
    "self_attn.o_proj.weight": (WIDTH, WIDTH), "post_attention_layernorm.weight": (WIDTH,),
    "mlp.gate_proj.weight": (INNER, WIDTH), "mlp.up_proj.weight": (INNER, WIDTH), "mlp.down_proj.weight": (WIDTH, INNER),
}  # fmt: skip
LLADA_SHAPES = {
    "model.transformer.wte.weight": (VOCAB, WIDTH), "model.transformer.ln_f.weight": (WIDTH,),
    "model.transformer.ff_out.weight": (VOCAB, WIDTH),
} | {f"model.transformer.blocks.{i}.{part}.weight": shape for i in range(LAYERS) for part, shape in LLADA_PARTS.items()}
DREAM_SHAPES = {
    "model.embed_tokens.weight": (VOCAB, WIDTH), "model.norm.weight": (WIDTH,), "lm_head.weight": (VOCAB, WIDTH),
} | {f"model.layers.{i}.{part}": shape for i in range(LAYERS) for part, shape in DREAM_PARTS.items()}  # fmt: skip


def drawn(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) * 0.3 + (len(shape) == 1) for name, shape in shapes.items()}


def written(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    words().save(folder)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# --- the references: bidirectional, from token ids at positions 0, 1, ... to logits [T, V]


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x: Tensor, theta: float) -> Tensor:
    """Rotary embedding: the pair of entries i and i + E/2 of a head as a complex number. x: [T, heads, E]."""
    half = x.shape[-1] // 2
    angle = torch.arange(len(x))[:, None, None] * theta ** (-torch.arange(half) / half)
    pairs = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([pairs.real, pairs.imag], -1)


def attended(q: Tensor, k: Tensor, v: Tensor, theta: float) -> Tensor:
    """Every token sees every token; head h reads the keys of group h // (heads / groups)."""
    q, k, v = (x.unflatten(-1, (-1, WIDTH // HEADS)) for x in (q, k, v))
    q, k = turned(q, theta), turned(k, theta)
    each = q.shape[1] // k.shape[1]
    heads = [
        (q[:, h] @ k[:, h // each].T / (WIDTH // HEADS) ** 0.5).softmax(-1) @ v[:, h // each] for h in range(q.shape[1])
    ]
    return torch.cat(heads, -1)


def llada(tensors: dict[str, Tensor], tokens: list[int]) -> Tensor:
    def get(name: str) -> Tensor:
        return tensors[f"model.transformer.{name}.weight"]

    x = get("wte")[tokens]
    for i in range(LAYERS):
        h = normed(x, get(f"blocks.{i}.attn_norm"), 1e-5)
        q, k, v = (h @ get(f"blocks.{i}.{part}").T for part in ("q_proj", "k_proj", "v_proj"))
        x = x + attended(q, k, v, 500000.0) @ get(f"blocks.{i}.attn_out").T
        h = normed(x, get(f"blocks.{i}.ff_norm"), 1e-5)
        gate, up = h @ get(f"blocks.{i}.ff_proj").T, h @ get(f"blocks.{i}.up_proj").T
        x = x + (gate * gate.sigmoid() * up) @ get(f"blocks.{i}.ff_out").T
    return normed(x, get("ln_f"), 1e-5) @ get("ff_out").T


def dream(tensors: dict[str, Tensor], tokens: list[int]) -> Tensor:
    x = tensors["model.embed_tokens.weight"][tokens]
    for i in range(LAYERS):
        part = {name: tensors[f"model.layers.{i}.{name}"] for name in DREAM_PARTS}
        h = normed(x, part["input_layernorm.weight"], 1e-6)
        q, k, v = (h @ part[f"self_attn.{p}_proj.weight"].T + part[f"self_attn.{p}_proj.bias"] for p in "qkv")
        x = x + attended(q, k, v, 1000000.0) @ part["self_attn.o_proj.weight"].T
        h = normed(x, part["post_attention_layernorm.weight"], 1e-6)
        gate = h @ part["mlp.gate_proj.weight"].T
        x = x + (gate * gate.sigmoid() * (h @ part["mlp.up_proj.weight"].T)) @ part["mlp.down_proj.weight"].T
    return normed(x, tensors["model.norm.weight"], 1e-6) @ tensors["lm_head.weight"].T


CASES: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]], Callable[..., Tensor]]] = {
    "llada": (LLADA, LLADA_SHAPES, llada), "dream": (DREAM, DREAM_SHAPES, dream),
}  # fmt: skip
TOKENS = [1, 7, 9, 3, 3, 12, 3]


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_a_folder_of_this_layout_is_what_its_definition_says(name: str, tmp_path: Path) -> None:
    raw, shapes, reference = CASES[name]
    tensors = drawn(shapes)
    folder = written(tmp_path / name, raw, tensors)
    described, model = read_config(folder), load_model(folder, "cpu")
    mask = torch.ones(1, 1, len(TOKENS), len(TOKENS), dtype=torch.bool)
    ours = model.logits(model(torch.tensor([TOKENS]), torch.arange(len(TOKENS))[None], mask))[0]
    assert (ours - reference(tensors, TOKENS)).abs().max() < 1e-4
    assert (described.mask_token_id, described.eos_token_ids, described.defaults) == (3, (2,), {"method": name})
    assert described.architecture == raw["architectures"][0] and described.raw == raw
    assert described.parameters == sum(tensor.numel() for tensor in tensors.values())
    again = save_folder(tmp_path / "again", model, words(), defaults=described.defaults, dtype="float32")
    assert torch.equal(load_model(again, "cpu").lm_head.weight, model.lm_head.weight)
    assert read_config(again).defaults == described.defaults


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_it_writes_by_its_own_method(name: str, tmp_path: Path) -> None:
    """The first tokens are those of the reference's likeliest outputs, at the masks or (shifted) before them."""
    raw, shapes, reference = CASES[name]
    tensors = drawn(shapes)
    model = refusion.load(written(tmp_path / name, raw, tensors), device="cpu")
    config = model.settings().__class__(max_new_tokens=5, steps=1, ignore_eos=True)
    assert model.method == config.method == name
    found = model.generate([1, 7, 9], config).token_ids
    logits = reference(tensors, [1, 7, 9, *[3] * 5])
    logits[:, 3] = -torch.inf
    asked = logits[3:8] if name == "llada" else logits[2:7]
    assert found == asked.argmax(-1).tolist()


@torch.no_grad()
def test_tied_embeddings_and_a_mask_that_only_the_layout_names(tmp_path: Path) -> None:
    tensors = drawn(LLADA_SHAPES)
    del tensors["model.transformer.ff_out.weight"]
    folder = written(tmp_path / "m", {**LLADA, "weight_tying": True, "n_kv_heads": None, "embedding_size": None}, tensors)
    model = load_model(folder, "cpu")
    assert torch.equal(model.lm_head.weight, tensors["model.transformer.wte.weight"])
    (folder / "tokenizer_config.json").unlink()
    edit(folder / "config.json", mask_token_id=None)
    assert read_config(folder).mask_token_id is None  # 126336 is outside of this small vocabulary
    edit(folder / "config.json", vocab_size=126464)
    assert read_config(folder).mask_token_id == 126336


@pytest.mark.parametrize(("change", "message"), [
    ({"d_model": None}, "d_model is missing"), ({"block_type": "sequential"}, "block_type 'sequential' is not supported"),
    ({"include_qkv_bias": True}, "include_qkv_bias True is not supported"), ({"rope": False}, "rope False is not"),
    ({"n_heads": "four"}, "num_attention_heads must be"),
])  # fmt: skip
def test_what_is_wrong_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "m", LLADA, drawn(LLADA_SHAPES))
    edit(folder / "config.json", **change)
    with pytest.raises(UserError, match=f"config.json: {message}"):
        read_config(folder)


def test_tensors_are_named_as_they_are_stored(tmp_path: Path) -> None:
    folder = written(tmp_path / "m", LLADA, drawn(LLADA_SHAPES))
    name = "model.transformer.blocks.1.ff_proj.weight"
    edit_tensors(folder, **{name: torch.zeros(3)})
    with pytest.raises(UserError, match=rf"{name} has shape \[3\]"):
        load_model(folder, "cpu")
    edit_tensors(folder, **{name: None})
    with pytest.raises(UserError, match=f"{name} is missing"):
        load_model(folder, "cpu")
