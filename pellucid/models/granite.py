"""Granite 3: Llama with a factor for embeddings, scores, what layers add, and logits."""

from __future__ import annotations

from dataclasses import replace

from pellucid.attention.base import Scores
from pellucid.layers.activation import Act
from pellucid.layers.experts import Routing, Sparse
from pellucid.models.decoder import Decoder
from pellucid.models.decoder_config import DecoderConfig, decoder_config, dense, grouped_layers, heads_of
from pellucid.models.fields import Fields

NAMES = {
    ".block_sparse_moe.input_linear.": ".mlp.experts.gate_up_proj.",
    ".block_sparse_moe.output_linear.": ".mlp.experts.down_proj.",
    ".block_sparse_moe.router.layer.": ".mlp.router.",
    ".block_sparse_moe.": ".mlp.",
}


class Granite(Decoder):
    """GraniteForCausalLM (Granite Team 2024)."""

    @staticmethod
    def declare(config: Fields) -> DecoderConfig:
        bias, scores = (
            config.bool("attention_bias", False),
            Scores(scale=config.positive("attention_multiplier", 1.0)),
        )
        mixers = grouped_layers(config, heads_of(config), qkv_bias=bias, o_bias=bias)
        mixers = [replace(mixer, scores=scores) for mixer in mixers]
        return replace(
            decoder_config(config, mixers, dense(config, bias=config.bool("mlp_bias", False))),
            embedding_scale=config.float("embedding_multiplier", 1.0),
            residual_scale=config.float("residual_multiplier", 1.0),
            logit_scale=1 / config.positive("logits_scaling", 1.0),
        )


class GraniteMoe(Granite):
    """GraniteMoeForCausalLM: the same with experts in every layer."""

    @staticmethod
    def declare(config: Fields) -> DecoderConfig:
        sparse = Sparse(
            hidden=config.size("intermediate_size"),
            act=Act(config.str("hidden_act", "silu")),
            routing=Routing(config.size("num_local_experts", 8), config.size("num_experts_per_tok", 2)),
            router="router",
        )
        dense = Granite.declare(config)
        return replace(dense, layers=tuple(replace(layer, mlp=sparse) for layer in dense.layers))

    @classmethod
    def rename(cls, key: str) -> str:
        """The checkpoint has names of its own for experts."""
        for theirs, ours in NAMES.items():
            key = key.replace(theirs, ours)
        return super().rename(key)
