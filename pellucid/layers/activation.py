"""Gated activations: act(gate) * up on the packed projection [T, 2 * hidden]."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional as F

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The activation a config.json calls `name`.  Raises ValueError with the known names."""
    if name not in ACTIVATIONS:
        raise ValueError(f"unknown activation {name!r} (known: {', '.join(ACTIVATIONS)})")
    return ACTIVATIONS[name]


def gated(gate_up: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
    """act(gate) * up, for gate_up = [gate | up] of [T, 2 * hidden]; returns [T, hidden]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return act(gate) * up
