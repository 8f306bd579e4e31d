"""Seed-OSS: Llama with biases for queries, keys and values."""

from __future__ import annotations

from pellucid.models.decoder import Decoder
from pellucid.models.decoder_config import DecoderConfig, decoder_config, dense, grouped_layers, heads_of
from pellucid.models.fields import Fields


class SeedOss(Decoder):
    """SeedOssForCausalLM (ByteDance Seed Team 2025)."""

    @staticmethod
    def declare(config: Fields) -> DecoderConfig:
        mixers = grouped_layers(
            config,
            heads_of(config, num_kv=8, dim=128),
            qkv_bias=config.bool("attention_bias", True),
            o_bias=config.bool("attention_out_bias", False),
        )
        return decoder_config(config, mixers, dense(config, bias=config.bool("mlp_bias", False)))
