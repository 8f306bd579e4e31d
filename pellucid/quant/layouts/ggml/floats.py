"""Plain floats in GGUF, and e2m1 with powers of two (MXFP4) or e4m3 (NVFP4) for scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pellucid.quant.codes import E2M1, PLAIN, Codes, Group, Scales
from pellucid.quant.layouts.base import LayerFormat, Layout, MatrixShape, Raw, TensorSpec, checked
from pellucid.quant.layouts.ggml.blocks import Blocks, by_block, cut, fields, in_fields, row, rows_of

LARGEST = 127  # the byte of e4m3 that ggml reads as 0, where others have no number


@dataclass(frozen=True, slots=True)
class Floats(Layout):
    """weight [N, K]."""

    dtype: torch.dtype

    def params(self, format: LayerFormat, shape: MatrixShape) -> dict[str, TensorSpec]:
        return {"weight": rows_of(shape, shape.inn, self.dtype)}

    def decode(self, raw: Raw, format: LayerFormat, shape: MatrixShape) -> Codes:
        return Codes(q=checked(raw, self.params(format, shape))["weight"], code=PLAIN)


def read_mxfp4(blocks: Tensor) -> Codes:
    e, q = cut(blocks, 1, 16)
    scale = Scales(row(e).contiguous().view(torch.float8_e8m0fnu))
    return Codes(q=row(fields(q, 4, 16)), code=E2M1, group=Group(1, 32), scale=scale)


def read_nvfp4(blocks: Tensor) -> Codes:
    d, q = cut(blocks, 4, 32)
    d = row(d) & LARGEST
    scale = torch.where(d == LARGEST, 0, d).view(torch.float8_e4m3fn)
    return Codes(q=row(fields(q, 4, 8)), code=E2M1, group=Group(1, 16), scale=Scales(scale))


def write_mxfp4(codes: Codes) -> list[Tensor]:
    assert codes.scale is not None
    return [codes.scale.values[..., None], in_fields(by_block(codes, 32, codes.q), 4, 16)]


F64 = Floats(torch.float64)
F32 = Floats(torch.float32)
F16 = Floats(torch.float16)
BF16 = Floats(torch.bfloat16)
MXFP4 = Blocks("MXFP4", read_mxfp4, write_mxfp4)
NVFP4 = Blocks("NVFP4", read_nvfp4)
