"""Llama 4, its text: attention in chunks, but in every fourth layer, and experts of which a token takes one.

The layers that see everything do not turn positions; there queries grow with them instead.
"""

from __future__ import annotations

from dataclasses import replace

from pellucid.attention.base import Scores
from pellucid.layers.activation import Act
from pellucid.layers.experts import Routing, SharedExpert, Sparse
from pellucid.layers.norm import NormSpec
from pellucid.layers.position_scale import PositionScale
from pellucid.layers.rope import RopeConfig
from pellucid.models.builder import Builder
from pellucid.models.decoder import Decoder
from pellucid.models.decoder_config import (
    GQA,
    MLP,
    DecoderConfig,
    Dense,
    LayerConfig,
    heads_of,
    layer_types,
    sizes,
)
from pellucid.models.fields import Fields
from pellucid.models.rope import FamilyRope, rope_config
from pellucid.models.smollm3 import turning
from pellucid.models.text_config import text_key

KINDS = ("chunked_attention", "full_attention")
CHUNK = 8192  # tokens, where config.json does not say


class Llama4(Decoder):
    """Llama4ForCausalLM, and the text of Llama4ForConditionalGeneration (Meta 2025)."""

    @classmethod
    def rename(cls, key: str) -> str:
        return super().rename(text_key(key).replace(".feed_forward.", ".mlp."))

    def __init__(self, config: Fields, b: Builder) -> None:
        super().__init__(config, b)
        self.ignored += ("*vision_model.*", "*multi_modal_projector.*")

    @staticmethod
    def declare(config: Fields) -> DecoderConfig:
        turns, chunk = turning(config), config.number("attention_chunk_size", CHUNK)
        types = layer_types(config, [KINDS[0] if turn and chunk else KINDS[1] for turn in turns], known=KINDS)
        heads = heads_of(config, num=40, num_kv=8, dim=128)
        bias, normalizes = config.bool("attention_bias", False), config.bool("use_qk_norm", True)
        family, grows = FamilyRope(theta=500000.0, interleaved=True), growth(config)

        def rope(kind: str) -> RopeConfig:
            found = rope_config(config, heads.dim, kind, family)
            # Norms come behind what turns, and take any factor out of it.
            return replace(found, attention_factor=1.0) if normalizes else found

        def mixer(kind: str, turn: bool) -> GQA:
            seen = int(chunk) if chunk and kind == KINDS[0] else None
            return GQA(
                heads=heads,
                scores=Scores(scale=heads.dim**-0.5, chunk=seen),
                rope=rope(kind) if turn else None,
                qk_norm="plain" if turn and normalizes else None,
                q_scale=None if turn else grows,
                qkv_bias=bias,
                o_bias=bias,
            )

        return DecoderConfig(
            **sizes(config),
            norm=NormSpec(config.float("rms_norm_eps", 1e-5)),
            layers=tuple(
                LayerConfig(mixer=mixer(kind, turn), mlp=mlp)
                for kind, turn, mlp in zip(types, turns, mlps(config), strict=True)
            ),
        )


def growth(config: Fields) -> PositionScale | None:
    """Of queries that do not turn."""
    if not config.config.get("attn_temperature_tuning", True):  # true, or a number
        return None
    return PositionScale(config.float("attn_scale", 0.1), config.size("floor_scale", CHUNK))


def mlps(config: Fields) -> list[MLP]:
    """Of each layer: experts in every `interleave_moe_layer_step`-th, or in those of `moe_layers`."""
    num, step = config.size("num_hidden_layers"), config.size("interleave_moe_layer_step", 1)
    sparse = set(config.ints("moe_layers", range(step - 1, num, step)))
    hidden, act = config.size("intermediate_size"), Act(config.str("hidden_act", "silu"))
    experts = Sparse(
        hidden=hidden,
        act=act,
        routing=Routing(
            config.size("num_local_experts", 16),
            config.size("num_experts_per_tok", 1),
            score="sigmoid",
            renormalise=False,
        ),
        shared=SharedExpert(hidden=hidden, name="shared_expert"),
        weighs_input=True,
        router="router",
        transposed=True,
    )
    dense = Dense(hidden=config.size("intermediate_size_mlp", 16384), act=act)
    return [experts if i in sparse else dense for i in range(num)]
