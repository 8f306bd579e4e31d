"""Qwen2 and Qwen2.5, the dense models: queries, keys and values have a bias."""

from __future__ import annotations

from dataclasses import replace

from pellucid.models.decoder import Decoder, DecoderConfig, decoder_config, qwen_windows
from pellucid.models.fields import Fields


class Qwen2(Decoder):
    """Qwen2ForCausalLM (Qwen Team 2024)."""

    @staticmethod
    def declare(config: Fields) -> DecoderConfig:
        common = decoder_config(config, default_num_kv_heads=32)
        return replace(common, qkv_bias=True, windows=qwen_windows(config))
