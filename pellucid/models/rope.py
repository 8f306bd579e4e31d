"""How a config.json spells a rotary embedding, brought to one `RopeConfig`.  No torch.

transformers 4 writes `rope_theta` and `rope_scaling` (with `type` or `rope_type`), transformers 5 writes
`rope_parameters`, perhaps one for each layer type.
"""

from __future__ import annotations

import math

from pellucid.layers.rope import KINDS, RopeConfig
from pellucid.models.fields import Fields

PRETRAINED_LENGTH = ("llama3", "yarn")  # kinds that ask for the length seen in pre-training
DEFAULT_THETA = 10000.0


def rope_config(config: Fields, head_dim: int, layer_type: str = "full_attention") -> RopeConfig:
    """The rotary embedding of layers of this type.  Raises ValueError for a kind that is not known."""
    scaling = scaling_fields(config, layer_type)
    kind = scaling.str("rope_type", scaling.str("type", "default"))
    if scaling.has("mrope_section") or kind == "mrope":
        raise ValueError(
            "config.json asks for a multimodal rotary embedding (mrope); this engine serves text"
        )
    if kind not in KINDS:
        raise ValueError(f"unknown rotary embedding {kind!r} in config.json (known: {', '.join(KINDS)})")
    max_position = config.size("max_position_embeddings")
    original = original_length(config, scaling, max_position) if kind in PRETRAINED_LENGTH else 0
    factor = scaling_factor(scaling, kind, max_position, original)
    partial = scaling.float("partial_rotary_factor", config.float("partial_rotary_factor", 1.0))
    return RopeConfig(
        kind=kind,
        theta=scaling.float("rope_theta", config.float("rope_theta", DEFAULT_THETA)),
        rotary_dim=int(head_dim * partial),
        max_position_embeddings=max_position,
        factor=factor,
        original_max_position_embeddings=original,
        low_freq_factor=scaling.float("low_freq_factor", 1.0),
        high_freq_factor=scaling.float("high_freq_factor", 4.0),
        beta_fast=scaling.float("beta_fast", 32.0),
        beta_slow=scaling.float("beta_slow", 1.0),
        attention_factor=yarn_attention_factor(scaling, factor) if kind == "yarn" else 1.0,
        truncate=scaling.bool("truncate", True),
    )


def scaling_fields(config: Fields, layer_type: str) -> Fields:
    """The object that says how positions are stretched, empty if there is none."""
    parts = [config.part(name) for name in ("rope_scaling", "rope_parameters") if config.has(name)]
    scaling = next((part for part in parts if part.config), Fields({}))  # one may be empty beside the other
    return scaling.part(layer_type) if scaling.has(layer_type) else scaling


def original_length(config: Fields, scaling: Fields, max_position: int) -> int:
    """Tokens seen in pre-training; a field beside the scaling goes before one inside it."""
    name = "original_max_position_embeddings"
    return config.int(name, scaling.int(name, max_position))


def scaling_factor(scaling: Fields, kind: str, max_position: int, original: int) -> float:
    if kind == "default":
        return 1.0
    if kind == "yarn" and not scaling.has("factor"):
        return max_position / original
    factor = scaling.float("factor")
    if not factor > 0:
        raise ValueError(f"factor of the rotary embedding in config.json is {factor}, must be above 0")
    return factor


def yarn_attention_factor(scaling: Fields, factor: float) -> float:
    """What cosines and sines are multiplied with; 0.1 ln(factor) + 1 unless the config says otherwise."""
    if scaling.has("attention_factor"):
        return scaling.float("attention_factor")

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    weight, weight_all = scaling.float("mscale", 0.0), scaling.float("mscale_all_dim", 0.0)
    return mscale(weight) / mscale(weight_all) if weight and weight_all else mscale(1.0)
