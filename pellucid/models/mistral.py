"""Mistral: every layer sees a sliding window, unless config.json says null."""

from __future__ import annotations

from pellucid.models.decoder import Decoder
from pellucid.models.decoder_config import DecoderConfig, decoder_config, grouped_layers, heads_of
from pellucid.models.fields import Fields


class Mistral(Decoder):
    """MistralForCausalLM (Jiang et al. 2023)."""

    @staticmethod
    def declare(config: Fields) -> DecoderConfig:
        # A null window means none; a config.json without the field has the first model's.
        null = "sliding_window" in config.config and not config.has("sliding_window")
        window = None if null else config.size("sliding_window", 4096)
        windows = [window] * config.size("num_hidden_layers")
        return decoder_config(config, grouped_layers(config, heads_of(config, num_kv=8), windows=windows))
