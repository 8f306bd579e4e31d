"""The operations between matrix products, each a pass over its operands: fused on a GPU, native on a CPU.

Where neither is to be had they are plain torch.  All round alike.  Where the product behind one is of FP8
numbers, it may round to them in the same pass.  What lies between the packed projection and attention is the
attention backend's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pellucid.kernels.experts.experts import Pairs, mix_experts, mix_experts_ref
from pellucid.kernels.experts.packed_experts import mix_packed, mix_packed_ref
from pellucid.kernels.experts.routing import Chosen, Parts, logit_parts, route, route_ref
from pellucid.kernels.lang.language import has_triton
from pellucid.kernels.pointwise.rms_norm import (
    NO_POST,
    Post,
    add_rms_norm,
    add_rms_norm_ref,
    add_rms_norm_rounded,
    add_rms_norm_rounded_ref,
    posted,
)
from pellucid.kernels.pointwise.silu_mul import silu_mul, silu_mul_ref, silu_mul_rounded, silu_mul_rounded_ref
from pellucid.kernels.products.round_rows import Rounded, Rounding
from pellucid.kernels.sampling.cap_logits import cap_logits, cap_logits_ref
from pellucid.native import between
from pellucid.native.library import library

AddNorm = Callable[[Tensor, Tensor | None, Tensor | None, float, Post], tuple[Tensor, Tensor]]
AddNormRounded = Callable[[Tensor, Tensor | None, Tensor, float, Rounding, Post], tuple[Rounded, Tensor]]
LogitParts = Callable[[Tensor, Tensor, Tensor | None], Parts | None]
CapLogits = Callable[[Tensor, float, float | None], Tensor]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One provider of the leaf operations."""

    add_norm: AddNorm  # see add_rms_norm
    gated: Callable[[Tensor, str], Tensor]  # see silu_mul
    add_norm_rounded: AddNormRounded
    gated_rounded: Callable[[Tensor, str, Rounding], Rounded]
    route: Callable[..., Chosen]  # see route
    logit_parts: LogitParts | None  # None: the library's product is as fast
    mix: Callable[..., Tensor | Pairs]  # see mix_experts
    mix_packed: Callable[..., Tensor | Pairs]  # see mix_packed
    cap_logits: CapLogits


def add_norm_native(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, post: Post = NO_POST
) -> tuple[Tensor, Tensor]:
    """See `add_rms_norm`."""
    x = posted(x, post)
    done = None if weight is None else between.add_norm(x, residual, weight, eps)
    return done or add_rms_norm_ref(x, residual, weight, eps)


def gated_native(gate_up: Tensor, act: str = "silu") -> Tensor:
    """See `silu_mul`."""
    done = between.gated(gate_up, act)
    return silu_mul_ref(gate_up, act) if done is None else done


PLAIN = Leaf(
    add_rms_norm_ref,
    silu_mul_ref,
    add_rms_norm_rounded_ref,
    silu_mul_rounded_ref,
    route_ref,
    None,
    mix_experts_ref,
    mix_packed_ref,
    cap_logits_ref,
)
NATIVE = replace(PLAIN, add_norm=add_norm_native, gated=gated_native)
FUSED = Leaf(
    add_rms_norm,
    silu_mul,
    add_rms_norm_rounded,
    silu_mul_rounded,
    route,
    logit_parts,
    mix_experts,
    mix_packed,
    cap_logits,
)


def choose_leaf(device: torch.device) -> Leaf:
    """The faster one for tensors on `device`."""
    if device.type == "cuda" and has_triton():
        return FUSED
    return NATIVE if device.type == "cpu" and library() is not None else PLAIN
