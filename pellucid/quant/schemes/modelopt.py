"""ModelOpt's dialect: one algorithm for all layers, or one by layer; in config.json or beside it."""

from __future__ import annotations

from dataclasses import replace

from pellucid.quant.codes import E2M1, E4M3, S8, WHOLE_MATRIX, Group
from pellucid.quant.layouts.base import ActFormat, LayerFormat
from pellucid.quant.schemes.base import (
    EVERYTHING,
    EXPERTS,
    LINEAR,
    WITH_HEAD,
    Options,
    QuantScheme,
    Rule,
    Rules,
    StoredConfig,
    exact,
    glob,
    refusal,
)

MIXED = "MIXED_PRECISION"
NVFP4 = LayerFormat(layout="modelopt-nvfp4", code=E2M1, group=Group(1, 16))
FORMATS = {
    "FP8": LayerFormat(
        layout="scaled", code=E4M3, group=WHOLE_MATRIX, act=ActFormat(type="e4m3", static=True)
    ),
    "FP8_PER_CHANNEL_PER_TOKEN": LayerFormat(layout="scaled", code=E4M3, act=ActFormat(type="e4m3")),
    "FP8_PB_WO": LayerFormat(layout="scaled", code=E4M3, group=Group(128, 128)),
    "NVFP4": LayerFormat(
        layout=NVFP4.layout, code=E2M1, group=NVFP4.group, act=ActFormat(type="e2m1", group=16)
    ),
    "W4A16_NVFP4": NVFP4,
    "MXFP4": LayerFormat(
        layout="modelopt-mxfp4", code=E2M1, group=Group(1, 32), act=ActFormat(type="e2m1", group=32)
    ),
    "W8A16": LayerFormat(layout="scaled", code=S8),
    "MXFP8": LayerFormat(
        layout="scaled", code=E4M3, group=Group(1, 32), act=ActFormat(type="e4m3", group=32)
    ),
}


class ModelOptScheme(QuantScheme):
    def rules(self, stored: StoredConfig, options: Options) -> Rules:
        options = options.part("quantization") if options.has("quantization") else options
        rules = [Rule(glob(name), None) for name in options.names("exclude_modules", "ignore")]
        algorithm = options.text("quant_algo").upper()
        if algorithm != MIXED:
            format = format_of(algorithm, options)
            in_one = replace(format, layout="modelopt-experts")
            rules += [Rule(exact(name), in_one, EXPERTS) for name in stored.layers_with("_weight_scale")]
            return Rules((*rules, Rule(EVERYTHING, format, LINEAR)))
        for name, own in options.parts("quantized_layers").items():
            rules.append(Rule(exact(name), format_of(own.text("quant_algo").upper(), own), WITH_HEAD))
        return Rules(tuple(rules))


def format_of(algorithm: str, options: Options) -> LayerFormat:
    if algorithm not in FORMATS:
        known = ", ".join((*FORMATS, MIXED))
        raise refusal(
            f"ModelOpt's {algorithm!r}",
            f"there are {known}",
            "export it with one of these, or in another format",
        )
    format = FORMATS[algorithm]
    if options.number("group_size", default=format.group.inputs) not in (format.group.inputs, 0):
        raise refusal(
            f"ModelOpt's {algorithm} in groups of {options.get('group_size')}",
            f"it has groups of {format.group.inputs}",
            "use another checkpoint",
        )
    return format
