"""OLMoE: OLMo 2's norms of queries and keys, norms before attention and MLP, and experts in every layer."""

from __future__ import annotations

from pellucid.layers.activation import Act
from pellucid.layers.experts import Routing, Sparse
from pellucid.models.decoder import Decoder
from pellucid.models.decoder_config import DecoderConfig, decoder_config, grouped_layers, heads_of
from pellucid.models.fields import Fields


class Olmoe(Decoder):
    """OlmoeForCausalLM (Muennighoff et al. 2024)."""

    @staticmethod
    def declare(config: Fields) -> DecoderConfig:
        if config.has("clip_qkv"):
            raise ValueError(
                f"clip_qkv in config.json is {config.float('clip_qkv')}, which is not supported; "
                "OLMoE's releases have null"
            )
        bias = config.bool("attention_bias", False)
        mixers = grouped_layers(config, heads_of(config), qk_norm="width", qkv_bias=bias, o_bias=bias)
        sparse = Sparse(
            hidden=config.size("intermediate_size"),
            act=Act(config.str("hidden_act", "silu")),
            routing=Routing(
                config.size("num_experts", 64),
                config.size("num_experts_per_tok", 8),
                renormalise=config.bool("norm_topk_prob", False),
            ),
        )
        return decoder_config(config, mixers, sparse, eps=1e-5)
