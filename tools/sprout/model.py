"""A tiny Qwen3 in plain torch, for training and for checking exports.  Not the engine's model.

Module names are Qwen3's own, so a state dict is a Hugging Face checkpoint.  Weights may be float32 masters;
all arithmetic runs in the dtype that `forward` is asked for, as it will when the bfloat16 export is served.
Shapes: T tokens, N query heads, K key-value heads, H head dim, D model dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

# (layer, queries [..., N, H], keys [..., K, H], values [..., K, H]) -> [..., N, H]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a Qwen3 model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    head_dim: int = 64
    vocab: int = 4096
    context: int = 4096
    rope_theta: float = 100_000.0
    rms_eps: float = 1e-6


SPROUT = Shape(hidden=256, layers=8, heads=4, kv_heads=2, intermediate=768)
SPROUT_DRAFT = Shape(hidden=128, layers=2, heads=2, kv_heads=2, intermediate=384)


def linear(x: Tensor, *weights: Tensor) -> Tensor:
    """Multiply by one or several weights in one product, in the dtype of x."""
    merged = weights[0] if len(weights) == 1 else torch.cat(weights)
    return F.linear(x, merged.to(x.dtype))


class Weight(nn.Module):
    """One bare weight under the name `<module>.weight`."""

    def __init__(self, *size: int, std: float | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size) if std is None else torch.randn(size) * std)


class RMSNorm(Weight):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, std=None)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * wide.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with normed queries and keys; `attend` does the mixing over tokens."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.shape, self.layer = shape, layer
        std = shape.hidden**-0.5
        self.q_proj = Weight(shape.heads * shape.head_dim, shape.hidden, std=std)
        self.k_proj = Weight(shape.kv_heads * shape.head_dim, shape.hidden, std=std)
        self.v_proj = Weight(shape.kv_heads * shape.head_dim, shape.hidden, std=std)
        self.o_proj = Weight(shape.hidden, shape.heads * shape.head_dim, std=0.0)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_eps)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        heads, kv_heads = self.shape.heads, self.shape.kv_heads
        qkv = linear(x, self.q_proj.weight, self.k_proj.weight, self.v_proj.weight)
        qkv = qkv.unflatten(-1, (heads + 2 * kv_heads, self.shape.head_dim))
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=-2)
        q, k = rotate(self.q_norm(q), rotary), rotate(self.k_norm(k), rotary)
        return linear(attend(self.layer, q, k, v).flatten(-2), self.o_proj.weight)


class MLP(nn.Module):
    """The gated (SwiGLU) feed-forward block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        std = shape.hidden**-0.5
        self.gate_proj = Weight(shape.intermediate, shape.hidden, std=std)
        self.up_proj = Weight(shape.intermediate, shape.hidden, std=std)
        self.down_proj = Weight(shape.hidden, shape.intermediate, std=0.0)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = linear(x, self.gate_proj.weight, self.up_proj.weight).chunk(2, dim=-1)
        return linear(F.silu(gate) * up, self.down_proj.weight)


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.rms_eps)
        self.self_attn = Attention(shape, layer)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.rms_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    """Embedding, layers and final norm: what Hugging Face calls `model.`"""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = Weight(shape.vocab, shape.hidden, std=0.04)
        self.layers = nn.ModuleList(Layer(shape, layer) for layer in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.rms_eps)


class Qwen3(nn.Module):
    """The causal language model, with the embedding tied to the head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Backbone(shape)
        cos, sin = rotary_table(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend, dtype: torch.dtype) -> Tensor:
        """Return the normed hidden states [..., D] of `ids` [...] at `positions` [...]."""
        x = F.embedding(ids, self.model.embed_tokens.weight).to(dtype)
        rotary = self.cos[positions].to(dtype).unsqueeze(-2), self.sin[positions].to(dtype).unsqueeze(-2)
        for layer in self.model.layers:
            x = layer(x, rotary, attend)
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] of hidden states [..., D], in their dtype."""
        return linear(hidden, self.model.embed_tokens.weight)


def rotary_table(shape: Shape) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [context, H] of the rotary embedding (RoFormer, arXiv:2104.09864)."""
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(shape.context, dtype=torch.float32), shape.rope_theta**-half)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each half-split pair of x [..., heads, H] by its position's angle."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def packed_attention(cu_seqlens: Tensor, longest: int) -> Attend:
    """Attend causally inside each of many documents packed end to end.

    cu_seqlens: int32 [documents + 1], where each begins, and the end.  longest: tokens, an upper bound.
    """

    def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[-2] // k.shape[-2]
        k, v = k.repeat_interleave(groups, dim=-2), v.repeat_interleave(groups, dim=-2)
        if q.is_cuda:
            # A window of (all, none) is causal attention.
            return varlen_attn(
                q, k, v.contiguous(), cu_seqlens, cu_seqlens, longest, longest, window_size=(-1, 0)
            )
        return torch.cat(
            [
                F.scaled_dot_product_attention(
                    *(part[start:stop].transpose(0, 1) for part in (q, k, v)), is_causal=True
                ).transpose(0, 1)
                for start, stop in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)
            ]
        )

    return attend
