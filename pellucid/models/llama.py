"""Llama, from the first to 3.x, and the many models that share its config.json."""

from __future__ import annotations

from pellucid.models.decoder import Decoder
from pellucid.models.decoder_config import DecoderConfig, decoder_config, dense, grouped_layers, heads_of
from pellucid.models.fields import Fields


class Llama(Decoder):
    """LlamaForCausalLM (Touvron et al. 2023)."""

    @staticmethod
    def declare(config: Fields) -> DecoderConfig:
        bias = config.bool("attention_bias", False)
        mixers = grouped_layers(config, heads_of(config), qkv_bias=bias, o_bias=bias)
        return decoder_config(config, mixers, dense(config, bias=config.bool("mlp_bias", False)))
