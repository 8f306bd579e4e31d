"""The operations between matrix products, each a pass over its operands: fused on a GPU, else plain torch.

Both round alike.  What lies between the packed projection and attention is the attention backend's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pellucid.kernels.language import has_triton
from pellucid.kernels.rms_norm import add_rms_norm, add_rms_norm_ref
from pellucid.kernels.silu_mul import silu_mul, silu_mul_ref


@dataclass(frozen=True, slots=True)
class Leaf:
    """One provider of the leaf operations."""

    add_norm: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]  # see add_rms_norm
    gated: Callable[[Tensor, str], Tensor]  # see silu_mul


PLAIN = Leaf(add_rms_norm_ref, silu_mul_ref)
FUSED = Leaf(add_rms_norm, silu_mul)


def choose_leaf(device: torch.device) -> Leaf:
    """The faster one for tensors on `device`."""
    return FUSED if device.type == "cuda" and has_triton() else PLAIN
