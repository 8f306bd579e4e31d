"""What all of ggml's layouts share: one tensor of bytes, cut into blocks, and a block into its fields.

A layout here is a function from blocks, uint8 [..., N, B, bytes], to codes; B blocks make a row.  Where
shapes below begin with N, there may be an axis of experts before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pellucid.quant.codes import Codes
from pellucid.quant.layouts.base import (
    LayerFormat,
    Layout,
    MatrixShape,
    Raw,
    TensorSpec,
    checked,
    divided,
)
from pellucid.quant.layouts.ggml.types import SIZES


@dataclass(frozen=True, slots=True)
class Blocks(Layout):
    """weight, bytes [N, B x bytes of a block], or [E, N, ...] of all experts of a layer."""

    name: str
    read: Callable[[Tensor], Codes]
    write: Callable[[Codes], list[Tensor]] | None = None  # the fields, [N, B, bytes] each

    def params(self, format: LayerFormat, shape: MatrixShape) -> dict[str, TensorSpec]:
        size = SIZES[self.name]
        blocks = divided(shape.inn, size.elements, "inputs")
        return {"weight": rows_of(shape, blocks * size.nbytes, torch.uint8)}

    def decode(self, raw: Raw, format: LayerFormat, shape: MatrixShape) -> Codes:
        stored = checked(raw, self.params(format, shape))["weight"]
        return self.read(stored.unflatten(-1, (-1, SIZES[self.name].nbytes)))

    def encode(self, codes: Codes, format: LayerFormat) -> dict[str, Tensor]:
        if self.write is None:
            raise ValueError(f"{self.name} is not written here; write Q4_0, Q8_0, Q4_K, Q5_K or Q6_K")
        fields = [field.contiguous().view(torch.uint8) for field in self.write(codes)]
        return {"weight": torch.cat(fields, -1).flatten(-2)}


def rows_of(shape: MatrixShape, elements: int, dtype: torch.dtype) -> TensorSpec:
    """A tensor with so many elements for each output, of which an expert may have its own."""
    experts = () if shape.experts is None else (shape.experts,)
    return TensorSpec(shape=(*experts, shape.out, elements), dtypes=(dtype,))


def cut(blocks: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """The fields of blocks, one behind the other, uint8 [N, B, size]."""
    assert sum(sizes) == blocks.shape[-1], (sizes, blocks.shape)
    return blocks.split(sizes, -1)


def half(field: Tensor) -> Tensor:
    """A float16 of each block, float32 [N, B]."""
    return field.contiguous().view(torch.float16)[..., 0].float()


def words16(field: Tensor) -> Tensor:
    """Pairs of bytes as int32, [N, B, size / 2]."""
    pairs = field.unflatten(-1, (-1, 2)).int()
    return pairs[..., 0] | pairs[..., 1] << 8


def words32(field: Tensor) -> Tensor:
    """Fours of bytes as int64, [N, B, size / 4]."""
    halves = words16(field).long().unflatten(-1, (-1, 2))
    return halves[..., 0] | halves[..., 1] << 16


def fields(words: Tensor, bits: int, run: int) -> Tensor:
    """Small integers in bytes: of each `run` bytes the lowest bits of all, then the next, uint8 [N, B, n].

    Thus 32 bytes of 4 bits hold elements 0 to 31 in their low halves and 32 to 63 in their high ones.
    """
    runs = words.unflatten(-1, (-1, run))
    planes = [runs >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
    return torch.stack(planes, -2).flatten(-3)


def in_fields(codes: Tensor, bits: int, run: int) -> Tensor:
    """`fields` backwards."""
    planes = codes.unflatten(-1, (-1, 8 // bits, run)).unbind(-2)
    stored = torch.zeros_like(planes[0])
    for shift, plane in zip(range(0, 8, bits), planes, strict=True):
        stored |= plane << shift
    return stored.flatten(-2)


def bits_of(words: Tensor, shifts: Sequence[int], mask: int) -> Tensor:
    """(word >> shift) & mask for each word and each shift, [..., n x shifts]."""
    return torch.stack([words >> shift & mask for shift in shifts], -1).flatten(-2)


def row(field: Tensor) -> Tensor:
    """[N, B, n] -> [N, B n]: what blocks have, along a row."""
    return field.flatten(-2)


def by_block(codes: Codes, size: int, field: Tensor) -> Tensor:
    """`row` backwards, for blocks of `size` inputs."""
    return field.unflatten(-1, (codes.q.shape[-1] // size, -1))
