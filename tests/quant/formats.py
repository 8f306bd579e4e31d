"""A matrix of each layout as its own tool wrote it, with what that tool says it is.

`data/matrices.safetensors` has the tensors, `data/matrices.json` the config and sums of the tool's own
numbers. Of ggml's types there are four rows each, and the same rows as the gguf package dequantizes them.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from pellucid.quant.codes import E2M1, E4M3, LUT4, S8, U2, U3, U4, WHOLE_MATRIX, Group
from pellucid.quant.layouts.base import ActFormat, LayerFormat, MatrixShape

DATA = Path(__file__).parent / "data"
STATIC = ActFormat(type="e4m3", static=True)
DYNAMIC = ActFormat(type="e4m3")
ASYM, ACT_ORDER = frozenset({"asym"}), frozenset({"act_order"})
G16, G32, G64, G128 = (Group(1, inputs) for inputs in (16, 32, 64, 128))
FORMATS = {
    "awq-gemm-g128": LayerFormat(layout="awq", code=U4, group=G128),
    "bnb-fp4": LayerFormat(layout="bnb4", code=LUT4, group=G64, options=frozenset({"fp4"})),
    "bnb-int8": LayerFormat(layout="bnb-int8", code=S8),
    "bnb-nf4": LayerFormat(layout="bnb4", code=LUT4, group=G64, options=frozenset({"nf4"})),
    "bnb-nf4-double": LayerFormat(layout="bnb4", code=LUT4, group=G64, options=frozenset({"nf4", "nested"})),
    "ct-fp8-block": LayerFormat(
        layout="scaled", code=E4M3, group=Group(128, 128), act=ActFormat(type="e4m3", group=128)
    ),
    "ct-fp8-dynamic": LayerFormat(layout="scaled", code=E4M3, act=DYNAMIC),
    "ct-fp8-static": LayerFormat(layout="scaled", code=E4M3, group=WHOLE_MATRIX, act=STATIC),
    "ct-int8-w8a8": LayerFormat(layout="scaled", code=S8, act=ActFormat(type="s8")),
    "ct-marlin24-w4a16": LayerFormat(layout="marlin24", code=U4, group=G128),
    "ct-mxfp4a16": LayerFormat(layout="mxfp4", code=E2M1, group=G32),
    "ct-nvfp4": LayerFormat(layout="nvfp4", code=E2M1, group=G16, act=ActFormat(type="e2m1", group=16)),
    "ct-w4a16": LayerFormat(layout="ct-pack", code=U4, group=G128),
    "ct-w4a16-asym": LayerFormat(layout="ct-pack", code=U4, group=G128, options=ASYM),
    "ct-w4a16-gptq-actorder": LayerFormat(layout="ct-pack", code=U4, group=G128, options=ACT_ORDER),
    "ct-w8a16": LayerFormat(layout="ct-pack", code=S8, group=G128),
    "gpt-oss-mxfp4-tiny": LayerFormat(layout="mx-experts", code=E2M1, group=G32),
    "gptq-2bit-g64": LayerFormat(layout="gptq", code=U2, group=G64),
    "gptq-3bit-g128": LayerFormat(layout="gptq", code=U3, group=G128),
    "gptq-4bit-asym-g128": LayerFormat(layout="gptq", code=U4, group=G128),
    "gptq-4bit-g128": LayerFormat(layout="gptq", code=U4, group=G128),
    "gptq-4bit-g128-actorder": LayerFormat(layout="gptq", code=U4, group=G128, options=ACT_ORDER),
    "gptq-4bit-g64": LayerFormat(layout="gptq", code=U4, group=G64),
    "gptq-8bit-g128": LayerFormat(layout="gptq", code=S8, group=G128),
    "hqq-3bit-g64": LayerFormat(layout="hqq", code=U3, group=G64, options=ASYM),
    "hqq-4bit-g64": LayerFormat(layout="hqq", code=U4, group=G64, options=ASYM),
    "hqq-8bit-g64": LayerFormat(layout="hqq", code=S8, group=G64, options=ASYM),
    "modelopt-fp8-kv": LayerFormat(layout="scaled", code=E4M3, group=WHOLE_MATRIX, act=STATIC),
    "modelopt-nvfp4": LayerFormat(
        layout="modelopt-nvfp4", code=E2M1, group=G16, act=ActFormat(type="e2m1", group=16)
    ),
    "torchao-float8-weight-only": LayerFormat(layout="torchao", code=E4M3),
    "torchao-int8-weight-only": LayerFormat(layout="torchao", code=S8, options=ASYM),
    "torchao-intx4-weight-only": LayerFormat(layout="torchao", code=S8, group=G64, options=ASYM),
}


@cache
def tensors() -> dict[str, Tensor]:
    return load_file(DATA / "matrices.safetensors")


@cache
def stored() -> dict[str, dict]:
    """By name: config, matrix, shape, sum, abs_sum, row1_first8."""
    return json.loads((DATA / "matrices.json").read_text())


def raw_of(name: str) -> dict[str, Tensor]:
    return {
        key.removeprefix(f"{name}/"): tensor
        for key, tensor in tensors().items()
        if key.startswith(f"{name}/")
    }


def shape_of(name: str) -> MatrixShape:
    return MatrixShape(*stored()[name]["shape"])
