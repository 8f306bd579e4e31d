"""Mixtral: Mistral with two of eight experts in every layer."""

from __future__ import annotations

from pellucid.layers.activation import Act
from pellucid.layers.experts import Routing, Sparse
from pellucid.models.decoder import Decoder
from pellucid.models.decoder_config import (
    DecoderConfig,
    decoder_config,
    grouped_layers,
    heads_of,
    window_of,
)
from pellucid.models.fields import Fields
from pellucid.models.rope import FamilyRope

NAMES = {
    ".block_sparse_moe.": ".mlp.",
    ".w1.": ".gate_proj.",
    ".w2.": ".down_proj.",
    ".w3.": ".up_proj.",
}


class Mixtral(Decoder):
    """MixtralForCausalLM (Jiang et al. 2024)."""

    @staticmethod
    def declare(config: Fields) -> DecoderConfig:
        windows = [window_of(config)] * config.size("num_hidden_layers")
        sparse = Sparse(
            hidden=config.size("intermediate_size"),
            act=Act(config.str("hidden_act", "silu")),
            routing=Routing(config.size("num_local_experts", 8), config.size("num_experts_per_tok", 2)),
        )
        rope = FamilyRope(theta=1e6)
        mixers = grouped_layers(config, heads_of(config, num_kv=8), windows=windows, rope=rope)
        return decoder_config(config, mixers, sparse, eps=1e-5)

    @classmethod
    def rename(cls, key: str) -> str:
        """The checkpoint has names of its own for experts."""
        for theirs, ours in NAMES.items():
            key = key.replace(theirs, ours)
        return super().rename(key)
