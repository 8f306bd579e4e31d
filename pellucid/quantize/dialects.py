"""What config.json says of a checkpoint's quantization: for each dialect what its own tool would write."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from pellucid.quant.codes import S8, Group
from pellucid.quant.layouts.base import ActFormat, LayerFormat
from pellucid.quantize.base import COMPRESSED, Recipe
from pellucid.quantize.gptq import DAMP

FORMS = {"ct-pack": "pack-quantized", "mxfp4": "mxfp4-pack-quantized", "nvfp4": "nvfp4-pack-quantized"}


def config_of(dialect: str, format: LayerFormat, recipe: Recipe, plain: Sequence[str]) -> dict[str, object]:
    """The entry `quantization_config`.  plain: matrices that stay what they are, by name."""
    return CONFIGS[dialect](format, recipe, list(plain))


def compressed_tensors(format: LayerFormat, recipe: Recipe, plain: list[str]) -> dict[str, object]:
    form = FORMS.get(format.layout) or ("int-quantized" if format.code == S8 else "float-quantized")
    group = {
        "targets": ["Linear"],
        "weights": weights(format, recipe),
        "input_activations": activations(format.act),
        "output_activations": None,
        "format": form,
    }
    return {
        "quant_method": COMPRESSED,
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": plain,
        "kv_cache_scheme": None,
    }


def weights(format: LayerFormat, recipe: Recipe) -> dict[str, object]:
    is_float = format.code.name in ("e4m3", "e2m1")
    strategies = {"mxfp4": "group", "nvfp4": "tensor_group"}
    match format.group:
        case Group(1, 0):
            strategy = "channel"
        case Group(0, 0):
            strategy = "tensor"
        case _:
            strategy = strategies.get(format.layout, "group")
    said: dict[str, object] = {
        "num_bits": 7 if "7_bits" in format.options else format.code.bits,
        "type": "float" if is_float else "int",
        "symmetric": "asym" not in format.options,
        "strategy": strategy,
        "group_size": format.group.inputs or None,
        "dynamic": False,
        "actorder": "group" if "act_order" in format.options else None,
    }
    if format.layout == "mxfp4":
        said |= {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
    if format.layout == "nvfp4":
        said |= {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
    return said


def activations(act: ActFormat) -> dict[str, object] | None:
    if act.type == "plain":
        return None
    return {
        "num_bits": 8,
        "type": "int" if act.type == "s8" else "float",
        "symmetric": True,
        "strategy": "tensor" if act.static else "token",
        "dynamic": not act.static,
    }


def awq(format: LayerFormat, recipe: Recipe, plain: list[str]) -> dict[str, object]:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": format.group.inputs or -1,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": [name for name in plain if name != "lm_head"] or None,
    }


def gptq(format: LayerFormat, recipe: Recipe, plain: list[str]) -> dict[str, object]:
    dynamic = {rf"-:^{re.escape(name)}$": {} for name in plain if name != "lm_head"}
    return {
        "quant_method": "gptq",
        "bits": format.code.bits,
        "group_size": format.group.inputs or -1,
        "desc_act": "act_order" in format.options,
        "static_groups": recipe.act_order == "static",
        "sym": "asym" not in format.options,
        "damp_percent": DAMP,
        "true_sequential": False,
        "checkpoint_format": "gptq_v2" if "v2" in format.options else "gptq",
        "lm_head": False,
        "dynamic": dynamic or None,
    }


def fp8(format: LayerFormat, recipe: Recipe, plain: list[str]) -> dict[str, object]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "static" if format.act.static else "dynamic",
        "weight_block_size": list(format.group),
        "modules_to_not_convert": plain or None,
    }


def bitsandbytes(format: LayerFormat, recipe: Recipe, plain: list[str]) -> dict[str, object]:
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": plain or None,
    }


CONFIGS: dict[str, Callable[[LayerFormat, Recipe, list[str]], dict[str, object]]] = {
    COMPRESSED: compressed_tensors,
    "awq": awq,
    "gptq": gptq,
    "fp8": fp8,
    "bitsandbytes": bitsandbytes,
}
