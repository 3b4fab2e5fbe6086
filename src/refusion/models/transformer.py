"""The forward pass of Llama, Qwen2 and Qwen3, with Hugging Face's parameter names.

Contract: token ids, position ids and an explicit attention mask go in, hidden states come out. Nothing is
inferred from the position ids (docs/traps.md, 1): who sees whom is the caller's mask and nothing else.
This module knows no slots, no files and no tokenizer.

Legend: B batch, T new rows, S rows that can be seen (cache + new), H query heads, G key/value heads,
E head size, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refusion.models.rope import RopeScaling, frequencies


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a backbone. Field names are those of Hugging Face's config.json."""

    model_type: str  # "llama", "qwen2" or "qwen3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    initializer_range: float = 0.02
    rope_scaling: RopeScaling | None = None


class KeyValueStore(Protocol):
    """What attention needs of a cache: hand in new columns of one layer, get back all that can be seen."""

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Part:
    """Some of a forward's rows, which see nothing of the others: their mask, and their own cache."""

    rows: slice
    mask: Tensor | None  # bool [B or 1, 1, T, S] of these rows; None: plain causal
    store: KeyValueStore | None


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rope_tables(
    positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary embedding, each [B, 1, T, E], computed in float32.

    >>> cos, sin = rope_tables(torch.tensor([[0, 7]]), 4, 10000.0, torch.float32)
    >>> cos[0, 0, 0].tolist()          # position 0 is not rotated
    [1.0, 1.0, 1.0, 1.0]
    """
    angle = positions.float()[:, None, :, None] * frequencies(head_dim, theta, scaling, positions.device)  # [B, 1, T, E/2]
    angle = torch.cat((angle, angle), dim=-1)
    longer = 1.0 if scaling is None else scaling.attention_factor
    return (angle.cos() * longer).to(dtype), (angle.sin() * longer).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of each head (Hugging Face's layout). x: [B, H, T, E]."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


CHUNK = 128  # columns summed at once by `attend`
FEW_ROWS = 512  # up to here `attend` is used on a CPU; above, its scores take too much memory


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention written out, for few rows on a CPU. q: [B, H, T, E]; k, v: [B, G, S, E]; mask: bool [B or 1, 1, T, S].

    Two reasons not to use the fused kernel there: its backward pass is slow at 100-200 rows (1.3 times the whole
    step), and its sums depend on the number of columns. Here the columns are summed in chunks of fixed size, so
    masked ones at the end add exact zeros and change no bit of a row.
    """
    batch, heads, rows, size = q.shape
    groups, columns = k.shape[1], k.shape[2]
    q = q.reshape(batch, groups, -1, size)  # [B, G, H/G * T, E]: the heads of a group share keys, no copy of them
    scores = ((q * size**-0.5) @ k.transpose(-1, -2)).view(batch, groups, -1, rows, columns)
    scores = scores.masked_fill_(~mask[:, :, None], float("-inf"))
    weights = scores.softmax(-1).view(batch, groups, -1, columns)  # in bfloat16 too it is summed in float32
    out: Tensor = weights[..., :CHUNK] @ v[..., :CHUNK, :]
    for start in range(CHUNK, columns, CHUNK):
        out = out + weights[..., start : start + CHUNK] @ v[..., start : start + CHUNK, :]
    return out.view(batch, heads, rows, size)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        self.repeats = heads // groups
        self.q_proj = nn.Linear(config.hidden_size, heads * self.head_dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, groups * self.head_dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, groups * self.head_dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=config.o_bias)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, parts: Sequence[Part]) -> Tensor:
        batch, rows, _ = x.shape
        q = self.q_proj(x).view(batch, rows, -1, self.head_dim)  # [B, T, H, E]
        k = self.k_proj(x).view(batch, rows, -1, self.head_dim)  # [B, T, G, E]
        v = self.v_proj(x).view(batch, rows, -1, self.head_dim).transpose(1, 2)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q = rotate(q.transpose(1, 2), cos, sin)
        k = rotate(k.transpose(1, 2), cos, sin)
        outs = [self._attend(q[:, :, p.rows], k[:, :, p.rows], v[:, :, p.rows], p.mask, p.store) for p in parts]
        out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, rows, -1))
        return projected

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, store: KeyValueStore | None) -> Tensor:
        """One part. q: [B, H, T, E]; k, v: [B, G, T, E]."""
        rows = q.shape[2]
        if store is not None:
            k, v = store.update(self.layer, k, v)  # [B, G, S, E]
        if mask is not None and q.device.type == "cpu" and rows <= FEW_ROWS:
            return attend(q, k, v, mask)
        if self.repeats > 1:
            k = k.repeat_interleave(self.repeats, dim=1)
            v = v.repeat_interleave(self.repeats, dim=1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, parts: Sequence[Part]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, parts)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Body(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        # the weights are loaded or drawn by `initialize`; drawing them here would import a compiler when they are on meta
        weight = torch.empty(config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, _weight=weight)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Transformer(nn.Module):
    """A causal language model whose `state_dict` has Hugging Face's names (`model.layers.0...`, `lm_head.weight`)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.checkpointing = False  # training: keep the inputs of layers only, and compute the layers again for their gradients

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> Transformer:
        """Draw fresh weights: normal with `initializer_range`, output projections scaled by 1/sqrt(2 * layers)."""
        depth_scale = (2 * self.config.num_hidden_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            std = self.config.initializer_range
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std *= depth_scale
            parameter.normal_(0.0, std, generator=generator)
        return self

    def forward(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None = None, store: KeyValueStore | None = None
    ) -> Tensor:
        """Hidden states before the last norm, [B, T, D].

        tokens, positions: int64 [B, T]. mask: bool [B or 1, 1, T, S], True where row t may look at column s; None
        means plain causal over the T rows (only without `store`). store: see `KeyValueStore`.
        """
        assert mask is not None or store is None, "a cache needs an explicit mask (docs/traps.md, 4)"
        return self.together(tokens, positions, [Part(slice(None), mask, store)])

    def together(self, tokens: Tensor, positions: Tensor, parts: Sequence[Part]) -> Tensor:
        """As `forward`, for parts side by side, which cover all T rows in order: everything but attention is computed at
        once."""
        x: Tensor = self.model.embed_tokens(tokens)
        config = self.config
        cos, sin = rope_tables(positions, config.head_dim, config.rope_theta, x.dtype, config.rope_scaling)
        for layer in self.model.layers:
            x = self._again(layer, x, cos, sin, parts) if self.checkpointing else layer(x, cos, sin, parts)
        return x

    @staticmethod
    def _again(layer: nn.Module, *given: Any) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        out: Tensor = checkpoint(layer, *given, use_reentrant=False) if torch.is_grad_enabled() else layer(*given)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Last norm and output head: [..., D] -> [..., V], in the model's dtype."""
        out: Tensor = self.lm_head(self.model.norm(hidden))
        return out
