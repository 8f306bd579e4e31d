"""Mistral: every layer sees a sliding window, unless config.json says null."""

from __future__ import annotations

from dataclasses import replace

from pellucid.models.decoder import Decoder, DecoderConfig, decoder_config
from pellucid.models.fields import Fields


class Mistral(Decoder):
    """MistralForCausalLM (Jiang et al. 2023)."""

    @staticmethod
    def declare(config: Fields) -> DecoderConfig:
        common = decoder_config(config, default_num_kv_heads=8)
        # A null window means none; a config.json without the field has the first model's.
        null = "sliding_window" in config.config and not config.has("sliding_window")
        window = None if null else config.size("sliding_window", 4096)
        return replace(common, windows=(window,) * common.num_layers)
