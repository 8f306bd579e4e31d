"""Mistral: every layer sees a sliding window, unless config.json says null."""

from __future__ import annotations

from pellucid.models.decoder import Decoder
from pellucid.models.decoder_config import (
    DecoderConfig,
    decoder_config,
    grouped_layers,
    heads_of,
    window_of,
)
from pellucid.models.fields import Fields


class Mistral(Decoder):
    """MistralForCausalLM (Jiang et al. 2023)."""

    @staticmethod
    def declare(config: Fields) -> DecoderConfig:
        windows = [window_of(config, 4096)] * config.size("num_hidden_layers")
        return decoder_config(config, grouped_layers(config, heads_of(config, num_kv=8), windows=windows))
