"""Llama, from the first to 3.x, and the many models that share its config.json."""

from __future__ import annotations

from dataclasses import replace

from pellucid.models.decoder import Decoder, DecoderConfig, decoder_config
from pellucid.models.fields import Fields


class Llama(Decoder):
    """LlamaForCausalLM (Touvron et al. 2023)."""

    @staticmethod
    def declare(config: Fields) -> DecoderConfig:
        bias = config.bool("attention_bias", False)
        mlp_bias = config.bool("mlp_bias", False)
        return replace(decoder_config(config), qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)
