"""Products with one matrix for few rows, each by the kernel that its table or rule names.

A layer's object: it owns the counters of its split-K kernels, so layers of different engines never share any.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pellucid.kernels.small_matmul import Scales, small_matmul
from pellucid.kernels.tiles import Choices, SplitK, by_rows, choose


class SmallProducts:
    """y = x W^T for a few rows of x.  Knows the shape of the weight [N, K], holds no copy of it."""

    def __init__(self, weight: Tensor, choices: Choices) -> None:
        self.tiles = by_rows(choices)
        blocks = [-(-len(weight) // tile.block_n) for tile in self.tiles if isinstance(tile, SplitK)]
        self.arrivals = torch.zeros(max(blocks, default=0), dtype=torch.int32, device=weight.device)

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        bias: Tensor | None = None,
        scales: Scales | None = None,
        act: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor | None:
        """x [M, K] -> [M, N], or None where the library's product is no slower.

        act: gate the product, which makes it [M, N / 2].  dtype: of y; None is x's.
        """
        tile = self.tiles[len(x)] if len(x) < len(self.tiles) else None
        if tile is None or (act and tile.block_n % 2):
            return None
        width = len(weight) // 2 if act else len(weight)
        out = torch.empty((len(x), width), dtype=dtype or x.dtype, device=x.device)
        return small_matmul(x, weight, out, tile, bias=bias, scales=scales, act=act, arrivals=self.arrivals)


def choices_for(weight: Tensor) -> Choices:
    """What is known to be fast for this weight [N, K] on its GPU."""
    num_out, num_in = weight.shape
    name = torch.cuda.get_device_name(weight.device)
    return choose(num_out, num_in, bits=8 * weight.itemsize, device_name=name)
