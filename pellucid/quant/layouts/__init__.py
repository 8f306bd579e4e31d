"""How files hold a quantized matrix: one file for each family of layouts, and their names."""

from __future__ import annotations

from pellucid.quant.layouts.base import LayerFormat, Layout
from pellucid.quant.layouts.ggml.types import TYPES
from pellucid.registry import Registry

HERE = "pellucid.quant.layouts"
LAYOUTS: Registry[Layout] = Registry(
    "layout of weights",
    {
        "awq": f"{HERE}.awq:AWQ",
        "gptq": f"{HERE}.gptq:GPTQ",
        "ct-pack": f"{HERE}.ct_pack:CT_PACK",
        "scaled": f"{HERE}.scaled:SCALED",
        "fp8-blocks": f"{HERE}.scaled:FP8_BLOCKS",
        "bnb-int8": f"{HERE}.scaled:BNB_INT8",
        "torchao": f"{HERE}.scaled:TORCHAO",
        "mxfp4": f"{HERE}.small_floats:MXFP4",
        "mxfp6": f"{HERE}.small_floats:MXFP6",
        "nvfp4": f"{HERE}.small_floats:NVFP4",
        "modelopt-nvfp4": f"{HERE}.small_floats:MODELOPT_NVFP4",
        "mx-experts": f"{HERE}.small_floats:MX_EXPERTS",
        "modelopt-mxfp4": f"{HERE}.small_floats:MODELOPT_MXFP4",
        "modelopt-experts": f"{HERE}.stacked_experts:MODELOPT_EXPERTS",
        "fbgemm-experts": f"{HERE}.stacked_experts:FBGEMM_EXPERTS",
        "bnb4": f"{HERE}.bnb4:BNB4",
        "hqq": f"{HERE}.hqq:HQQ",
        "marlin24": f"{HERE}.sparse24:MARLIN24",
        "gptq-marlin24": f"{HERE}.sparse24:GPTQ_MARLIN24",
        "bitmask": f"{HERE}.sparse24:BITMASK",
        **{f"ggml/{t.name}": f"{HERE}.ggml.{t.file}:{t.name}" for t in TYPES.values() if t.file},
    },
)


def layout_of(format: LayerFormat) -> Layout:
    return LAYOUTS.load(format.layout)
