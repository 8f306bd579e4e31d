"""Qwen2 and Qwen2.5, the dense models: queries, keys and values have a bias."""

from __future__ import annotations

from pellucid.models.decoder import Decoder
from pellucid.models.decoder_config import (
    DecoderConfig,
    decoder_config,
    grouped_layers,
    heads_of,
    layer_types,
)
from pellucid.models.fields import Fields


class Qwen2(Decoder):
    """Qwen2ForCausalLM (Qwen Team 2024)."""

    @staticmethod
    def declare(config: Fields) -> DecoderConfig:
        heads, windows = heads_of(config, num_kv=32), qwen_windows(config)
        return decoder_config(config, grouped_layers(config, heads, windows=windows, qkv_bias=True))


def qwen_windows(config: Fields) -> tuple[int | None, ...]:
    """Qwen's sliding windows: by `layer_types`, or from layer `max_window_layers` on, if used at all."""
    types = layer_types(config)
    if not config.bool("use_sliding_window", False):
        return (None,) * len(types)
    window = config.size("sliding_window", 4096)
    if not config.has("layer_types"):
        first = config.int("max_window_layers", 28)
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(len(types))]
    return tuple(window if kind == "sliding_attention" else None for kind in types)
