"""Phi-3, 3.5, 4 and 4-mini: fused projections, LongRoPE in the long ones."""

from __future__ import annotations

from typing import ClassVar

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


class Phi3(Decoder):
    """Phi3ForCausalLM (Abdin et al. 2024)."""

    stacked: ClassVar[dict[str, tuple[str, ...]]] = {}  # qkv_proj and gate_up_proj are one tensor each

    @staticmethod
    def declare(config: Fields) -> DecoderConfig:
        windows = [window_of(config)] * config.size("num_hidden_layers")
        rope = FamilyRope(partial=1.0, original=4096)
        mixers = grouped_layers(config, heads_of(config), windows=windows, rope=rope)
        return decoder_config(config, mixers, eps=1e-5)
