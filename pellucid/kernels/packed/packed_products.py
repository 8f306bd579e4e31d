"""Products with one packed matrix: few rows in a kernel that unpacks codes in registers, many in two passes.

A layer's object: it owns the counters of its kernels, so layers of different engines never share any.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from pellucid.kernels.attention.hopper_prefill import is_hopper, num_multiprocessors
from pellucid.kernels.packed.packed_gemv import GemvTile, gemv_tile, packed_gemv
from pellucid.kernels.packed.packed_hopper import most_rows, packed_hopper, takes, tile_for
from pellucid.kernels.packed.packed_matmul import MAX_ROWS, TILE, dequantize, packed_matmul
from pellucid.kernels.packed.packed_weight import GroupCodes, PackedWeight, by_turns
from pellucid.kernels.products.hopper_matmul import num_arrivals
from pellucid.kernels.products.own_products import OwnProducts, choices_for
from pellucid.kernels.products.tiles import Wgmma

SCRATCH_BYTES = 256 << 20  # of W's numbers at a time


class PackedProducts:
    """y = x W^T + bias.  order: which input is where in W, if they are not in order."""

    def __init__(self, weight: PackedWeight, order: Tensor | None = None) -> None:
        self.weight, self.order = weight, order
        self.places: Tensor | None = None  # of outputs among those that lie by turns
        if weight.gated:
            self.places = by_turns(weight.num_out).argsort().to(weight.device)
        self.tiles = hopper_tiles(weight) if is_hopper(weight.device) else {}
        splits = {rows: tile for rows, tile in self.tiles.items() if isinstance(tile, Wgmma)}
        counters = [num_arrivals(weight.num_out, rows, tile) for rows, tile in splits.items()]
        self.of_prompts: OwnProducts | None = None  # of gates and what they open, made numbers
        if weight.gated:
            shape = weight.scale.new_empty(1, 1).expand(weight.num_out, weight.num_in)
            self.of_prompts = OwnProducts(shape, choices_for(shape))
        num = max(weight.words.shape[0], *counters, 0)
        self.arrivals = torch.zeros(num, dtype=torch.int32, device=weight.device)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        x = x if self.order is None else x[:, self.order]
        if not len(x):
            return x.new_empty(0, self.weight.num_out)
        if (tile := self._tile(x)) is not None:
            if self.places is None:
                return self._multiply(x, tile, bias=bias)
            y = self._multiply(x, tile)[:, self.places]
            return y if bias is None else y.add_(bias)
        if len(x) <= MAX_ROWS and x.stride(1) == 1 and not self.weight.gated:
            return packed_matmul(x, self.weight, bias=bias, arrivals=self.arrivals)
        return self._of_many(x, bias)

    def gated(self, x: Tensor, act: str, bias: Tensor | None = None) -> Tensor | None:
        """act(gate) * up of a gated weight; None: a product and a gate apart are no slower."""
        if not self.weight.gated or not len(x):
            return None
        x = x if self.order is None else x[:, self.order]
        if (tile := self._tile(x)) is not None:
            return self._multiply(x, tile, bias=bias, act=act)
        assert self.of_prompts is not None, "it is gated"
        if bias is not None or self.of_prompts.tile(len(x)) is None:
            return None
        return self.of_prompts(x, dequantize(self.weight), act=act)

    def _multiply(
        self, x: Tensor, tile: Wgmma | GemvTile, bias: Tensor | None = None, act: str | None = None
    ) -> Tensor:
        if isinstance(tile, GemvTile):
            return packed_gemv(x, self.weight, tile, bias=bias, act=act)
        return packed_hopper(x, self.weight, tile, bias=bias, act=act, arrivals=self.arrivals)

    def _tile(self, x: Tensor) -> Wgmma | GemvTile | None:
        tile = next((tile for rows, tile in self.tiles.items() if len(x) <= rows), None)
        return tile if tile is not None and takes(x) else None

    def _of_many(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """W's numbers, as many at a time as there is room for, and the library's product."""
        num_out, num_in = self.weight.num_out, self.weight.num_in
        tile = int(TILE.value)
        step = max(1, SCRATCH_BYTES // (num_in * x.itemsize * tile)) * tile
        if num_out <= step or self.weight.gated:
            return F.linear(x, dequantize(self.weight), bias)
        y = torch.empty(len(x), num_out, dtype=x.dtype, device=x.device)
        for first in range(0, num_out, step):
            last = min(first + step, num_out)
            y[:, first:last] = F.linear(x, dequantize(self.weight, first, last))
        return y if bias is None else y.add_(bias)


def hopper_tiles(weight: PackedWeight) -> dict[int, Wgmma | GemvTile]:
    """By the most rows that each is for, rising; none if the kernels do not take such codes."""
    room = num_multiprocessors(weight.device)
    shape = weight.num_out, weight.num_in
    tiles: dict[int, Wgmma | GemvTile] = {}
    if rising := most_rows(weight):
        tiles[1] = gemv_tile(weight.num_in, weight.numbers, weight.bits)
    return tiles | {rows: tile_for(rows, *shape, room, weight.bits) for rows in rising}


def gates(part: GroupCodes, dtype: torch.dtype) -> bool:
    """Whether such codes, of gates and of as many that they open, are best kept to be gated in one pass."""
    is_whole = len(part.q) % 32 == 0 and part.q.shape[1] % 8 == 0
    return is_hopper(part.q.device) and dtype.itemsize == 2 and is_whole
