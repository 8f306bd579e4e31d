"""DeepSeek-V2 and -V3 and what is built like them: latent attention, and experts behind the first layers.

Layers behind the last one predict further tokens, in training or as a drafter; here nobody needs them.
"""

from __future__ import annotations

import math
from typing import ClassVar

from pellucid.layers.activation import Act
from pellucid.layers.experts import Routing, SharedExpert, Sparse
from pellucid.layers.latent import LatentHeads
from pellucid.layers.norm import NormSpec
from pellucid.layers.rope import RopeConfig
from pellucid.models.builder import Builder
from pellucid.models.decoder import Decoder
from pellucid.models.decoder_config import MLA, DecoderConfig, LayerConfig, dense, sizes
from pellucid.models.fields import Fields
from pellucid.models.rope import rope_config, scaling_fields

LATENT_EPS = 1e-6  # of the norms of latents, whatever config.json says of the others


class DeepseekV2(Decoder):
    """DeepseekV2ForCausalLM (DeepSeek-AI 2024, arXiv 2405.04434)."""

    always_interleaved: ClassVar[bool] = True
    eps: ClassVar[float] = 1e-6  # of norms, where config.json does not say
    num_dense: ClassVar[int] = 0  # leading layers without experts, where config.json does not say
    default_q_rank: ClassVar[int] = 1536
    default_hidden: ClassVar[int] = 1407  # of an expert
    num_shared: ClassVar[int] = 2  # experts that all tokens take, where config.json does not say
    asks_for_bias: ClassVar[bool] = True  # whether `mlp_bias` in config.json counts
    choice_bias: ClassVar[str | None] = None

    def __init__(self, config: Fields, b: Builder) -> None:
        super().__init__(config, b)
        first = config.size("num_hidden_layers")
        num = max(config.int("num_nextn_predict_layers", 1), config.int("num_mtp_layers", 1))
        self.ignored = (*self.ignored, *(f"model.layers.{i}.*" for i in range(first, first + num)))

    @classmethod
    def declare(cls, config: Fields) -> DecoderConfig:
        bias = cls.asks_for_bias and config.bool("mlp_bias", False)
        mixer, plain, experts = cls.mixer(config), dense(config, bias=bias), cls.experts(config, bias=bias)
        return DecoderConfig(
            **sizes(config),
            norm=NormSpec(config.float("rms_norm_eps", cls.eps)),
            layers=tuple(
                LayerConfig(mixer=mixer, mlp=plain if is_dense else experts)
                for is_dense in cls.are_dense(config)
            ),
        )

    @classmethod
    def mixer(cls, config: Fields) -> MLA:
        """The attention of every layer."""
        has_no_q_rank = "q_lora_rank" in config.config and not config.has("q_lora_rank")
        heads = LatentHeads(
            num=config.size("num_attention_heads"),
            nope=config.size("qk_nope_head_dim", 128),
            rope=config.size("qk_rope_head_dim", 64),
            value=config.size("v_head_dim", 128),
            rank=config.size("kv_lora_rank", 512),
            q_rank=None if has_no_q_rank else config.size("q_lora_rank", cls.default_q_rank),
        )
        rope, bias = rope_config(config, heads.rope), config.bool("attention_bias", False)
        return MLA(
            heads=heads,
            scale=(heads.nope + heads.rope) ** -0.5 * stretch(config, rope) ** 2,
            rope=rope,
            interleaved=cls.always_interleaved or config.bool("rope_interleave", True),
            latent_norm=NormSpec(LATENT_EPS),
            bias=bias,
            o_bias=bias,
        )

    @classmethod
    def experts(cls, config: Fields, *, bias: bool) -> Sparse:
        """The MLP of layers that mix experts.  Raises ValueError for routers that are not known.

        bias: of those that all tokens take.
        """
        hidden = config.size("moe_intermediate_size", cls.default_hidden)
        num_shared = config.count("n_shared_experts", cls.num_shared)
        return Sparse(
            hidden=hidden,
            act=Act(config.str("hidden_act", "silu")),
            routing=cls.routing(config),
            shared=SharedExpert(hidden=num_shared * hidden, bias=bias) if num_shared else None,
            router_is_wide=True,
            choice_bias=cls.choice_bias,
        )

    @classmethod
    def routing(cls, config: Fields) -> Routing:
        """How experts are chosen: by softmax, perhaps out of the groups that have the best ones."""
        method = config.str("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            raise ValueError(
                f"topk_method in config.json is {method!r}, must be 'greedy' or 'group_limited_greedy'"
            )
        is_grouped = method == "group_limited_greedy"
        return Routing(
            num_experts=config.size("n_routed_experts", 64),
            top_k=config.size("num_experts_per_tok"),
            renormalise=False,
            scale=config.float("routed_scaling_factor", 1.0),
            groups=config.size("n_group") if is_grouped else 1,
            top_groups=config.size("topk_group") if is_grouped else 1,
        )

    @classmethod
    def are_dense(cls, config: Fields) -> list[bool]:
        """Of each layer, whether its MLP is one for all tokens.  Raises ValueError for what is not known."""
        num = config.size("num_hidden_layers")
        if config.int("moe_layer_freq", 1) != 1:
            raise ValueError(
                f"moe_layer_freq in config.json is {config.int('moe_layer_freq')}, must be 1: experts in "
                "every layer behind the first ones"
            )
        if not config.has("mlp_layer_types"):
            first = config.int("first_k_dense_replace", cls.num_dense)
            return [i < first for i in range(num)]
        types = config.strs("mlp_layer_types")
        if len(types) != num or set(types) - {"dense", "sparse"}:
            raise ValueError(f"mlp_layer_types in config.json must be 'dense' or 'sparse', {num} times")
        return [kind == "dense" for kind in types]


