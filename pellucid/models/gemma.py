"""Gemma; Gemma 2 and 3: norms on both sides of each layer, windows in most layers, soft caps in Gemma 2."""

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
    decoder_config,
    dense,
    every,
    grouped_layers,
    heads_of,
    layer_types,
    sizes,
)
from pellucid.models.fields import Fields
from pellucid.models.rope import FamilyRope, WindowRope, rope_config
from pellucid.models.text_config import text_key

TANH = "gelu_pytorch_tanh"


class Gemma(Decoder):
    """GemmaForCausalLM (Gemma Team 2024), whose releases say "gelu" and mean its approximation by tanh."""

    @staticmethod
    def declare(config: Fields) -> DecoderConfig:
        heads, bias = heads_of(config, num=16, num_kv=16, dim=256), config.bool("attention_bias", False)
        mlp = dense(config, act=TANH)
        mlp = replace(mlp, act=Act(TANH)) if mlp.act == Act("gelu") else mlp
        return replace(
            decoder_config(config, grouped_layers(config, heads, qkv_bias=bias, o_bias=bias), mlp),
            tied=config.bool("tie_word_embeddings", True),
            norm=NormSpec(config.float("rms_norm_eps", 1e-6), wide=True, offset=1.0),
            embedding_scale=config.size("hidden_size") ** 0.5,
        )


class Gemma2(Decoder):
    """Gemma2ForCausalLM (Gemma Team 2024)."""

    @staticmethod
    def declare(config: Fields) -> DecoderConfig:
        heads, window = heads_of(config, num=8, num_kv=4, dim=256), config.number("sliding_window", 4096)
        scores = Scores(
            scale=config.positive("query_pre_attn_scalar", 256) ** -0.5,
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
        return super().rename(text_key(key))

    def __init__(self, config: Fields, b: Builder) -> None:
        super().__init__(config, b)
        self.ignored += ("*vision_tower.*", "*multi_modal_projector.*")

    @staticmethod
    def declare(config: Fields) -> DecoderConfig:
        types = layer_types(config, every(config.size("sliding_window_pattern", 6), config))
        # Norms over heads took the place of caps on scores, whatever config.json says.
        fixed = {"attn_logit_softcapping": None, "layer_types": types}
        common = Gemma2.declare(Fields({"final_logit_softcapping": None} | dict(config.config) | fixed))
        family = FamilyRope(theta=1e6, windows=WindowRope(theta=1e4, name="rope_local_base_freq"))

        def layer(kind: str, alike: LayerConfig) -> LayerConfig:
            mixer = alike.mixer
            assert isinstance(mixer, GQA)
            rope = rope_config(config, mixer.heads.dim, kind, family)
            return replace(alike, mixer=replace(mixer, rope=rope, qk_norm="head"))

        return replace(common, layers=tuple(map(layer, types, common.layers)))
