"""AWQ's dialect, as AutoAWQ and GPTQModel write it."""

from __future__ import annotations

from pellucid.quant.codes import U4, Group
from pellucid.quant.layouts.base import LayerFormat
from pellucid.quant.schemes.base import (
    EVERYTHING,
    LINEAR,
    WITH_HEAD,
    Options,
    QuantScheme,
    Rule,
    Rules,
    StoredConfig,
    plain,
    refusal,
)


class AwqScheme(QuantScheme):
    def rules(self, stored: StoredConfig, options: Options) -> Rules:
        version = options.text("version", "checkpoint_format", "format", default="gemm").lower()
        if version != "gemm":
            raise refusal(
                f"AWQ of version {version!r}", "its weights lie otherwise", "convert it to version 'gemm'"
            )
        kinds = WITH_HEAD if options.flag("lm_head") else LINEAR
        rules = plain(options.names("modules_to_not_convert"))
        rules.append(Rule(EVERYTHING, awq_format(options), kinds))
        return Rules(tuple(rules), stored.layers_with(".weight") - stored.layers_with(".qweight"))


def awq_format(options: Options) -> LayerFormat:
    bits = options.number("bits", "w_bit")
    if bits != 4:
        raise refusal(f"AWQ of {bits} bits", "AWQ has 4 bits", "use another checkpoint")
    inputs = options.number("group_size", "q_group_size", default=128)
    return LayerFormat(layout="awq", code=U4, group=Group(1, max(0, inputs)))
