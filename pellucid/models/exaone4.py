"""EXAONE 4: norms behind attention and MLP alone; the layers that see everything do not turn positions."""

from __future__ import annotations

from pellucid.attention.base import Scores
from pellucid.layers.activation import Act
from pellucid.layers.norm import NormSpec
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
from pellucid.models.rope import rope_config


class Exaone4(Decoder):
    """Exaone4ForCausalLM (LG AI Research 2025, arXiv 2507.11407)."""

    @staticmethod
    def declare(config: Fields) -> DecoderConfig:
        heads, window = heads_of(config), config.number("sliding_window", 4096)
        mlp = Dense(hidden=config.size("intermediate_size"), act=Act(config.str("hidden_act", "silu")))

        def layer(kind: str) -> LayerConfig:
            seen = int(window) if window is not None and kind == "sliding_attention" else None
            mixer = GQA(
                heads=heads,
                scores=Scores(scale=heads.dim**-0.5, window=seen),
                rope=rope_config(config, heads.dim, kind) if seen or window is None else None,
                qk_norm="head",
            )
            return LayerConfig(mixer=mixer, mlp=mlp)

        return DecoderConfig(
            **sizes(config),
            norm=NormSpec(config.float("rms_norm_eps", 1e-5)),
            layers=tuple(map(layer, layer_types(config, None if window is None else pattern(config)))),
            norms=Norms(
                before_attention=None,
                behind_attention="post_attention_layernorm",
                before_mlp=None,
                behind_mlp="post_feedforward_layernorm",
            ),
        )


def pattern(config: Fields) -> list[str]:
    """The kinds of layers, of which each n-th sees everything: n as a number, or as the word `LLLG`."""
    said = config.config.get("sliding_window_pattern")
    return every(len(said) if isinstance(said, str) else config.size("sliding_window_pattern", 4), config)
