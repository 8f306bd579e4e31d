"""Floats of 4 and 6 bits, low bits first; groups have scales in e4m3 or powers of two.

NVFP4 has a scale of the whole matrix besides, by which some tools divide and others multiply.  gpt-oss
keeps the experts of a layer in one tensor, cut into blocks of 32 inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pellucid.quant.codes import E2M1, S8, Codes, Scales
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
from pellucid.quant.layouts.bits import packed, unpacked

EIGHTHS = [*range(8), *((8 + m) << e for e in range(3) for m in range(8))]  # of e2m3, by its code
E2M3_EIGHTHS = torch.tensor([*EIGHTHS, *(-number for number in EIGHTHS)], dtype=torch.int8)
E8M0 = (torch.uint8, torch.float8_e8m0fnu)


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallFloats(Layout):
    """weight [N, K / 2], weight_scale [N, G], and perhaps the whole matrix' scale [1]."""

    weight: str
    whole: str | None = None  # the tensor of the whole matrix' scale
    whole_is: Literal["divisor", "factor"] = "factor"
    input: str | None = None  # the tensor of the activations' scale, if there is one

    def params(self, format: LayerFormat, shape: MatrixShape) -> dict[str, TensorSpec]:
        group = format.group.inputs
        groups = divided(shape.inn, group, "inputs")
        scales = (torch.float8_e4m3fn,) if self.whole else E8M0
        specs = {
            self.weight: TensorSpec(shape=(shape.out, shape.inn // 2), dtypes=(torch.uint8,)),
            "weight_scale": TensorSpec(shape=(shape.out, groups), dtypes=scales),
        }
        if self.whole:
            specs[self.whole] = TensorSpec(shape=(1,), dtypes=FLOATS)
        if self.input:
            specs[self.input] = TensorSpec(shape=(1,), dtypes=FLOATS, required=False)
        return specs

    def decode(self, raw: Raw, format: LayerFormat, shape: MatrixShape) -> Codes:
        found = checked(raw, self.params(format, shape))
        scale, outer = found["weight_scale"], None
        if self.whole:
            outer = found[self.whole].double()[None]
            outer = 1 / outer if self.whole_is == "divisor" else outer
        else:
            scale = scale.view(torch.float8_e8m0fnu)
        q = unpacked(found[self.weight], 4, shape.inn)
        return Codes(q=q, code=E2M1, group=format.group, scale=Scales(scale, outer))

    def encode(self, codes: Codes, format: LayerFormat) -> dict[str, Tensor]:
        assert codes.code == E2M1 and codes.scale is not None, codes.code
        scale, outer = codes.scale
        raw = {
            self.weight: packed(codes.q, 4, word=torch.uint8),
            "weight_scale": scale if self.whole else scale.view(torch.uint8),
        }
        if self.whole:
            assert outer is not None
            raw[self.whole] = (1 / outer if self.whole_is == "divisor" else outer).float().reshape(1)
        return raw


class Mxfp6(Layout):
    """weight_packed [N, 3 K / 4], weight_scale [N, K / 32]: floats of 6 bits (e2m3), four in three bytes.

    Eight times such a number is a whole one of at most 60.
    """

    def params(self, format: LayerFormat, shape: MatrixShape) -> dict[str, TensorSpec]:
        groups = divided(shape.inn, 32, "inputs")
        return {
            "weight_packed": TensorSpec(shape=(shape.out, groups * 24), dtypes=(torch.uint8,)),
            "weight_scale": TensorSpec(shape=(shape.out, groups), dtypes=E8M0),
        }

    def decode(self, raw: Raw, format: LayerFormat, shape: MatrixShape) -> Codes:
        found = checked(raw, self.params(format, shape))
        q = E2M3_EIGHTHS[unpacked(found["weight_packed"], 6, shape.inn).int()]
        scale = found["weight_scale"].view(torch.float8_e8m0fnu)
        return Codes(q=q, code=S8, group=format.group, scale=Scales(scale, torch.tensor([[1 / 8]])))


class MxExperts(Layout):
    """blocks [E, N, K / 32, 16], scales [E, N, K / 32]: the codes are [E, N, K]."""

    joint = "_"

    def params(self, format: LayerFormat, shape: MatrixShape) -> dict[str, TensorSpec]:
        blocks = divided(shape.inn, 32, "inputs")
        whole = (shape.experts or 1, shape.out, blocks)
        return {
            "blocks": TensorSpec(shape=(*whole, 16), dtypes=(torch.uint8,)),
            "scales": TensorSpec(shape=whole, dtypes=E8M0),
        }

    def decode(self, raw: Raw, format: LayerFormat, shape: MatrixShape) -> Codes:
        found = checked(raw, self.params(format, shape))
        q = unpacked(found["blocks"].flatten(-2), 4, shape.inn)
        scale = found["scales"].view(torch.float8_e8m0fnu)
        return Codes(q=q, code=E2M1, group=format.group, scale=Scales(scale))

    def encode(self, codes: Codes, format: LayerFormat) -> dict[str, Tensor]:
        assert codes.code == E2M1 and codes.scale is not None, codes.code
        blocks = packed(codes.q, 4, word=torch.uint8).unflatten(-1, (-1, 16))
        return {"blocks": blocks, "scales": codes.scale.values.view(torch.uint8)}


MXFP4 = SmallFloats(weight="weight_packed")
MXFP6 = Mxfp6()
NVFP4 = SmallFloats(
    weight="weight_packed", whole="weight_global_scale", whole_is="divisor", input="input_global_scale"
)
MODELOPT_NVFP4 = SmallFloats(weight="weight", whole="weight_scale_2", input="input_scale")
MODELOPT_MXFP4 = SmallFloats(weight="weight")
MX_EXPERTS = MxExperts()
