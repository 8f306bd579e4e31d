"""EXAONE 4: norms behind attention and MLP alone; the layers that see everything do not turn positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pellucid.models.decoder import Decoder
from pellucid.models.decoder_config import (
    GQA,
    DecoderConfig,
    decoder_config,
    every,
    grouped_layers,
    heads_of,
    layer_types,
    window_of,
    windows_of,
)
from pellucid.models.fields import Fields
from pellucid.models.olmo import NORMS


class Exaone4(Decoder):
    """Exaone4ForCausalLM (LG AI Research 2025, arXiv 2507.11407)."""

    @staticmethod
    def declare(config: Fields) -> DecoderConfig:
        window, heads = window_of(config, 4096), heads_of(config, num_kv=32)
        types = layer_types(config, None if window is None else pattern(config))
        mixers: Sequence[GQA] = grouped_layers(
            config,
            heads,
            types=types,
            windows=windows_of(types, window),
            qk_norm="head",
        )
        if window is not None:
            mixers = [mixer if mixer.scores.window else replace(mixer, rope=None) for mixer in mixers]
        return replace(decoder_config(config, mixers, eps=1e-5), norms=NORMS)


def pattern(config: Fields) -> list[str]:
    """The kinds of layers, of which each n-th sees everything: n as a number, or as the word `LLLG`."""
    said = config.config.get("sliding_window_pattern")
    return every(len(said) if isinstance(said, str) else config.size("sliding_window_pattern", 4), config)
