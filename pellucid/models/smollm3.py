"""SmolLM3: Llama, of whose layers every fourth knows nothing of positions (NoPE, Yang et al. 2025)."""

from __future__ import annotations

from dataclasses import replace

from pellucid.models.decoder import Decoder
from pellucid.models.decoder_config import (
    DecoderConfig,
    decoder_config,
    dense,
    grouped_layers,
    heads_of,
    layer_types,
    sizes,
    window_of,
    windows_of,
)
from pellucid.models.fields import Fields
from pellucid.models.rope import FamilyRope


class SmolLM3(Decoder):
    """SmolLM3ForCausalLM (Hugging Face 2025)."""

    @staticmethod
    def declare(config: Fields) -> DecoderConfig:
        turns, bias = turning(config), config.bool("attention_bias", False)
        window = window_of(config) if config.bool("use_sliding_window", False) else None
        types = layer_types(config, ["full_attention" if turn else "sliding_attention" for turn in turns])
        mixers = grouped_layers(
            config,
            heads_of(config, num_kv=4),
            windows=windows_of(types, window),
            qkv_bias=bias,
            o_bias=bias,
            rope=FamilyRope(theta=2000000.0),
        )
        mixers = [
            mixer if turn else replace(mixer, rope=None) for mixer, turn in zip(mixers, turns, strict=True)
        ]
        mlp = dense(config, bias=config.bool("mlp_bias", False))
        return replace(decoder_config(config, mixers, mlp), **sizes(config, tied=True))


def turning(config: Fields) -> list[bool]:
    """Whether queries and keys of each layer turn; `no_rope_layers` has a 1 where they do."""
    num, interval = config.size("num_hidden_layers"), config.size("no_rope_layer_interval", 4)
    if not config.config.get("no_rope_layers"):  # absent, null or empty
        return [(i + 1) % interval != 0 for i in range(num)]
    turns = config.ints("no_rope_layers")
    if len(turns) < num:
        raise ValueError(f"no_rope_layers in config.json has {len(turns)} entries for {num} layers")
    return [turn != 0 for turn in turns[:num]]
