"""The operations between matrix products and attention, each a pass over its operands, and who provides them.

Plain torch everywhere; on a GPU with Triton fused kernels that round alike.  What lies between the packed
projection and attention is the attention backend's.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from pellucid.layers.activation import Gated, gated
from pellucid.layers.norm import AddNorm, add_rms_norm


@dataclass(frozen=True, slots=True)
class Leaf:
    """One provider of the leaf operations; each of them is described where plain torch does it."""

    add_norm: AddNorm
    gated: Gated


PLAIN = Leaf(add_rms_norm, gated)


def choose_leaf(device: torch.device) -> Leaf:
    """The fastest provider for tensors on `device`."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return PLAIN
    return fused_leaf()


def fused_leaf() -> Leaf:
    """Triton's kernels; imports Triton."""
    from pellucid.kernels import rms_norm, silu_mul

    return Leaf(rms_norm.add_rms_norm, silu_mul.silu_mul)
