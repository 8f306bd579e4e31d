"""Two of every four inputs stored: Marlin's tiles for sparse tensor cores, and bitmasks.

Codes hold the zeros, too: there is no kernel here that would skip them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from pellucid.quant.codes import PLAIN, S8, Codes, Scales
from pellucid.quant.layouts.base import (
    FLOATS,
    LayerFormat,
    Layout,
    MatrixShape,
    Raw,
    TensorSpec,
    checked,
    divided,
)
from pellucid.quant.layouts.bits import unpacked
from pellucid.quant.layouts.gptq import signed
from pellucid.quant.layouts.scaled import SCALED

TILE = 16
PERMUTED_SCALES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Marlin24(Layout):
    """weight [K / 32, 16 N bits / 32], meta [K / 32, 2 N], scale [G, N], of 4 or 8 bits without zeros.

    The kept half of the inputs, [K / 2, N], lies in tiles of 16 x 16, permuted by threads; meta has for
    each four inputs the places of the two kept ones, reordered too.  scale_inputs: with fewer inputs a group
    than K / scale_inputs, scales are permuted.
    """

    weight: str
    meta: str
    scale: str
    scale_inputs: int

    def params(self, format: LayerFormat, shape: MatrixShape) -> dict[str, TensorSpec]:
        tiles = divided(shape.inn, 2 * TILE, "inputs")
        divided(shape.out, 64, "outputs")
        _, groups = format.group.counts(shape.out, shape.inn)
        words = TILE * shape.out * format.code.bits // 32
        return {
            self.weight: TensorSpec(shape=(tiles, words), dtypes=(torch.int32,)),
            self.meta: TensorSpec(shape=(tiles, 2 * shape.out), dtypes=(torch.int16,)),
            self.scale: TensorSpec(shape=(groups, shape.out), dtypes=FLOATS),
        }

    def decode(self, raw: Raw, format: LayerFormat, shape: MatrixShape) -> Codes:
        found = checked(raw, self.params(format, shape))
        out, inn = shape.out, shape.inn
        kept = unpacked(found[self.weight], format.code.bits, TILE * out)
        kept = kept.view(-1, 1024)[:, inverse(tile_permutation(format.code.bits))]
        kept = kept.view(inn // 32, out // TILE, TILE, TILE).transpose(1, 2).reshape(inn // 2, out).T
        middle = 1 << format.code.bits - 1
        q = torch.full((out, inn // 4, 4), middle, dtype=torch.uint8)
        q.scatter_(2, kept_places(found[self.meta], out, inn), kept.reshape(out, inn // 4, 2))
        scale = found[self.scale]
        if 0 < format.group.inputs < inn // self.scale_inputs:
            scale = scale.unflatten(1, (-1, 8))[..., inverse(torch.tensor(PERMUTED_SCALES))].flatten(1)
        q = q.view(out, inn)
        return Codes(
            q=signed(q) if format.code == S8 else q,
            code=format.code,
            group=format.group,
            scale=Scales(scale.T),
            zero=None if format.code == S8 else Scales(torch.tensor([[middle]])),
        )


class Bitmask(Layout):
    """compressed [N, K / 2] and bitmask [N, K / 8], a bit for each input that is kept, low bits first.

    The kept numbers are what the format's code says, with the scales of `Scaled` unless they are plain.
    """

    def params(self, format: LayerFormat, shape: MatrixShape) -> dict[str, TensorSpec]:
        dtypes = FLOATS if format.code == PLAIN else (format.code.dtype,)
        specs = {} if format.code == PLAIN else SCALED.params(format, shape)
        specs.pop("weight", None)
        return {
            "compressed": TensorSpec(shape=(shape.out, divided(shape.inn, 2, "inputs")), dtypes=dtypes),
            "bitmask": TensorSpec(shape=(shape.out, -(-shape.inn // 8)), dtypes=(torch.uint8,)),
            "shape": TensorSpec(shape=(2, 1), dtypes=(torch.int64,), required=False),
            **specs,
        }

    def decode(self, raw: Raw, format: LayerFormat, shape: MatrixShape) -> Codes:
        found = checked(raw, self.params(format, shape))
        kept = unpacked(found["bitmask"], 1, shape.inn).bool()
        compressed = found["compressed"]
        if int(kept.sum()) != compressed.numel():
            raise ValueError(
                f"bitmask keeps {int(kept.sum()):,} numbers, compressed has {compressed.numel():,}"
            )
        bits = torch.uint8 if compressed.itemsize == 1 else compressed.dtype
        dense = torch.zeros((shape.out, shape.inn), dtype=bits)
        dense[kept] = compressed.view(bits).flatten()
        dense = dense.view(compressed.dtype)
        if format.code == PLAIN:
            return Codes(q=dense, code=PLAIN)
        return SCALED.decode({**found, "weight": dense}, replace(format, layout="scaled"), shape)


@cache
def tile_permutation(bits: int) -> Tensor:
    """int64 [1024]: which weight of four tiles side by side is stored at each place.

    A place is (thread, column j of its four, half, row of its four); then codes of a word are dealt out even
    ones first.
    """
    thread = torch.arange(32)[:, None, None, None]
    j = torch.arange(4)[:, None, None]
    half = torch.arange(2)[:, None]
    r = torch.arange(4)
    row = 2 * (thread % 4) + r % 2 + 8 * (r // 2)
    place = 16 * row + 256 * (thread // 8) + 8 * (thread // 4 % 2) + 4 * half + j
    num = 32 // bits
    evens_first = [*range(0, num, 2), *range(1, num, 2)]
    return place.reshape(-1, num)[:, evens_first].flatten()


def inverse(permutation: Tensor) -> Tensor:
    return torch.argsort(permutation)


def kept_places(meta: Tensor, out: int, inn: int) -> Tensor:
    """int64 [N, K / 4, 2]: which two of four inputs are kept, from the reordered meta of 16 inputs a word."""
    row = torch.arange(out)[:, None]
    column = torch.arange(inn // 16)
    place = row // 64 * 64 + row % 2 * 2 + row % 8 // 4 + row % 4 // 2 * 32 + row % 64 // 8 * 4
    swap = (place % 2 == 0).long() * (column % 2) - (place % 2) * (column % 2 == 0).long()
    place, column = place + swap, column - swap
    flat = column // 2 * 2 * out + place * 2 + column % 2
    words = meta.reshape(-1)[flat].int()
    return torch.stack([words >> shift & 3 for shift in range(0, 16, 2)], -1).long().view(out, inn // 4, 2)


MARLIN24 = Marlin24(weight="weight_packed", meta="meta", scale="scale_packed", scale_inputs=2)
GPTQ_MARLIN24 = Marlin24(weight="B_24", meta="B_meta", scale="s", scale_inputs=1)
BITMASK = Bitmask()
