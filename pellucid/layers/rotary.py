"""Rotary position embedding (Su et al. 2021), with the known ways of stretching it.

Everything about length scaling ends in one table of cosines and sines; applying it knows no kind
(`kernels/attention/qkv_rope.py`).  How a config.json spells the numbers is the models' business
(`models/rope.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from pellucid.layers.rope import RopeConfig

SLICE = 1 << 16  # positions


def plain_frequencies(config: RopeConfig, theta: float | None = None) -> Tensor:
    """theta^(-2i / rotary_dim), float32 [rotary_dim / 2]."""
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.int64).float() / config.rotary_dim
    return 1.0 / ((theta or config.theta) ** exponents)


def default_frequencies(config: RopeConfig, max_len: int) -> Tensor:
    return plain_frequencies(config)


def linear_frequencies(config: RopeConfig, max_len: int) -> Tensor:
    """Positions divided by `factor` (Chen et al. 2023)."""
    return plain_frequencies(config) / config.factor


def dynamic_frequencies(config: RopeConfig, max_len: int) -> Tensor:
    """NTK-aware: a larger theta for longer sequences, here for the longest this engine admits.

    One theta for all lengths, because cached keys cannot turn again when their sequence grows.
    """
    dim, factor, original = config.rotary_dim, config.factor, config.max_position_embeddings
    stretch = factor * max(max_len, original) / original - (factor - 1)
    return plain_frequencies(config, config.theta * stretch ** (dim / (dim - 2)))


def llama3_frequencies(config: RopeConfig, max_len: int) -> Tensor:
    """Long waves divided by `factor`, short ones kept, those between blended (Llama 3.1)."""
    frequencies = plain_frequencies(config)
    context = config.original_max_position_embeddings
    turns = context / (2 * math.pi / frequencies)
    low, high = config.low_freq_factor, config.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * frequencies / config.factor + keep * frequencies


def yarn_frequencies(config: RopeConfig, max_len: int) -> Tensor:
    """Features with few turns divided by `factor`, with many kept, a ramp between (Peng et al. 2023)."""
    low, high = yarn_ramp(config)
    index = torch.arange(config.rotary_dim // 2, dtype=torch.float32)
    stretch = ((index - low) / (high - low)).clamp(0, 1)
    frequencies = plain_frequencies(config)
    return frequencies / config.factor * stretch + frequencies * (1 - stretch)


def yarn_ramp(config: RopeConfig) -> tuple[float, float]:
    """The features at which the ramp begins and ends."""

    def feature_turning(times: float) -> float:
        context = config.original_max_position_embeddings
        return config.rotary_dim * math.log(context / (times * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = feature_turning(config.beta_fast), feature_turning(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    return low, high if high != low else high + 0.001


def longrope_frequencies(config: RopeConfig, max_len: int) -> Tensor:
    """Each divided by a factor of its own, one of two sets (LongRoPE, Ding et al. 2024).

    Which set is decided once, by the longest sequence this engine admits: cached keys cannot turn again.
    """
    is_long = max_len > config.original_max_position_embeddings
    factors = config.long_factors if is_long else config.short_factors
    return plain_frequencies(config) / torch.tensor(factors, dtype=torch.float32)


FREQUENCIES: dict[str, Callable[[RopeConfig, int], Tensor]] = {
    "default": default_frequencies,
    "linear": linear_frequencies,
    "dynamic": dynamic_frequencies,
    "llama3": llama3_frequencies,
    "yarn": yarn_frequencies,
    "longrope": longrope_frequencies,
}


def rotary_table(config: RopeConfig, max_len: int, num_spec: int = 0) -> Tensor:
    """float32 [max_len + num_spec, 2, 1, rotary_dim]: cosines, and sines that are negative in the first half.

    num_spec: positions behind max_len, for drafts; they change no frequency.  Made in slices, for it may be
    10 GB (ten million positions of Llama 4 Scout), and what it is made of would be twice as much again.
    """
    frequencies, num = FREQUENCIES[config.kind](config, max_len), max_len + num_spec
    table = torch.empty(num, 2, 1, 2 * len(frequencies))
    for first in range(0, num, SLICE):
        positions = torch.arange(first, min(first + SLICE, num), dtype=torch.float32)
        angles = positions[:, None] * frequencies
        cos, sin = angles.cos() * config.attention_factor, angles.sin() * config.attention_factor
        table[first : first + SLICE, 0, 0] = torch.cat((cos, cos), -1)
        table[first : first + SLICE, 1, 0] = torch.cat((-sin, sin), -1)
    return table
