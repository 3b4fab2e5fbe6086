"""The forward pass against transformers', and against itself: whole rows == slot by slot through a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from refusion.models.transformer import ModelConfig, Transformer, rope_tables

SHAPE: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {  # name: (transformers' class, our fields)
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biased": ("Llama", {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "head_dim": 16}),
    "llama-theta": ("Llama", {"rope_theta": 100000.0, "rms_norm_eps": 1e-3}),
    "qwen2": ("Qwen2", {"qkv_bias": True, "tie_word_embeddings": False}),
    "qwen3": ("Qwen3", {"qk_norm": True, "tie_word_embeddings": False, "head_dim": 16}),
    "qwen3-tied": ("Qwen3", {"qk_norm": True, "tie_word_embeddings": True, "rope_theta": 1e6}),
    "qwen3-biased": ("Qwen3", {"qk_norm": True, "qkv_bias": True, "o_bias": True, "num_key_value_heads": 1}),
}


def shape(kind: str) -> ModelConfig:
    return ModelConfig(model_type=kind.split("-")[0], **{**SHAPE, **KINDS[kind][1]})


def fresh(config: ModelConfig, seed: int = 0) -> Transformer:
    """Every weight random, norms and biases too, and large enough that a mistake shows."""
    model, generator = Transformer(config).eval(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
    return model


def theirs(ours: Transformer, kind: str) -> Any:
    """The same weights in transformers' own class."""
    transformers = pytest.importorskip("transformers")
    config, (family, _) = ours.config, KINDS[kind]
    fields = {name: getattr(config, name) for name in (*SHAPE, "rms_norm_eps", "tie_word_embeddings")}
    if family == "Qwen2":
        del fields["head_dim"]
    else:
        fields["attention_bias"] = config.qkv_bias
    if family == "Llama":
        fields["mlp_bias"] = config.mlp_bias
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    full = getattr(transformers, f"{family}Config")(**fields, rope_parameters=rope, attn_implementation="eager")
    model = getattr(transformers, f"{family}ForCausalLM")(full).eval()
    model.load_state_dict(ours.state_dict(), strict=True)
    return model


def reordered() -> tuple[Tensor, Tensor]:
    """METHOD 2's worked example, longer: prompt of 5, slots of 4 written in the order 2, 0, 1."""
    generator = torch.Generator().manual_seed(1)
    order = [*range(5), *range(13, 17), *range(5, 9), *range(9, 13)]
    return torch.randint(61, (1, 17), generator=generator), torch.tensor([order])


def causal(rows: int) -> Tensor:
    return torch.ones(rows, rows, dtype=torch.bool).tril()[None, None]


