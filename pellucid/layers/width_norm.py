"""RMSNorm of queries and of keys over all their heads together (OLMo 2), before heads part."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pellucid.dist.collectives import Group
from pellucid.layers.norm import RMSNorm


class WidthNorm(nn.Module):
    """Takes a packed projection and gives one.  Ranks have some of the heads, and sum up their squares."""

    def __init__(self, q: RMSNorm, k: RMSNorm, group: Group, *, kv_ranks: int) -> None:
        """kv_ranks: those that hold different keys; the others have copies."""
        super().__init__()
        self.q, self.k, self.group = q, k, group
        self.q_size, self.k_size = q.weight.shape[0], k.weight.shape[0]
        self.widths = self.q_size * group.size, self.k_size * kv_ranks
        self.copies = group.size // kv_ranks

    def forward(self, qkv: Tensor) -> Tensor:
        """[T, (N + 2K) * H] -> the same shape, values as they are."""
        q, k, v = qkv.split((self.q_size, self.k_size, self.k_size), dim=1)
        if self.group.size == 1:
            return torch.cat((self.q(q)[0], self.k(k)[0], v), dim=1)
        squares = torch.stack((squared(q), squared(k)), dim=-1)
        q_sum, k_sum = self.group.gather(squares).sum(0).unbind(-1)  # in the order of ranks
        q = scaled(q, q_sum / self.widths[0], self.q)
        k = scaled(k, k_sum / self.copies / self.widths[1], self.k)
        return torch.cat((q, k, v), dim=1)


def squared(x: Tensor) -> Tensor:
    """The sum of each row's squares, [T] float32."""
    return x.float().square().sum(-1)


def scaled(x: Tensor, mean_square: Tensor, norm: RMSNorm) -> Tensor:
    """x [T, D] over its rms, times the weight, rounded as the norm rounds."""
    normalized = x.float() * torch.rsqrt(mean_square + norm.spec.eps)[:, None]
    if norm.weight.dtype == x.dtype:
        return normalized.to(x.dtype) * norm.weight
    return (normalized * norm.weight).to(x.dtype)
