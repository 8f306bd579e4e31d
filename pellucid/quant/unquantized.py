"""Weights as they are: float32, float16 or bfloat16 matrices.

On a CPU, bfloat16 matrices are packed once into the layout that oneDNN multiplies with, which is up to twice
as fast as packing at every call; the plain copy is let go.  Everything else is `F.linear`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from pellucid.forward import ForwardInput
from pellucid.quant.base import Kind, LinearLayer, LinearShape, ParamSpec, matrix, stored_as


class UnquantizedScheme:
    """Claims every checkpoint without a quantization_config."""

    @classmethod
    def from_checkpoint(cls, config: Mapping[str, object]) -> Self | None:
        return cls() if stored_as(config) == "none" else None

    @classmethod
    def online(cls) -> Self | None:
        return cls()

    def method(self, prefixes: tuple[str, ...], kind: Kind) -> Unquantized:
        return Unquantized()


class Unquantized:
    """One matrix [out, in], multiplied in the activations' dtype."""

    def __init__(self) -> None:
        self._packed: Tensor | None = None  # oneDNN's layout; opaque

    def params(self, shape: LinearShape) -> dict[str, ParamSpec]:
        size = (shape.out_features, shape.in_features)
        return {"weight": ParamSpec(shape=size, dtype=shape.dtype, place=matrix(shape))}

    def finish(self, layer: LinearLayer) -> None:
        weight = layer.param("weight")
        if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and can_pack():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
            layer.replace("weight", None)

    def apply(self, layer: LinearLayer, x: Tensor, fwd: ForwardInput | None) -> Tensor:
        if self._packed is None:
            return F.linear(x, layer.param("weight"), layer.bias)
        return torch.ops.mkldnn._linear_pointwise.default(x, self._packed, layer.bias, "none", [], "")


@cache
def can_pack() -> bool:
    """Whether this torch and this CPU multiply bfloat16 with packed weights, tried on a small matrix."""
    try:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        x = torch.arange(-32, 32, dtype=torch.bfloat16).view(2, 32)
        weight = torch.arange(-256, 256, dtype=torch.bfloat16).view(16, 32) / 64
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        y = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    return torch.allclose(y, F.linear(x, weight), rtol=2e-2)
