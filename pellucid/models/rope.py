"""How a config.json spells a rotary embedding, brought to one `RopeConfig`.  No torch.

transformers 4 writes `rope_theta` and `rope_scaling` (with `type` or `rope_type`), transformers 5 writes
`rope_parameters`, perhaps one for each layer type.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pellucid.layers.rope import KINDS, RopeConfig
from pellucid.models.fields import Fields

PRETRAINED_LENGTH = ("llama3", "yarn", "longrope")  # kinds that ask for the length seen in pre-training
DEFAULT_THETA = 10000.0
LAYER_TYPES = ("full_attention", "sliding_attention")  # of layers, in families that differ by them
ANY_ROTARY_DIM = 2  # asked with by who wants to know no more than how far positions reach


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRope:
    """How positions turn in layers with a window, where rope_theta and rope_scaling are for the others."""

    theta: float
    name: str | None = None  # of theta in config.json


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyRope:
    """How a family's positions turn, as far as its config.json does not say.

    partial: the share of a head's features that turn; None: all do, whatever config.json says.
    """

    theta: float = DEFAULT_THETA
    partial: float | None = None
    interleaved: bool = False
    original: int | None = None  # tokens seen in pre-training
    windows: WindowRope | None = None  # None: layers with a window turn as the others do


def rope_config(
    config: Fields,
    head_dim: int,
    layer_type: str = "full_attention",
    family: FamilyRope | None = None,
) -> RopeConfig:
    """The rotary embedding of layers of this type.  Raises ValueError for a kind that is not known.

    family: where config.json does not say.
    """
    family = family or FamilyRope()
    windows = family.windows if layer_type == "sliding_attention" else None
    scaling = own_fields(config, layer_type) if family.windows else scaling_fields(config, layer_type)
    kind = scaling.str("rope_type", scaling.str("type", "default"))
    kind = "longrope" if scaling.has("long_factor") else kind  # which has been called "su" and "yarn"
    if scaling.has("mrope_section") or kind == "mrope":
        raise ValueError(
            "config.json asks for a multimodal rotary embedding (mrope); this engine serves text"
        )
    if kind not in KINDS:
        raise ValueError(f"unknown rotary embedding {kind!r} in config.json (known: {', '.join(KINDS)})")
    max_position = config.size("max_position_embeddings")
    original = original_length(config, scaling, family, max_position) if kind in PRETRAINED_LENGTH else 0
    factor = scaling_factor(scaling, kind, max_position, original)
    rotary_dim = int(head_dim * share_that_turns(config, scaling, family))
    if windows is None:
        theta = config.float("rope_theta", family.theta)
    else:
        theta = config.float(windows.name, windows.theta) if windows.name else windows.theta
    return RopeConfig(
        kind=kind,
        theta=scaling.float("rope_theta", theta),
        rotary_dim=rotary_dim,
        max_position_embeddings=max_position,
        factor=factor,
        original_max_position_embeddings=original,
        low_freq_factor=scaling.float("low_freq_factor", 1.0),
        high_freq_factor=scaling.float("high_freq_factor", 4.0),
        beta_fast=scaling.float("beta_fast", 32.0),
        beta_slow=scaling.float("beta_slow", 1.0),
        attention_factor=attention_factor(scaling, kind, factor, original),
        truncate=scaling.bool("truncate", True),
        short_factors=frequency_factors(scaling, "short_factor", rotary_dim) if kind == "longrope" else (),
        long_factors=frequency_factors(scaling, "long_factor", rotary_dim) if kind == "longrope" else (),
        interleaved=family.interleaved,
    )


def scaling_fields(config: Fields, layer_type: str) -> Fields:
    """The object that says how positions are stretched, empty if there is none."""
    parts = [config.part(name) for name in ("rope_scaling", "rope_parameters") if config.has(name)]
    scaling = next((part for part in parts if part.config), Fields({}))  # one may be empty beside the other
    return scaling.part(layer_type) if scaling.has(layer_type) else scaling


def own_fields(config: Fields, layer_type: str) -> Fields:
    """The same of a family whose layers with a window turn in their own way.

    Raises ValueError for what transformers passes over in silence.
    """
    name = "rope_parameters"
    stated = config.part(name) if config.has(name) else Fields({})
    if stated.config and not any(kind in stated.config for kind in LAYER_TYPES):
        raise ValueError(
            f"{name} in config.json is {stated.config}, must hold one object for each of "
            f"{' and '.join(LAYER_TYPES)}"
        )
    own = dict(stated.part(layer_type).config) if stated.has(layer_type) else {}
    scaling = config.part("rope_scaling") if config.has("rope_scaling") else Fields({})
    if scaling.config and not scaling.has("rope_type"):
        raise ValueError(
            f"rope_scaling in config.json is {scaling.config}: its kind must be named by 'rope_type'; "
            "transformers reads no other name in this family"
        )
    if layer_type == "full_attention":
        own |= scaling.config
    if own.get("truncate") is False:
        raise ValueError(
            "truncate in config.json is false, which transformers passes over where positions turn by "
            "the layer's kind; leave it out"
        )
    return Fields(own)


def share_that_turns(config: Fields, scaling: Fields, family: FamilyRope) -> float:
    """Of a head's features."""
    if family.partial is None:
        return 1.0
    name = "partial_rotary_factor"
    share = config.number(name, family.partial)
    return scaling.float(name, 1.0 if share is None else share)


def original_length(config: Fields, scaling: Fields, family: FamilyRope, max_position: int) -> int:
    """Tokens seen in pre-training; a field beside the scaling goes before one inside it.

    Not so where layers of one kind have a scaling of their own.
    """
    name = "original_max_position_embeddings"
    inside = scaling.size(name, max_position)
    return inside if family.windows else config.size(name, family.original or inside)


def scaling_factor(scaling: Fields, kind: str, max_position: int, original: int) -> float:
    if kind == "default":
        return 1.0
    if kind in ("yarn", "longrope") and not scaling.has("factor"):
        return max_position / original
    return scaling.positive("factor")


def frequency_factors(scaling: Fields, name: str, rotary_dim: int) -> tuple[float, ...]:
    """What divides each frequency.  Raises ValueError if there is not one for each that turns."""
    factors = scaling.floats(name)
    # How far positions reach is asked for heads of any size; then nothing turns.
    if len(factors) != rotary_dim // 2 and rotary_dim > ANY_ROTARY_DIM:
        raise ValueError(f"{name} in config.json has {len(factors)} numbers, must have {rotary_dim // 2}")
    return tuple(factors)


def attention_factor(scaling: Fields, kind: str, factor: float, original: int) -> float:
    """What cosines and sines are multiplied with, for the kinds that do."""
    if kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.has("attention_factor"):
        return scaling.float("attention_factor")
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return yarn_attention_factor(scaling, factor)


def yarn_attention_factor(scaling: Fields, factor: float) -> float:
    """0.1 ln(factor) + 1 unless the config has weights for it."""

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    weight, weight_all = scaling.float("mscale", 0.0), scaling.float("mscale_all_dim", 0.0)
    return mscale(weight) / mscale(weight_all) if weight and weight_all else mscale(1.0)
