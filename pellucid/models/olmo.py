"""OLMo 2 and 3: norms behind attention and MLP alone, and over all queries and all keys."""

from __future__ import annotations

from dataclasses import replace

from pellucid.layers.norm import NormSpec
from pellucid.models.decoder import Decoder
from pellucid.models.decoder_config import (
    DecoderConfig,
    Norms,
    decoder_config,
    every,
    grouped_layers,
    heads_of,
    layer_types,
    windows_of,
)
from pellucid.models.fields import Fields
from pellucid.models.rope import FamilyRope, WindowRope

THETA = 500000.0
NORMS = Norms(
    before_attention=None,
    behind_attention="post_attention_layernorm",
    before_mlp=None,
    behind_mlp="post_feedforward_layernorm",
)


class Olmo2(Decoder):
    """Olmo2ForCausalLM (OLMo Team 2024)."""

    @staticmethod
    def declare(config: Fields) -> DecoderConfig:
        bias = config.bool("attention_bias", False)
        mixers = grouped_layers(config, heads_of(config), qk_norm="width", qkv_bias=bias, o_bias=bias)
        norm = NormSpec(config.float("rms_norm_eps", 1e-5), wide=True)
        return replace(decoder_config(config, mixers), norm=norm, norms=NORMS)


class Olmo3(Decoder):
    """Olmo3ForCausalLM (OLMo Team 2025): windows in three layers of four, scaled positions in the others."""

    @staticmethod
    def declare(config: Fields) -> DecoderConfig:
        bias, types = config.bool("attention_bias", False), layer_types(config, every(4, config))
        mixers = grouped_layers(
            config,
            heads_of(config),
            types=types,
            windows=windows_of(types, config.size("sliding_window", 4096)),
            qk_norm="width",
            qkv_bias=bias,
            o_bias=bias,
            # As transformers has it, rope_theta beside rope_scaling is for full attention alone, too.
            rope=FamilyRope(theta=THETA, windows=WindowRope(theta=THETA)),
        )
        norm = NormSpec(config.float("rms_norm_eps", 1e-5), wide=True)
        return replace(decoder_config(config, mixers), norm=norm, norms=NORMS)