class DeepseekV3(DeepseekV2):
    """DeepseekV3ForCausalLM (DeepSeek-AI 2024, arXiv 2412.19437); Kimi K2 is one, too."""

    always_interleaved = False
    asks_for_bias = False
    num_dense = 3
    default_hidden = 2048
    num_shared = 1
    choice_bias = "gate.e_score_correction_bias"
    default_routing: ClassVar[tuple[int, int, int, int, float]] = (256, 8, 8, 4, 2.5)

    @classmethod
    def routing(cls, config: Fields) -> Routing:
        """By sigmoid and a bias, out of the groups whose two best add up to most."""
        num_experts, top_k, groups, top_groups, scale = cls.default_routing
        return Routing(
            num_experts=config.size("n_routed_experts", num_experts),
            top_k=config.size("num_experts_per_tok", top_k),
            score="sigmoid",
            renormalise=config.bool("norm_topk_prob", True),
            scale=config.float("routed_scaling_factor", scale),
            floor=1e-20,
            groups=config.size("n_group", groups),
            top_groups=config.size("topk_group", top_groups),
            group_score="top2",
        )


class DeepseekV32(DeepseekV3):
    """DeepseekV32ForCausalLM (DeepSeek-AI 2025), as long as its queries see all keys.

    What chooses among more than `index_topk` of them is not loaded; `Checkpoint` bounds texts by that.
    """

    always_interleaved = True

    def __init__(self, config: Fields, b: Builder) -> None:
        super().__init__(config, b)
        self.ignored = (*self.ignored, "*.self_attn.indexer.*")


class Glm4MoeLite(DeepseekV3):
    """Glm4MoeLiteForCausalLM (GLM-4.7-Flash, Z.ai 2026)."""

    eps = 1e-5
    num_dense = 1
    default_q_rank = 768
    default_hidden = 1536
    default_routing = (64, 4, 1, 1, 1.8)


def stretch(config: Fields, rope: RopeConfig) -> float:
    """What the softmax of a stretched model is sharpened by: `mscale_all_dim` of yarn, for q and k each."""
    weight = scaling_fields(config, "full_attention").float("mscale_all_dim", 0.0)
    if rope.kind == "default" or not weight or rope.factor <= 1:
        return 1.0
    return 0.1 * weight * math.log(rope.factor) + 1.0
