"""Qwen3, the dense models: queries and keys are normalized head by head."""

from __future__ import annotations

from dataclasses import replace

from pellucid.models.decoder import Decoder, DecoderConfig, decoder_config, qwen_windows
from pellucid.models.fields import Fields


class Qwen3(Decoder):
    """Qwen3ForCausalLM (Qwen Team 2025)."""

    @staticmethod
    def declare(config: Fields) -> DecoderConfig:
        bias = config.bool("attention_bias", False)
        common = decoder_config(config, default_head_dim=128, default_num_kv_heads=32)
        return replace(common, qk_norm=True, qkv_bias=bias, o_bias=bias, windows=qwen_windows(config))
