"""GPTQ's dialect, as AutoGPTQ and GPTQModel write it, which may name layers apart; and auto-round's."""

from __future__ import annotations

import re

from pellucid.quant.codes import ROW, S8, U2, U3, U4, Group
from pellucid.quant.layouts.base import LayerFormat
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

CODES = {2: U2, 3: U3, 4: U4, 8: S8}
VERSIONS = {"gptq": frozenset[str](), "gptq_v2": frozenset({"v2"})}
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
            Rule(layers(name), auto_round_format(own.over(options)))
            for name, own in options.parts("extra_config").items()
        ]
        format = auto_round_format(options)
        named = options.get("block_name_to_quantize")
        blocks = named.split(",") if isinstance(named, str) else options.names("block_name_to_quantize")
        rules += [Rule(path(name.strip()), format, LINEAR) for name in blocks]
        if not blocks:
            rules.append(Rule(EVERYTHING, format, LINEAR))
        return Rules(tuple(rules), plain_layers(stored, stored.layers_with(".qweight")))


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


def auto_round_format(options: Options) -> LayerFormat | None:
    """Packed as GPTQ or as AWQ; 16 bits and more are plain."""
    if options.number("bits") >= 16:
        return None
    if options.number("act_bits", default=16) < 16:
        raise refusal(
            f"auto-round's activations of {options.get('act_bits')} bits",
            "only weights are read in this form",
            "save it in auto-round's format 'llm_compressor'",
        )
    kind = options.text("data_type", default="int")
    packing = options.text("packing_format", default="auto_round:auto_gptq").removeprefix("auto_round:")
    if kind != "int" or packing not in ("auto_gptq", "gptq", "auto_awq", "awq"):
        raise refusal(
            f"auto-round's {kind!r} in {packing!r}",
            "there are integers packed as auto_gptq or auto_awq",
            "save it in one of these, or in the format 'llm_compressor'",
        )
    if packing.endswith("awq"):
        return awq_format(options)
    return gptq_format(Options({**options.entries, "checkpoint_format": "gptq"}, options.where))


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
