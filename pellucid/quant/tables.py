"""Tables of embeddings that become codes once they are loaded: rows are looked up, never multiplied."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pellucid.kernels.pointwise.embedding import CodedTable
from pellucid.quant.base import HoldsCodes
from pellucid.quant.codes import E2M1, E4M3, S8, U4, Codes
from pellucid.quant.layouts.base import LayerFormat
from pellucid.quant.rounding import in_slices, rounded

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
    """The codes of a format that are nearest to weight [L, D].

    Raises ValueError for rows that are not whole groups.
    """
    codes, scales = in_slices(weight, lambda rows: in_rows(rounded(rows, format)))
    numbers = None if format.code in (S8, E4M3) else numbers_of(rounded(weight[:1], format))
    return CodedTable(codes, scales, numbers)


def rows_in(table: HoldsCodes | None, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """Codes [L, D] of `dtype` and scales [L, 1], if a table is kept in such, not copied."""
    codes = None if table is None else table.codes
    if codes is None or codes.codes.dtype != dtype:
        return None
    return codes.codes, codes.scales


def in_rows(codes: Codes) -> tuple[Tensor, Tensor]:
    """Codes and scales as a table keeps them."""
    assert codes.scale is not None and codes.scale.outer is None and codes.offset is None, codes.code
    scales = codes.scale.values.contiguous()
    if codes.code in (S8, E4M3):
        assert codes.zero is None, codes.code
        return codes.q.contiguous(), scales
    if codes.code == E2M1:
        scales = scales.to(torch.bfloat16)  # powers of two, which it has exactly
    low, high = codes.q.unflatten(1, (-1, 2)).unbind(-1)
    return low | high << 4, scales


def numbers_of(codes: Codes) -> Tensor:
    """float32 [16]: what each code of 4 bits means before its scale, in all rows and groups alike."""
    every = torch.arange(NUM_CODES, dtype=torch.uint8, device=codes.q.device)
    zero = None if codes.zero is None else type(codes.zero)(codes.zero.values[:1, :1])
    return Codes(q=every[None], code=codes.code, zero=zero, table=codes.table).dequantized()[0].contiguous()
