"""Linear layers, merged ones included: a `LinearMethod` says how they are stored and multiplied."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pellucid.dist.collectives import Group
from pellucid.forward import ForwardInput
from pellucid.layers.weight import Weight
from pellucid.quant.base import Gates, LinearMethod, LinearShape


class Linear(nn.Module):
    """y = x W^T + bias, on this rank's slice of W, into which several matrices may be merged."""

    def __init__(
        self, shape: LinearShape, method: LinearMethod, weights: dict[str, Weight], bias: Weight | None = None
    ) -> None:
        super().__init__()
        self.shape = shape
        self.method = method
        for name, weight in weights.items():
            self.register_parameter(name, weight)
        self.bias = bias

    def param(self, name: str) -> Tensor:
        parameter = self._parameters[name]
        assert parameter is not None, name
        return parameter

    def replace(self, name: str, value: Tensor | None) -> None:
        self._parameters[name] = None if value is None else nn.Parameter(value, requires_grad=False)

    def finish(self) -> None:
        self.method.finish(self)

    def forward(self, x: Tensor, fwd: ForwardInput | None = None) -> Tensor:
        """x [T, in_features] -> [T, out_features]."""
        return self.method.apply(self, x, fwd)

    def gated(self, x: Tensor, act: str) -> Tensor | None:
        """act(gate) * up of this layer's [gate | up], or None where no kernel does it in one pass."""
        return self.method.apply_gated(self, x, act) if isinstance(self.method, Gates) else None


class Unmerged(nn.Module):
    """Matrices that a scheme refused to merge, applied one by one; their outputs stand side by side."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor, fwd: ForwardInput | None = None) -> Tensor:
        return torch.cat([part(x, fwd) for part in self.parts], dim=-1)

    def gated(self, x: Tensor, act: str) -> None:
        """Gate and up are two products."""


class Reduced(nn.Module):
    """A linear layer whose input features ranks divide among them: each has a part of the sum."""

    def __init__(self, part: Linear | Unmerged, group: Group) -> None:
        super().__init__()
        self.part = part
        self.group = group

    def forward(self, x: Tensor, fwd: ForwardInput | None = None) -> Tensor:
        """x [T, this rank's in_features] -> [T, out_features], the same on every rank."""
        return self.group.all_reduce(self.part(x, fwd))