def additive(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_equal_to_transformers(kind: str) -> None:
    ours = fresh(shape(kind))
    reference = theirs(ours, kind)
    tokens, positions = reordered()
    plain = torch.arange(17)[None]
    for place in (plain, positions, plain + 400):
        want = reference(input_ids=tokens, position_ids=place, attention_mask=additive(causal(17))).logits
        for mask in (None, causal(17)):
            got = ours.logits(ours(tokens, place, mask))
            assert (got - want).abs().max() < 1e-4
    assert want.abs().max() > 0.5  # the comparison is about something
    assert (ours.logits(ours(tokens, positions)) - ours.logits(ours(tokens, plain))).abs().max() > 1e-2


@torch.no_grad()
def test_reordered_positions_are_not_packed_documents() -> None:
    """docs/traps.md, 1: without a mask, transformers guesses document borders from the positions; we never do."""
    ours = fresh(shape("qwen3"))
    reference = theirs(ours, "qwen3")
    tokens, positions = reordered()
    got = ours.logits(ours(tokens, positions))
    guessed = reference(input_ids=tokens, position_ids=positions, use_cache=False).logits
    assert (got - guessed).abs().max() > 1e-2
    changed = tokens.clone()
    changed[0, 0] = (changed[0, 0] + 1) % 61  # the first prompt token reaches the last slot
    assert (ours.logits(ours(changed, positions)) - got)[0, -1].abs().max() > 1e-4


class Columns:
    """The smallest cache: all keys and values so far."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self.seen:
            old_k, old_v = self.seen[layer]
            k, v = torch.cat((old_k, k), dim=2), torch.cat((old_v, v), dim=2)
        self.seen[layer] = k, v
        return k, v


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@torch.no_grad()
def test_whole_row_equals_slot_by_slot(kind: str) -> None:
    model = fresh(shape(kind))
    tokens, positions = reordered()
    whole = model(tokens, positions)
    store, start = Columns(), 0
    for rows in (5, 4, 4, 4):
        piece = slice(start, start + rows)
        mask = causal(17)[:, :, piece, : start + rows]
        assert (model(tokens[:, piece], positions[:, piece], mask, store) - whole[:, piece]).abs().max() < 1e-4
        start += rows
    with pytest.raises(AssertionError, match="explicit mask"):
        model(tokens[:, :1], positions[:, :1], None, store)


@torch.no_grad()
def test_mask_decides_who_sees_whom() -> None:
    """Two segments after a prompt: neither changes when the other one does."""
    model = fresh(shape("qwen3"))
    tokens, positions = reordered()
    segment = torch.tensor([0] * 5 + [1] * 6 + [2] * 6)
    mask = causal(17) & ((segment[None, :] == 0) | (segment[None, :] == segment[:, None]))
    before = model(tokens, positions, mask)
    changed = tokens.clone()
    changed[0, 5:11] = (changed[0, 5:11] + 1) % 61
    after = model(changed, positions, mask)
    assert torch.equal(before[0, :5], after[0, :5]) and (before[0, 11:] - after[0, 11:]).abs().max() < 1e-5
    assert (before[0, 5:11] - after[0, 5:11]).abs().min(-1).values.max() > 0


@torch.no_grad()
def test_batch_rows_do_not_touch() -> None:
    model = fresh(shape("llama"))
    tokens, positions = reordered()
    other = (tokens + 7) % 61
    both = model(torch.cat((tokens, other)), torch.cat((positions, positions + 3)))
    assert (both[:1] - model(tokens, positions)).abs().max() < 1e-5
    assert (both[1:] - model(other, positions + 3)).abs().max() < 1e-5


def test_training_attention_equals_the_fused_one() -> None:
    model = fresh(shape("qwen3"))
    tokens, positions = reordered()
    want = model(tokens, positions, causal(17))
    got = model.train()(tokens, positions, causal(17))
    assert (got - want).abs().max() < 1e-4


def test_rope_is_exact_far_out() -> None:
    """Float32 angles at position 30,000 as transformers rounds them: 1 / theta ** x, not theta ** -x."""
    rope = pytest.importorskip("transformers.models.qwen3.modeling_qwen3").Qwen3RotaryEmbedding
    config = pytest.importorskip("transformers").Qwen3Config(
        head_dim=64, rope_parameters={"rope_type": "default", "rope_theta": 1e6}
    )
    positions = torch.tensor([[0, 1, 30_000, 131_071]])
    cos, sin = rope_tables(positions, 64, 1e6, torch.float32)
    want_cos, want_sin = rope(config)(torch.zeros(1), positions)
    assert torch.equal(cos[:, 0], want_cos) and torch.equal(sin[:, 0], want_sin)


def test_initialize_is_seeded_and_ties_the_head() -> None:
    config = shape("qwen3-tied")
    one = Transformer(config).initialize(torch.Generator().manual_seed(5))
    two = Transformer(config).initialize(torch.Generator().manual_seed(5))
    assert one.lm_head.weight is one.model.embed_tokens.weight
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert bool((one.model.norm.weight == 1).all())


@torch.no_grad()
def test_bfloat16_stays_near() -> None:
    model = fresh(shape("qwen3"))
    tokens, positions = reordered()
    want = model.logits(model(tokens, positions)).softmax(-1)
    got = model.bfloat16().logits(model(tokens, positions))
    assert got.dtype == torch.bfloat16
    assert (got.float().softmax(-1) - want).abs().max() < 0.1
