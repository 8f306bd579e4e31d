"""Products with one matrix for few rows, each by the kernel that its table or rule names.

A layer's object: it owns the counters of its split-K kernels, so layers of different engines never share any.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pellucid.kernels.fp8_gemv import fp8_gemv
from pellucid.kernels.hopper_matmul import hopper_matmul, hopper_multiplies, num_arrivals
from pellucid.kernels.quantize_fp8 import Rounded, round_rows
from pellucid.kernels.small_matmul import Scales, small_matmul
from pellucid.kernels.tiles import Choices, Gemv, SplitK, Tile, Wgmma, by_rows, choose


class SmallProducts:
    """y = x W^T for a few rows of x.  Knows the shape of the weight [N, K], holds no copy of it."""

    def __init__(self, weight: Tensor, choices: Choices) -> None:
        self.tiles = by_rows(choices)
        counters = [counters_of(tile, len(weight), rows) for rows, tile in choices.items()]
        self.arrivals = torch.zeros(max(counters, default=0), dtype=torch.int32, device=weight.device)

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
        tile = self.tile(len(x))
        if tile is None or (act and tile.block_n % 2):
            return None
        if isinstance(tile, Wgmma) and not hopper_multiplies(x, weight, tile, act):
            return None
        width = len(weight) // 2 if act else len(weight)
        out = torch.empty((len(x), width), dtype=dtype or x.dtype, device=x.device)
        more = {"bias": bias, "scales": scales, "act": act, "arrivals": self.arrivals}
        if isinstance(tile, Wgmma):
            return hopper_matmul(x, weight, out, tile, **more)
        return small_matmul(x, weight, out, tile, **more)

    def tile(self, num_rows: int) -> Tile | None:
        """What serves so many rows; None: the library."""
        return self.tiles[num_rows] if num_rows < len(self.tiles) else None


def counters_of(tile: Tile | None, num_out: int, num_rows: int) -> int:
    """Counters that a tile needs for a product of up to so many rows."""
    if isinstance(tile, Wgmma):
        return num_arrivals(num_out, num_rows, tile)
    return -(-num_out // tile.block_n) if isinstance(tile, SplitK) else 0


class SmallFp8Products:
    """The same in FP8, where a row of x and an output have a scale each."""

    def __init__(self, weight: Tensor, choices: Choices) -> None:
        self.products = SmallProducts(weight, choices)

    def __call__(
        self, x: Tensor | Rounded, weight: Tensor, weight_scale: Tensor, *, bias: Tensor | None = None
    ) -> Tensor | None:
        """x [M, K], rounded or not -> [M, N] in its dtype, or None where the library is no slower."""
        tile = self.products.tile(len(x.values if isinstance(x, Rounded) else x))
        if tile is None:
            return None
        if isinstance(tile, Gemv):
            return fp8_gemv(x, weight, weight_scale, tile, bias=bias)
        rounded = x if isinstance(x, Rounded) else round_rows(x)
        scales = Scales(weight_scale.view(-1), rounded.scales.view(-1))
        return self.products(rounded.values, weight, bias=bias, scales=scales, dtype=rounded.dtype)


def choices_for(weight: Tensor) -> Choices:
    """What is known to be fast for this weight [N, K] on its GPU."""
    num_out, num_in = weight.shape
    name = torch.cuda.get_device_name(weight.device)
    return choose(num_out, num_in, bits=8 * weight.itemsize, device_name=name)
