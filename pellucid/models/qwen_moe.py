"""Qwen2-MoE and Qwen3-MoE: Qwen2 and Qwen3 with experts in most layers, in Qwen2 beside a shared one."""

from __future__ import annotations

from pellucid.layers.activation import Act
from pellucid.layers.experts import Routing, SharedExpert, Sparse
from pellucid.models.decoder import Decoder
from pellucid.models.decoder_config import (
    MLP,
    DecoderConfig,
    decoder_config,
    dense,
    grouped_layers,
    heads_of,
    layer_types,
    windows_of,
)
from pellucid.models.fields import Fields
from pellucid.models.qwen2 import qwen_window


class Qwen2Moe(Decoder):
    """Qwen2MoeForCausalLM (Qwen Team 2024)."""

    @staticmethod
    def declare(config: Fields) -> DecoderConfig:
        hidden = config.size("shared_expert_intermediate_size", 5632)
        shared = SharedExpert(hidden=hidden, name="shared_expert", gate="shared_expert_gate")
        mixers = grouped_layers(
            config,
            heads_of(config, num_kv=16),
            windows=alternating_windows(config),
            qkv_bias=config.bool("qkv_bias", True),
        )
        return decoder_config(config, mixers, qwen_mlps(config, num=60, top_k=4, hidden=1408, shared=shared))


class Qwen3Moe(Decoder):
    """Qwen3MoeForCausalLM (Qwen Team 2025)."""

    @staticmethod
    def declare(config: Fields) -> DecoderConfig:
        bias, num_layers = config.bool("attention_bias", False), config.size("num_hidden_layers")
        mixers = grouped_layers(
            config,
            heads_of(config, num_kv=4),
            windows=[qwen_window(config)] * num_layers,
            qk_norm="head",
            qkv_bias=bias,
            o_bias=bias,
        )
        return decoder_config(config, mixers, qwen_mlps(config, num=128, top_k=8, hidden=768))


def qwen_mlps(
    config: Fields, *, num: int, top_k: int, hidden: int, shared: SharedExpert | None = None
) -> list[MLP]:
    """Of each layer: experts in every `decoder_sparse_step`-th, unless it is one of `mlp_only_layers`.

    num, top_k, hidden: where config.json does not say.
    """
    act = Act(config.str("hidden_act", "silu"))
    sparse = Sparse(
        hidden=config.size("moe_intermediate_size", hidden),
        act=act,
        routing=Routing(
            config.size("num_experts", config.size("num_local_experts", num)),
            config.size("num_experts_per_tok", top_k),
            renormalise=config.bool("norm_topk_prob", False),
        ),
        shared=shared,
    )
    step, plain = config.size("decoder_sparse_step", 1), config.ints("mlp_only_layers", ())
    return [
        sparse if i not in plain and (i + 1) % step == 0 else dense(config)
        for i in range(config.size("num_hidden_layers"))
    ]


def alternating_windows(config: Fields) -> list[int | None]:
    """By `layer_types`, or in every other of the first `max_window_layers`, if windows are used at all."""
    first, num_layers = config.int("max_window_layers", 28), config.size("num_hidden_layers")
    kinds = ["sliding_attention" if i % 2 == 0 and i < first else "full_attention" for i in range(num_layers)]
    return windows_of(layer_types(config, kinds), qwen_window(config))
