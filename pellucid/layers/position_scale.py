"""Queries that grow with their position, for layers that know of positions by nothing else (Llama 4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class PositionScale:
    """The query at position p is times 1 + weight * ln(1 + floor((p + 1) / interval)) (Nakanishi 2025)."""

    weight: float
    interval: int  # tokens

    def table(self, num: int) -> Tensor:
        """Of positions below `num`, float32."""
        steps = torch.div(torch.arange(1, num + 1), self.interval, rounding_mode="floor")
        return 1 + self.weight * steps.float().log1p()


class ScaledQueries(nn.Module):
    """Takes a packed projection and gives one."""

    def __init__(self, q_size: int, table: Tensor) -> None:
        """q_size: features of all queries here.  table: of each position, float32."""
        super().__init__()
        self.q_size, self.table = q_size, table

    def forward(self, qkv: Tensor, positions: Tensor) -> Tensor:
        """[T, (N + 2K) * H], in place; positions [T]."""
        qkv[:, : self.q_size].mul_(self.table[positions][:, None])
        return qkv
