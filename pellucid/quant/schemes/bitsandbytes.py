"""bitsandbytes' dialect, as transformers writes it, of checkpoints that are stored quantized."""

from __future__ import annotations

import math
from collections import Counter

from pellucid.quant.codes import LUT4, S8, Group
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

ITEM_SIZES = {"F32": 4, "F16": 2, "BF16": 2}  # of which the bytes may be elements


class BitsAndBytesScheme(QuantScheme):
    """`llm_int8_threshold` means nothing here: activations are not rounded, so no outliers are split off."""

    def rules(self, stored: StoredConfig, options: Options) -> Rules:
        in_8_bits = options.flag("load_in_8bit", "_load_in_8bit")
        quantized = stored.layers_with(".SCB" if in_8_bits else ".weight.absmax")
        if stored.tensors and not quantized:
            raise refusal(
                "plain weights and a bitsandbytes config",
                "it asks for quantization while loading",
                "remove quantization_config from config.json",
            )
        format = LayerFormat(layout="bnb-int8", code=S8) if in_8_bits else format_of(options, stored)
        kinds = WITH_HEAD if "lm_head" in quantized else LINEAR
        rules = (*plain(options.names("llm_int8_skip_modules")), Rule(EVERYTHING, format, kinds))
        return Rules(rules, stored.layers_with(".weight") - quantized)


def format_of(options: Options, stored: StoredConfig) -> LayerFormat:
    """4 bits; the type is needed only to name a tensor, whose table says the rest."""
    type = options.text("bnb_4bit_quant_type", default="fp4")
    if type not in ("nf4", "fp4"):
        raise refusal(f"bitsandbytes' {type!r}", "there are nf4 and fp4", "use another checkpoint")
    nested = {"nested"} if options.flag("bnb_4bit_use_double_quant") else set[str]()
    group = Group(1, options.number("bnb_4bit_blocksize", default=block_in(stored) or 64))
    return LayerFormat(layout="bnb4", code=LUT4, group=group, options=frozenset({type, *nested}))


def block_in(stored: StoredConfig) -> int | None:
    """The weights of a block, a power of two: configs do not say, most of the files' matrices do."""
    found = Counter[int]()
    for path in stored.layers_with(".weight.absmax"):
        weight, blocks = (stored.tensors.get(f"{path}.weight{end}") for end in ("", ".absmax"))
        if weight is not None and blocks is not None and math.prod(blocks.shape) > 1:
            num_weights = 2 * math.prod(weight.shape) * ITEM_SIZES.get(weight.type, 1)
            found[1 << (-(-num_weights // math.prod(blocks.shape)) - 1).bit_length()] += 1
    return max(found, key=lambda size: (found[size], size)) if found else None
