"""GLM-4.5 and later: half of each head turns, and experts beside a shared one behind the first layers.

Layers behind the last one predict further tokens, as a drafter could; here nobody needs them.
"""

from __future__ import annotations

from pellucid.layers.activation import Act
from pellucid.layers.experts import Routing, SharedExpert, Sparse
from pellucid.models.builder import Builder
from pellucid.models.decoder import Decoder
from pellucid.models.decoder_config import DecoderConfig, decoder_config, dense, grouped_layers, heads_of
from pellucid.models.fields import Fields
from pellucid.models.rope import FamilyRope


class Glm4Moe(Decoder):
    """Glm4MoeForCausalLM (Z.ai 2025)."""

    def __init__(self, config: Fields, b: Builder) -> None:
        super().__init__(config, b)
        first, num = config.size("num_hidden_layers"), config.int("num_nextn_predict_layers", 1)
        self.ignored = (*self.ignored, *(f"model.layers.{i}.*" for i in range(first, first + num)))

    @staticmethod
    def declare(config: Fields) -> DecoderConfig:
        mixers = grouped_layers(
            config,
            heads_of(config, num_kv=8),
            qk_norm="head" if config.bool("use_qk_norm", False) else None,
            qkv_bias=config.bool("attention_bias", False),
            rope=FamilyRope(partial=0.5),
        )
        plain, sparse, first = dense(config), glm_experts(config), config.int("first_k_dense_replace", 1)
        return decoder_config(
            config, mixers, [plain if i < first else sparse for i in range(len(mixers))], eps=1e-5
        )


def glm_experts(config: Fields) -> Sparse:
    """DeepSeek-V3's router: by sigmoid and a bias, out of the groups whose two best add up to most."""
    hidden, num_shared = config.size("moe_intermediate_size", 1408), config.count("n_shared_experts", 1)
    return Sparse(
        hidden=hidden,
        act=Act(config.str("hidden_act", "silu")),
        routing=Routing(
            config.size("n_routed_experts", 128),
            config.size("num_experts_per_tok", 8),
            score="sigmoid",
            renormalise=config.bool("norm_topk_prob", True),
            scale=config.float("routed_scaling_factor", 1.0),
            floor=1e-20,
            groups=config.size("n_group", 1),
            top_groups=config.size("topk_group", 1),
            group_score="top2",
        ),
        shared=SharedExpert(hidden=num_shared * hidden) if num_shared else None,
        router_is_wide=True,
        choice_bias="gate.e_score_correction_bias",
    )
