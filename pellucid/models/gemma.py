"""Gemma 2 and 3: norms on both sides of each layer, windows in most layers, soft caps in Gemma 2."""

from __future__ import annotations

from dataclasses import replace

from pellucid.attention.base import Scores
from pellucid.layers.activation import Act
from pellucid.layers.norm import NormSpec
from pellucid.models.builder import Builder
from pellucid.models.decoder import Decoder
from pellucid.models.decoder_config import (
    GQA,
    DecoderConfig,
    Dense,
    LayerConfig,
    Norms,
    every,
    heads_of,
    layer_types,
    sizes,
)
from pellucid.models.fields import Fields
from pellucid.models.rope import FamilyRope, rope_config
from pellucid.models.text_config import text_key


class Gemma2(Decoder):
    """Gemma2ForCausalLM (Gemma Team 2024)."""

    @staticmethod
    def declare(config: Fields) -> DecoderConfig:
        heads, window = heads_of(config, num=8, num_kv=4, dim=256), config.number("sliding_window", 4096)
        scores = Scores(
            scale=config.float("query_pre_attn_scalar", 256) ** -0.5,
            softcap=config.number("attn_logit_softcapping", 50.0),
        )
        mlp = Dense(
            hidden=config.size("intermediate_size"),
            act=Act(config.str("hidden_activation", "gelu_pytorch_tanh")),
        )
        bias = config.bool("attention_bias", False)

        def layer(kind: str) -> LayerConfig:
            seen = replace(scores, window=int(window) if window and kind == "sliding_attention" else None)
            rope = rope_config(config, heads.dim, kind)
            return LayerConfig(
                mixer=GQA(heads=heads, scores=seen, rope=rope, qkv_bias=bias, o_bias=bias), mlp=mlp
            )

        return DecoderConfig(
            **sizes(config, tied=True),
            norm=NormSpec(config.float("rms_norm_eps", 1e-6), wide=True, offset=1.0),
            layers=tuple(map(layer, layer_types(config, every(2, config)))),
            norms=Norms(
                behind_attention="post_attention_layernorm",
                before_mlp="pre_feedforward_layernorm",
                behind_mlp="post_feedforward_layernorm",
            ),
            embedding_scale=config.size("hidden_size") ** 0.5,
            logit_cap=config.number("final_logit_softcapping", 30.0),
        )


class Gemma3(Decoder):
    """Gemma3ForCausalLM, and the text of Gemma3ForConditionalGeneration (Gemma Team 2025)."""

    @classmethod
    def rename(cls, key: str) -> str:
        return text_key(key)

    def __init__(self, config: Fields, b: Builder) -> None:
        super().__init__(config, b)
        self.ignored += ("*vision_tower.*", "*multi_modal_projector.*")

    @staticmethod
    def declare(config: Fields) -> DecoderConfig:
        if config.bool("use_bidirectional_attention", False):
            raise ValueError("use_bidirectional_attention in config.json is true: this is no causal model")
        types = layer_types(config, every(config.size("sliding_window_pattern", 6), config))
        caps = {"attn_logit_softcapping": None, "final_logit_softcapping": None, "layer_types": types}
        common = Gemma2.declare(Fields(caps | dict(config.config) | {"layer_types": types}))
        family = FamilyRope(theta=1e6, local_theta=1e4, stretches_windows=False)

        def layer(kind: str, alike: LayerConfig) -> LayerConfig:
            mixer = alike.mixer
            assert isinstance(mixer, GQA)
            rope = rope_config(config, mixer.heads.dim, kind, family)
            return replace(alike, mixer=replace(mixer, rope=rope, qk_norm="head"))

        return replace(common, layers=tuple(map(layer, types, common.layers)))
