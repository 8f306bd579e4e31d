"""GPT-OSS: windows in every other layer, sinks in all, and experts with biases behind a clamped gate."""

from __future__ import annotations

from dataclasses import replace

from pellucid.layers.activation import Act
from pellucid.layers.experts import Routing, Sparse
from pellucid.layers.norm import NormSpec
from pellucid.models.decoder import Decoder
from pellucid.models.decoder_config import (
    DecoderConfig,
    decoder_config,
    grouped_layers,
    heads_of,
    layer_types,
    windows_of,
)
from pellucid.models.fields import Fields
from pellucid.models.rope import FamilyRope

YARN = {  # where config.json says nothing of positions
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}


class GptOss(Decoder):
    """GptOssForCausalLM (OpenAI 2025, arXiv 2508.10925)."""

    @staticmethod
    def declare(config: Fields) -> DecoderConfig:
        if not config.config.get("rope_scaling") and not config.has("rope_parameters"):
            config = Fields({**config.config, "rope_parameters": YARN})
        bias, num_layers = config.bool("attention_bias", True), config.size("num_hidden_layers")
        alternating = [("sliding_attention", "full_attention")[i % 2] for i in range(num_layers)]
        types = layer_types(config, alternating)
        mixers = grouped_layers(
            config,
            heads_of(config, num_kv=8, dim=64),
            types=types,
            windows=windows_of(types, config.size("sliding_window", 128)),
            qkv_bias=bias,
            o_bias=bias,
            rope=FamilyRope(theta=150000.0),
        )
        mixers = [replace(mixer, scores=replace(mixer.scores, sinks=True)) for mixer in mixers]
        norm = NormSpec(config.float("rms_norm_eps", 1e-5), wide=True)
        return replace(decoder_config(config, mixers, gpt_oss_experts(config)), norm=norm)


def gpt_oss_experts(config: Fields) -> Sparse:
    """The MLP of every layer; gate and up by turns, inputs first where they are not in codes."""
    return Sparse(
        hidden=config.size("intermediate_size"),
        act=Act(
            config.str("hidden_act", "silu"),
            limit=config.float("swiglu_limit", 7.0),
            alpha=config.float("swiglu_alpha", 1.702),
        ),
        routing=Routing(config.size("num_local_experts", 128), config.size("num_experts_per_tok", 4)),
        bias=True,
        router="router",
        router_bias=True,
        transposed=True,
        by_turns=True,
    )
