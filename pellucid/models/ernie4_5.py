"""ERNIE 4.5, dense: Llama in which neighbouring features turn together, tied unless told otherwise."""

from __future__ import annotations

from dataclasses import replace

from pellucid.models.decoder import Decoder
from pellucid.models.decoder_config import DecoderConfig, decoder_config, dense, grouped_layers, heads_of
from pellucid.models.fields import Fields
from pellucid.models.rope import FamilyRope


class Ernie45(Decoder):
    """Ernie4_5ForCausalLM (Baidu 2025)."""

    @staticmethod
    def declare(config: Fields) -> DecoderConfig:
        bias, rope = config.bool("use_bias", False), FamilyRope(theta=500000.0, interleaved=True)
        heads = heads_of(config, num_kv=2, dim=128)
        mixers = grouped_layers(config, heads, qkv_bias=bias, o_bias=bias, rope=rope)
        declared = decoder_config(config, mixers, dense(config, bias=bias), eps=1e-5)
        return replace(declared, tied=config.bool("tie_word_embeddings", True))
