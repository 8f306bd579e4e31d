"""Experts of a layer in one tensor, inputs first: ModelOpt's in FP8 or NVFP4, and fbgemm's in FP8."""

from __future__ import annotations

import torch

from pellucid.quant.codes import E2M1, Codes, Scales
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


class ModelOptExperts(Layout):
    """The matrix itself [E, K, N], _weight_scale one number; of NVFP4 [E, K / 2, N], [E, K / 16, N], and a
    number for all in _weight_scale_2.
    """

    joint = ""

    def params(self, format: LayerFormat, shape: MatrixShape) -> dict[str, TensorSpec]:
        one = TensorSpec(shape=(1,), dtypes=FLOATS)
        input_scale = TensorSpec(shape=(1,), dtypes=FLOATS, required=False)
        num = shape.experts or 1
        if format.code != E2M1:
            whole = TensorSpec(shape=(num, shape.inn, shape.out), dtypes=(format.code.dtype,))
            return {"": whole, "_weight_scale": one, "_input_scale": input_scale}
        groups = divided(shape.inn, format.group.inputs, "inputs")
        return {
            "": TensorSpec(shape=(num, shape.inn // 2, shape.out), dtypes=(torch.uint8,)),
            "_weight_scale": TensorSpec(shape=(num, groups, shape.out), dtypes=(torch.float8_e4m3fn,)),
            "_weight_scale_2": one,
            "_input_scale": input_scale,
        }

    def decode(self, raw: Raw, format: LayerFormat, shape: MatrixShape) -> Codes:
        found = checked(raw, self.params(format, shape))
        q, scale = found[""].transpose(1, 2), found["_weight_scale"]
        if format.code == E2M1:
            outer = found["_weight_scale_2"].double()[None]
            scales = Scales(scale.transpose(1, 2), outer)
            return Codes(q=unpacked(q, 4, shape.inn), code=E2M1, group=format.group, scale=scales)
        return Codes(q=q.contiguous(), code=format.code, group=format.group, scale=Scales(scale[None]))


class FbgemmExperts(Layout):
    """The matrix itself [E, K, N], and _scale, a number for each expert's output."""

    joint = ""

    def params(self, format: LayerFormat, shape: MatrixShape) -> dict[str, TensorSpec]:
        num = shape.experts or 1
        return {
            "": TensorSpec(shape=(num, shape.inn, shape.out), dtypes=(format.code.dtype,)),
            "_scale": TensorSpec(shape=(num, shape.out, 1), dtypes=FLOATS),
        }

    def decode(self, raw: Raw, format: LayerFormat, shape: MatrixShape) -> Codes:
        found = checked(raw, self.params(format, shape))
        q = found[""].transpose(1, 2).contiguous()
        return Codes(q=q, code=format.code, group=format.group, scale=Scales(found["_scale"]))


MODELOPT_EXPERTS = ModelOptExperts()
FBGEMM_EXPERTS = FbgemmExperts()
