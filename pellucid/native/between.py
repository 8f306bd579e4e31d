"""What lies between products on a CPU, in native code: each is one call where torch makes many.

Takes activations of 16 bits; whatever else comes is the plain reference's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pellucid.native.library import GATES, TYPES, library

UNIT = 16  # features, of which rows are whole ones


def add_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor] | None:
    """Add x [T, D] to the stream in place, if there is one, and normalize.  None: not such tensors."""
    code = library()
    if code is None or not takes(x) or weight.dtype not in (x.dtype, torch.float32):
        return None
    num_tokens, dim = x.shape
    if residual is not None and not (residual.is_contiguous() and residual.dtype == x.dtype):
        return None
    out = torch.empty_like(x)
    code.add_norm(
        x.data_ptr(),
        None if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        num_tokens,
        dim,
        eps,
        weight.dtype == torch.float32,
        TYPES[x.dtype],
    )
    return out, x if residual is None else residual


def gated(gate_up: Tensor, act: str) -> Tensor | None:
    """act(gate) * up of [gate | up], [T, 2 * H].  None: not such a tensor."""
    code, hidden = library(), gate_up.shape[1] // 2
    if code is None or not takes(gate_up) or hidden % UNIT:
        return None
    out = torch.empty(len(gate_up), hidden, dtype=gate_up.dtype)
    code.gate(gate_up.data_ptr(), out.data_ptr(), *out.shape, GATES[act], TYPES[out.dtype])
    return out


def highest(scores: Tensor) -> Tensor | None:
    """The place of the highest of each row [S, V], the first one in a tie.  None: not such a tensor."""
    if not takes(scores, unit=1) or not scores.shape[1] or (code := library()) is None:
        return None
    places = torch.empty(len(scores), dtype=torch.int64)
    code.highest(scores.data_ptr(), places.data_ptr(), *scores.shape, TYPES[scores.dtype])
    return places


def takes(x: Tensor, unit: int = UNIT) -> bool:
    return x.dtype in TYPES and x.is_contiguous() and x.shape[1] % unit == 0 and x.device.type == "cpu"
