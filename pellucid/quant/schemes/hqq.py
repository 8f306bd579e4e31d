"""HQQ's dialect, as transformers writes it: one format for all layers, or one for each of their kinds."""

from __future__ import annotations

import re

from pellucid.quant.codes import S8, U2, U3, U4, U5, U6, Group
from pellucid.quant.layouts.base import LayerFormat
from pellucid.quant.schemes.base import (
    EVERYTHING,
    WITH_HEAD,
    Options,
    QuantScheme,
    Rule,
    Rules,
    StoredConfig,
    refusal,
    regex,
)

CODES = {2: U2, 3: U3, 4: U4, 5: U5, 6: U6, 8: S8}
WAY_OUT = "quantize the model again, or use another checkpoint"


class HqqScheme(QuantScheme):
    def rules(self, stored: StoredConfig, options: Options) -> Rules:
        said = options.part("quant_config")
        rules = [Rule(tagged(name), None) for name in options.names("skip_modules")]
        if said.has("weight_quant_params"):
            rules.append(Rule(EVERYTHING, hqq_format(said), WITH_HEAD))
        else:
            for tag, own in options.parts("quant_config").items():
                rules.append(Rule(tagged(tag), hqq_format(own), WITH_HEAD))
        return Rules(tuple(rules), stored.layers_with(".weight") - stored.layers_with(".W_q"))


def tagged(tag: str) -> re.Pattern[str]:
    """Layers of a kind, such as `self_attn.q_proj`: their names without numbers and what is around them."""
    return regex(r"(?:.*\.)?" + r"\.(?:\d+\.)*".join(map(re.escape, tag.split("."))) + "$")


def hqq_format(options: Options) -> LayerFormat:
    weights = options.part("weight_quant_params")
    bits, axis = weights.number("nbits"), weights.number("axis", default=0)
    if bits not in CODES:
        raise refusal(f"HQQ of {bits} bits", f"there are {', '.join(map(str, CODES))}", WAY_OUT)
    if axis != 1:
        raise refusal(f"HQQ along axis {axis}", "groups along inputs are read, axis 1", WAY_OUT)
    if not weights.flag("channel_wise", default=True):
        raise refusal("HQQ with one scale for a matrix", "there are groups", WAY_OUT)
    if weights.flag("view_as_float"):
        raise refusal("HQQ's codes as floats", "they are read as integers", "save it with view_as_float off")
    if options.has("scale_quant_params", "zero_quant_params"):
        raise refusal("HQQ with quantized scales", "scales of floats are read", WAY_OUT)
    return LayerFormat(
        layout="hqq",
        code=CODES[bits],
        group=Group(1, weights.number("group_size", default=0)),
        options=frozenset({"asym"}),
    )
