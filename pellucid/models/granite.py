"""Granite 3 and 4: Llama with a factor for embeddings, scores, what layers add, and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pellucid.attention.base import Scores
from pellucid.layers.activation import Act
from pellucid.layers.experts import Routing, SharedExpert, Sparse
from pellucid.models.decoder import Decoder
from pellucid.models.decoder_config import (
    GQA,
    DecoderConfig,
    Dense,
    LayerConfig,
    decoder_config,
    dense,
    grouped_layers,
    heads_of,
    layer_types,
)
from pellucid.models.fields import Fields

NAMES = {
    ".block_sparse_moe.input_linear.": ".mlp.experts.gate_up_proj.",
    ".block_sparse_moe.output_linear.": ".mlp.experts.down_proj.",
    ".block_sparse_moe.router.layer.": ".mlp.router.",
    ".block_sparse_moe.": ".mlp.",
}
ATTENDING = ("attention", "full_attention")
KINDS = (*ATTENDING, "mamba", "linear_attention")  # of Granite 4's layers


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


class GraniteMoeShared(GraniteMoe):
    """GraniteMoeSharedForCausalLM: and an expert that every token takes."""

    stacked: ClassVar[dict[str, tuple[str, ...]]] = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}

    @staticmethod
    def declare(config: Fields) -> DecoderConfig:
        declared, hidden = GraniteMoe.declare(config), config.int("shared_intermediate_size", 1024)
        if not hidden:
            return declared

        def shared(layer: LayerConfig) -> LayerConfig:
            assert isinstance(layer.mlp, Sparse)
            return replace(
                layer, mlp=replace(layer.mlp, shared=SharedExpert(hidden=hidden, name="shared_mlp"))
            )

        return replace(declared, layers=tuple(map(shared, declared.layers)))

    @classmethod
    def rename(cls, key: str) -> str:
        return super().rename(named_as_ours(key, ".shared_mlp.", ".mlp.shared_mlp."))


class GraniteDense4(Granite):
    """GraniteMoeHybridForCausalLM (Granite Team 2025), of which all layers attend and none has experts."""

    stacked: ClassVar[dict[str, tuple[str, ...]]] = GraniteMoeShared.stacked

    @staticmethod
    def declare(config: Fields) -> DecoderConfig:
        num = config.size("num_hidden_layers")
        others = {*layer_types(config, ["mamba"] * num, known=KINDS)} - {*ATTENDING}
        if others:
            raise ValueError(
                f"layer_types in config.json has {', '.join(sorted(others))}: such layers keep a state, "
                "which is not served; take a Granite 4 without h in its name"
            )
        if config.int("num_local_experts", 8):
            raise ValueError(
                f"num_local_experts in config.json is {config.int('num_local_experts', 8)}, must be 0 in a "
                "Granite 4 whose layers all attend"
            )
        turns = config.config.get("position_embedding_type") == "rope"
        mlp = Dense(
            hidden=config.size("shared_intermediate_size", 1024), act=Act(config.str("hidden_act", "silu"))
        )
        declared = Granite.declare(config.without("layer_types"))

        def attending(layer: LayerConfig) -> LayerConfig:
            assert isinstance(layer.mixer, GQA)
            return replace(layer, mlp=mlp, mixer=layer.mixer if turns else replace(layer.mixer, rope=None))

        return replace(declared, layers=tuple(map(attending, declared.layers)))

    @classmethod
    def rename(cls, key: str) -> str:
        return super().rename(named_as_ours(key, ".shared_mlp.", ".mlp."))


def named_as_ours(key: str, theirs: str, ours: str) -> str:
    """The key of an MLP whose two matrices have names of their own."""
    for matrix, name in (("input_linear.", "gate_up_proj."), ("output_linear.", "down_proj.")):
        key = key.replace(theirs + matrix, ours + name)
    return key
