"""Qwen3, the dense models: queries and keys are normalized head by head."""

from __future__ import annotations

from pellucid.models.decoder import Decoder
from pellucid.models.decoder_config import DecoderConfig, decoder_config, grouped_layers, heads_of
from pellucid.models.fields import Fields
from pellucid.models.qwen2 import qwen_windows


class Qwen3(Decoder):
    """Qwen3ForCausalLM (Qwen Team 2025)."""

    @staticmethod
    def declare(config: Fields) -> DecoderConfig:
        bias, heads = config.bool("attention_bias", False), heads_of(config, num_kv=32, dim=128)
        mixers = grouped_layers(
            config, heads, windows=qwen_windows(config), qk_norm="head", qkv_bias=bias, o_bias=bias
        )
        return decoder_config(config, mixers)
