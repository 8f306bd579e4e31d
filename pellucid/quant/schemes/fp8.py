"""FP8's own dialects: `fp8` of DeepSeek, vLLM and transformers, and `fbgemm_fp8`."""

from __future__ import annotations

import math
from dataclasses import replace

from pellucid.quant.codes import E4M3, ROW, WHOLE_MATRIX, Group
from pellucid.quant.layouts.base import ActFormat, LayerFormat
from pellucid.quant.schemes.base import (
    EVERYTHING,
    EXPERTS,
    LINEAR,
    Options,
    QuantScheme,
    Rule,
    Rules,
    StoredConfig,
    exact,
    plain,
    refusal,
)


class Fp8Scheme(QuantScheme):
    def rules(self, stored: StoredConfig, options: Options) -> Rules:
        if options.has("store_dtype"):
            raise refusal(
                f"FP8 kept as {options.get('store_dtype')!r}",
                "weights of e4m3 are read",
                "use another checkpoint",
            )
        left = plain(options.names("ignored_layers", "modules_to_not_convert"))
        format = self.format_of(stored, options)
        return Rules((*left, Rule(EVERYTHING, format, LINEAR)))

    def format_of(self, stored: StoredConfig, options: Options) -> LayerFormat:
        scheme = options.text("activation_scheme", default="dynamic")
        if scheme not in ("dynamic", "static"):
            raise refusal(
                f"activation_scheme {scheme!r}", "there are dynamic and static", "use another checkpoint"
            )
        match options.get("weight_block_size"):
            case None:
                group = ROW if has_scales_of_rows(stored) else WHOLE_MATRIX
            case [int(rows), int(inputs)]:
                group = Group(rows, inputs)
            case other:
                raise ValueError(f"weight_block_size in {options.where} is {other!r}, must be two numbers")
        static = scheme == "static"
        if static and group.inputs:
            raise refusal(
                "blocks of weights and static activations",
                "blocks need dynamic ones",
                "use another checkpoint",
            )
        inverse = bool(group.inputs or stored.layers_with(".weight_scale_inv"))
        act = ActFormat(type="e4m3", group=group.inputs, static=static)
        return LayerFormat(layout="fp8-blocks" if inverse else "scaled", code=E4M3, group=group, act=act)


def has_scales_of_rows(stored: StoredConfig) -> bool:
    """The config does not say; the files do."""
    return any(
        name.endswith(".weight_scale") and math.prod(tensor.shape) > 1
        for name, tensor in stored.tensors.items()
    )


class FbgemmScheme(QuantScheme):
    """Scales of rows, activations dynamic; their upper bound, `activation_scale_ub`, is not applied."""

    def rules(self, stored: StoredConfig, options: Options) -> Rules:
        format = LayerFormat(layout="scaled", code=E4M3, act=ActFormat(type="e4m3"))
        in_one = replace(format, layout="fbgemm-experts")
        of_experts = [
            Rule(exact(f"{name}_proj"), in_one, EXPERTS) for name in stored.layers_with("_proj_scale")
        ]
        left = plain(options.names("modules_to_not_convert"))
        return Rules((*left, *of_experts, Rule(EVERYTHING, format, LINEAR)))
