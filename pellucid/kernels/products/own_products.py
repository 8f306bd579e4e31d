"""Products with one matrix by kernels of our own, each by the one that its table or rule names.

A layer's object: it owns the counters of its split-K kernels, so layers of different engines never share any.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pellucid.kernels.attention.hopper_prefill import is_hopper, num_multiprocessors
from pellucid.kernels.products.bytes_gemv import LANES, bytes_gemv
from pellucid.kernels.products.hopper_matmul import hopper_matmul, hopper_multiplies, num_arrivals
from pellucid.kernels.products.persistent_matmul import persistent_matmul
from pellucid.kernels.products.round_rows import BY_ROWS, Rounded, Rounding, round_rows
from pellucid.kernels.products.small_matmul import Scales, small_matmul
from pellucid.kernels.products.tiles import (
    ByRows,
    Choices,
    Gemv,
    Persistent,
    SplitK,
    Tile,
    Wgmma,
    choose,
    fitted,
)


class OwnProducts:
    """y = x W^T where ours are faster.  Knows the shape of the weight [N, K], holds no copy of it."""

    def __init__(self, weight: Tensor, choices: Choices) -> None:
        self.tile = ByRows(choices)
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
        if tile is None or not takes(tile, x, weight, act, is_plain=bias is None and scales is None):
            return None
        width = len(weight) // 2 if act else len(weight)
        out = torch.empty((len(x), width), dtype=dtype or x.dtype, device=x.device)
        if isinstance(tile, Persistent):
            assert act, "it gates"
            return persistent_matmul(x, weight, out, tile, act=act)
        more = {"bias": bias, "scales": scales, "act": act, "arrivals": self.arrivals}
        if isinstance(tile, Wgmma):
            return hopper_matmul(x, weight, out, tile, **more)
        return small_matmul(x, weight, out, tile, **more)


def takes(tile: Tile, x: Tensor, weight: Tensor, act: str | None, *, is_plain: bool) -> bool:
    """Whether this tile's kernel can multiply x [M, K] with this weight [N, K].

    is_plain: there are neither biases nor scales.
    """
    if isinstance(tile, Persistent) and not (act and is_plain):
        return False
    if isinstance(tile, (Wgmma, Persistent)):
        return hopper_multiplies(x, weight, tile, act)
    return act is None or tile.block_n % 2 == 0


def counters_of(tile: Tile | None, num_out: int, num_rows: int) -> int:
    """Counters that a tile needs for a product of up to so many rows."""
    if isinstance(tile, Wgmma):
        return num_arrivals(num_out, num_rows, tile)
    return -(-num_out // tile.block_n) if isinstance(tile, SplitK) else 0


class OwnByteProducts:
    """The same of bytes, FP8 or INT8, where rows of x and outputs have scales.  rounding: of x."""

    def __init__(self, weight: Tensor, choices: Choices, rounding: Rounding = BY_ROWS) -> None:
        self.products = OwnProducts(weight, choices)
        self.rounding = rounding

    def __call__(
        self,
        x: Tensor | Rounded,
        weight: Tensor,
        weight_scale: Tensor,
        *,
        bias: Tensor | None = None,
    ) -> Tensor | None:
        """x [M, K], rounded or not -> [M, N] in its dtype, or None where the library is no slower."""
        tile = self.products.tile(len(x.values if isinstance(x, Rounded) else x))
        if tile is None or (isinstance(tile, Gemv) and weight.shape[1] % LANES):
            return None
        group = self.rounding.group
        if isinstance(tile, Gemv) and group is None:
            return bytes_gemv(x, weight, weight_scale, tile, self.rounding, bias=bias)
        rounded = x if isinstance(x, Rounded) else round_rows(x, self.rounding)
        if isinstance(tile, Gemv):
            return bytes_gemv(rounded, weight, weight_scale, tile, self.rounding, bias=bias)
        scales = Scales(weight_scale, rounded.scales, group)
        return self.products(rounded.values, weight, bias=bias, scales=scales, dtype=rounded.dtype)


def choices_for(weight: Tensor, group: int | None = None) -> Choices:
    """What is known to be fast for this weight [N, K] on its GPU.  group: inputs that share a scale."""
    num_out, num_in = weight.shape
    name, room = torch.cuda.get_device_name(weight.device), num_multiprocessors(weight.device)
    hopper = room if is_hopper(weight.device) else 0
    how = {"bits": 8 * weight.itemsize, "group": group, "integers": weight.dtype == torch.int8}
    chosen = choose(num_out, num_in, **how, device_name=name, hopper=hopper)
    return {rows: fitted(tile, rows, num_out, room) for rows, tile in chosen.items()}
