"""GPTQ's dialect, as AutoGPTQ and GPTQModel write it, which may name layers apart; and auto-round's."""

from __future__ import annotations

import re
from dataclasses import replace

from pellucid.quant.codes import E2M1, E4M3, ROW, S8, U2, U3, U4, Group
from pellucid.quant.layouts.base import PLAIN_ACT, ActFormat, LayerFormat
from pellucid.quant.schemes.awq import awq_format
from pellucid.quant.schemes.base import (
    EVERYTHING,
    LINEAR,
    WITH_HEAD,
    Options,
    QuantScheme,
    Rule,
    Rules,
    StoredConfig,
    exact,
    path,
    refusal,
    regex,
)
from pellucid.quant.schemes.fp8 import Fp8Scheme

CODES = {2: U2, 3: U3, 4: U4, 8: S8}
VERSIONS = {"gptq": frozenset[str](), "gptq_v2": frozenset({"v2"})}
PACKINGS = {  # of auto-round, whose own has zeros as they are
    **dict.fromkeys(("auto_awq", "awq"), "awq"),
    **dict.fromkeys(("auto", "auto_gptq", "gptq"), "gptq"),
    **dict.fromkeys(("auto_round", "gptqmodel", "exllamav2", "tritonv2"), "gptq_v2"),
}
FLOATS_OF_AUTO_ROUND = {  # by its data_type and bits, as compressed-tensors has them
    ("mx_fp", 4): LayerFormat(
        layout="mxfp4", code=E2M1, group=Group(1, 32), act=ActFormat(type="e2m1", group=32)
    ),
    ("mx_fp", 8): LayerFormat(
        layout="scaled", code=E4M3, group=Group(1, 32), act=ActFormat(type="e4m3", group=32)
    ),
    ("nv_fp", 4): LayerFormat(
        layout="nvfp4", code=E2M1, group=Group(1, 16), act=ActFormat(type="e2m1", group=16)
    ),
}
WAY_OUT = "convert it with GPTQModel to the format 'gptq', or use another checkpoint"


class GptqScheme(QuantScheme):
    def rules(self, stored: StoredConfig, options: Options) -> Rules:
        kinds = WITH_HEAD if options.flag("lm_head") else LINEAR
        rules: list[Rule] = []
        for pattern, overrides in options.part("dynamic").entries.items():
            matcher = regex(pattern.removeprefix("+:").removeprefix("-:"))
            if pattern.startswith("-:"):
                rules.append(Rule(matcher, None))
                continue
            own = Options.of(overrides, f"{pattern!r} of dynamic in {options.where}")
            rules.append(Rule(matcher, gptq_format(own.over(options)), WITH_HEAD))
        format = gptq_format(options)
        inside = [name for names in blocks(options) for name in names]
        rules += [Rule(path(name), format, kinds) for name in inside] or [Rule(EVERYTHING, format, kinds)]
        quantized = stored.layers_with(".qweight") | stored.layers_with(".B_24")
        return Rules(tuple(rules), plain_layers(stored, quantized))


class AutoRoundScheme(QuantScheme):
    def rules(self, stored: StoredConfig, options: Options) -> Rules:
        rules = [
            Rule(layers(name), auto_round_format(stored, own.over(options)))
            for name, own in options.parts("extra_config").items()
        ]
        format = auto_round_format(stored, options)
        named = options.get("block_name_to_quantize")
        blocks = named.split(",") if isinstance(named, str) else options.names("block_name_to_quantize")
        rules += [Rule(path(name.strip()), format, LINEAR) for name in blocks]
        if not blocks:
            rules.append(Rule(EVERYTHING, format, LINEAR))
        kinds_of_scales = (".qweight", ".weight_scale", ".weight_scale_inv")
        coded = frozenset[str]().union(*map(stored.layers_with, kinds_of_scales))
        return Rules(tuple(rules), plain_layers(stored, coded))


def gptq_format(options: Options) -> LayerFormat:
    """What the config says of layers that nothing else names."""
    bits = options.number("bits")
    if bits not in CODES:
        raise refusal(f"GPTQ of {bits} bits", "there are 2, 3, 4 and 8", WAY_OUT)
    version = options.text("checkpoint_format", "format", default="gptq")
    if version == "marlin_24":
        return LayerFormat(layout="gptq-marlin24", code=CODES[bits], group=group_of(options))
    if version not in VERSIONS:
        known = ", ".join(VERSIONS)
        raise refusal(f"GPTQ in the format {version!r}", f"there are {known} and marlin_24", WAY_OUT)
    if options.text("pack_dtype", default="int32") != "int32":
        raise refusal(f"words of {options.get('pack_dtype')}", "words of int32 are read", WAY_OUT)
    group = group_of(options)
    act_order = options.flag("desc_act") and group != ROW
    return LayerFormat(
        layout="gptq",
        code=CODES[bits],
        group=group,
        options=VERSIONS[version] | ({"act_order"} if act_order else set()),
    )


def auto_round_format(stored: StoredConfig, options: Options) -> LayerFormat | None:
    """Integers packed as GPTQ or as AWQ, or floats; 16 bits and more are plain."""
    bits = options.number("bits")
    if bits >= 16:
        return None
    kind = options.text("data_type", default="int")
    if kind.startswith("fp"):
        return Fp8Scheme().format_of(stored, options)
    acts = options.number("act_bits", default=16)
    for (name, size), format in FLOATS_OF_AUTO_ROUND.items():
        if kind.startswith(name) and bits == size:
            return format if acts < 16 else replace(format, act=PLAIN_ACT)
    if acts < 16:
        raise refusal(
            f"auto-round's activations of {options.get('act_bits')} bits",
            "only weights are read in this form",
            "save it in auto-round's format 'llm_compressor'",
        )
    packing = options.text("packing_format", "backend", default="auto").removeprefix("auto_round:")
    found = next((PACKINGS[part] for part in packing.split(":") if part in PACKINGS), "")
    if kind != "int" or not found:
        raise refusal(
            f"auto-round's {kind!r} of {bits} bits in {packing!r}",
            "there are integers packed as auto_round, auto_gptq or auto_awq, fp, mx_fp and nv_fp",
            "save it in one of these, or in the format 'llm_compressor'",
        )
    if found == "awq":
        return awq_format(options)
    return gptq_format(Options({**options.entries, "checkpoint_format": found}, options.where))


def layers(name: str) -> re.Pattern[str]:
    """The layers that auto-round means: one by its name, or many by a regular expression."""
    return exact(name) if re.fullmatch(r"[\w.-]+", name) else regex(f".*(?:{name})")


def group_of(options: Options) -> Group:
    return Group(1, max(0, options.number("group_size", "q_group_size", default=128)))


def blocks(options: Options) -> list[list[str]]:
    """`modules_in_block_to_quantize`: names inside a block, in lists of those quantized together."""
    found = options.get("modules_in_block_to_quantize", "inside_layer_modules") or []
    if not isinstance(found, list):
        raise ValueError(f"modules_in_block_to_quantize in {options.where} is {found!r:.100}, must be a list")
    return [names if isinstance(names, list) else [names] for names in found]


def plain_layers(stored: StoredConfig, quantized: frozenset[str]) -> frozenset[str]:
    """Layers with a plain weight, where the files are known: configs do not name all of them."""
    return stored.layers_with(".weight") - quantized
