"""GLM-4: half of each head turns, neighbours together; GLM-4-0414 normalizes behind its layers, too."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pellucid.models.decoder import Decoder
from pellucid.models.decoder_config import DecoderConfig, Norms, decoder_config, grouped_layers, heads_of
from pellucid.models.fields import Fields
from pellucid.models.rope import FamilyRope


class Glm(Decoder):
    """GlmForCausalLM (GLM Team 2024)."""

    stacked: ClassVar[dict[str, tuple[str, ...]]] = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}

    @staticmethod
    def declare(config: Fields) -> DecoderConfig:
        mixers = grouped_layers(
            config,
            heads_of(config, num_kv=2, dim=128),
            qkv_bias=config.bool("attention_bias", True),
            rope=FamilyRope(partial=0.5, interleaved=True),
        )
        return decoder_config(config, mixers, eps=1.5625e-7)


class Glm4(Glm):
    """Glm4ForCausalLM (GLM-4-0414)."""

    @staticmethod
    def declare(config: Fields) -> DecoderConfig:
        norms = Norms(behind_attention="post_self_attn_layernorm", behind_mlp="post_mlp_layernorm")
        return replace(Glm.declare(config), norms=norms)
