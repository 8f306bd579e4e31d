"""Qwen2 and Qwen2.5, the dense models: queries, keys and values have a bias."""

from __future__ import annotations

from pellucid.models.decoder import Decoder
from pellucid.models.decoder_config import (
    DecoderConfig,
    decoder_config,
    grouped_layers,
    heads_of,
    layer_types,
    window_of,
    windows_of,
)
from pellucid.models.fields import Fields


class Qwen2(Decoder):
    """Qwen2ForCausalLM (Qwen Team 2024)."""

    @staticmethod
    def declare(config: Fields) -> DecoderConfig:
        heads, windows = heads_of(config, num_kv=32), qwen_windows(config)
        return decoder_config(config, grouped_layers(config, heads, windows=windows, qkv_bias=True))


def qwen_windows(config: Fields) -> list[int | None]:
    """Qwen's sliding windows: by `layer_types`, or from layer `max_window_layers` on, if used at all."""
    first, num_layers = config.int("max_window_layers", 28), config.size("num_hidden_layers")
    kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    return windows_of(layer_types(config, kinds), qwen_window(config))


def qwen_window(config: Fields) -> int | None:
    """Of layers that are to have one; None: windows are not used."""
    return window_of(config, 4096) if config.bool("use_sliding_window", False) else None
