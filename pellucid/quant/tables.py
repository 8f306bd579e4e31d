"""Tables of embeddings that become codes once they are loaded: rows are looked up, never multiplied."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pellucid.kernels.embedding import CodedTable
from pellucid.quant.codes import E2M1, E4M3, S8, U4, Codes
from pellucid.quant.layouts.base import LayerFormat
from pellucid.quant.rounding import ROWS, rounded

NUM_CODES = 16  # of 4 bits
SCALE_BITS = {E2M1: 16, U4: 16}  # of others 32


@dataclass(frozen=True, slots=True)
class RoundedTable:
    """Keeps a table as the nearest codes of a format."""

    format: LayerFormat

    def bits(self, dim: int) -> float:
        code = self.format.code
        return code.bits + SCALE_BITS.get(code, 32) / (self.format.group.inputs or dim)

    def coded(self, weight: Tensor) -> CodedTable:
        return coded_table(weight, self.format)


def coded_table(weight: Tensor, format: LayerFormat) -> CodedTable:
    """The codes of a format that are nearest to weight [L, D], ROWS of it at a time.

    Raises ValueError for rows that are not whole groups.
    """
    first, *others = weight.split(ROWS)
    head = in_table(rounded(first, format), format)
    if not others:
        return head
    codes, scales = (part.new_empty(len(weight), part.shape[1]) for part in head[:2])
    start = 0
    for rows in (first, *others):
        part = head if start == 0 else in_table(rounded(rows, format), format)
        codes[start : start + len(rows)], scales[start : start + len(rows)] = part.codes, part.scales
        start += len(rows)
    return CodedTable(codes, scales, head.numbers)


def in_table(codes: Codes, format: LayerFormat) -> CodedTable:
    """Codes as a table keeps them, what each scale is taken from beside them."""
    assert codes.scale is not None and codes.scale.outer is None and codes.offset is None, format
    scales = codes.scale.values
    if format.code in (S8, E4M3):
        assert codes.zero is None, format
        return CodedTable(codes.q.contiguous(), scales.contiguous())
    if format.code == E2M1:
        scales = scales.to(torch.bfloat16)  # powers of two, which it has exactly
    every = torch.arange(NUM_CODES, dtype=torch.uint8, device=codes.q.device)
    zero = None if codes.zero is None else type(codes.zero)(codes.zero.values[:1, :1])
    meant = Codes(q=every[None], code=format.code, zero=zero, table=codes.table)  # by all groups alike
    low, high = codes.q.unflatten(1, (-1, 2)).unbind(-1)
    return CodedTable(low | high << 4, scales.contiguous(), meant.dequantized()[0].contiguous())
