"""Weights of a byte each, integers or FP8, with scales of rows, groups, blocks or the whole matrix.

Many tools write these; they differ in the names of tensors.  Option: "asym" (integers have zeros).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pellucid.quant.codes import S8, Codes, Scales
from pellucid.quant.layouts.base import (
    FLOATS,
    LayerFormat,
    Layout,
    MatrixShape,
    Raw,
    TensorSpec,
    checked,
)

SCALES = (*FLOATS, torch.uint8, torch.float8_e8m0fnu)  # bytes are powers of two


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled(Layout):
    """weight [N, K], scale [R, G] and perhaps zero [R, G]: W = (q - zero) scale.

    divisor: what the stored scales are still to be divided by.
    """

    weight: str = "weight"
    scale: str = "weight_scale"
    zero: str = "weight_zero_point"
    divisor: int = 1

    def params(self, format: LayerFormat, shape: MatrixShape) -> dict[str, TensorSpec]:
        groups = format.group.counts(shape.out, shape.inn)
        specs = {
            self.weight: TensorSpec(shape=(shape.out, shape.inn), dtypes=(format.code.dtype,)),
            self.scale: TensorSpec(shape=groups, dtypes=SCALES),
        }
        if "asym" in format.options:
            specs[self.zero] = TensorSpec(
                shape=groups, dtypes=(torch.int8, torch.int32, *FLOATS), required=False
            )
        if format.act.static:
            specs["input_scale"] = TensorSpec(shape=(1,), dtypes=FLOATS)
        if not format.act.symmetric and format.act.static:
            specs["input_zero_point"] = TensorSpec(shape=(1,), dtypes=(torch.int8, torch.int32))
        return specs

    def decode(self, raw: Raw, format: LayerFormat, shape: MatrixShape) -> Codes:
        found = checked(raw, self.params(format, shape))
        scale, zero = found[self.scale], found.get(self.zero)
        if scale.dtype == torch.uint8:
            scale = scale.view(torch.float8_e8m0fnu)
        outer = None if self.divisor == 1 else torch.tensor([[1 / self.divisor]], dtype=torch.float64)
        return Codes(
            q=found[self.weight],
            code=format.code,
            group=format.group,
            scale=Scales(scale, outer),
            zero=Scales(zero) if zero is not None and zero.any() else None,
        )

    def encode(self, codes: Codes, format: LayerFormat) -> dict[str, Tensor]:
        assert codes.code == format.code and codes.scale is not None, codes.code
        scale = codes.scale.numbers() * self.divisor if codes.scale.outer is not None else codes.scale.values
        if scale.dtype == torch.float8_e8m0fnu:
            scale = scale.view(torch.uint8)
        raw = {self.weight: codes.q, self.scale: scale}
        if "asym" in format.options:
            zeros = codes.zero.values if codes.zero else torch.zeros(1, 1)
            raw[self.zero] = zeros.to(torch.int8 if format.code == S8 else torch.float32).expand(scale.shape)
        return raw


SCALED = Scaled()
FP8_BLOCKS = Scaled(scale="weight_scale_inv")  # which multiplies, despite its name
BNB_INT8 = Scaled(scale="SCB", divisor=127)
TORCHAO = Scaled(weight="_weight_qdata", scale="_weight_scale", zero="_weight_zero_point")
