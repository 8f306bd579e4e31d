"""Gated activations: act(gate) * up on the packed projection [T, 2 * hidden]."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional as F

Gated = Callable[[Tensor, str], Tensor]

ACTIVATIONS = {  # config.json's name -> ours
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def activation(name: str) -> str:
    """Our name of the activation a config.json calls `name`.  Raises ValueError with the known names."""
    if name not in ACTIVATIONS:
        raise ValueError(f"unknown activation {name!r} (known: {', '.join(ACTIVATIONS)})")
    return ACTIVATIONS[name]


def gated(gate_up: Tensor, act: str) -> Tensor:
    """act(gate) * up, for gate_up = [gate | up] of [T, 2 * hidden]; returns [T, hidden].

    act: one of FUNCTIONS.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return FUNCTIONS[act](gate) * up
