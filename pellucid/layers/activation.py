"""Activations by the names that a config.json uses; what they compute: `kernels/pointwise/silu_mul.py`."""

from __future__ import annotations

from dataclasses import dataclass

ACTIVATIONS = {  # config.json's name -> the kernel's
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


@dataclass(frozen=True, slots=True)
class Act:
    """The activation of a gated MLP.  name: config.json's."""

    name: str
    limit: float | None = None  # of gates from above and what they open both ways: kernels/experts/experts.py
    alpha: float = 1.0  # of the sigmoid, with a limit

    @property
    def kernel(self) -> str:
        """The kernels' name.  Raises ValueError with the known names."""
        return activation(self.name)


def activation(name: str) -> str:
    """The activation a config.json calls `name`.  Raises ValueError with the known names."""
    if name not in ACTIVATIONS:
        raise ValueError(f"unknown activation {name!r} (known: {', '.join(ACTIVATIONS)})")
    return ACTIVATIONS[name]
