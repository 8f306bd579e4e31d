"""Weights as they are: float32, float16 or bfloat16 matrices.

On a CPU, bfloat16 matrices are packed once into the layout that oneDNN multiplies with, which is up to twice
as fast as packing at every call; the plain copy is let go.  On a GPU, products of few rows, which last as
long as it takes to read the matrix, and gated ones have kernels of their own.  Everything else is `F.linear`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from pellucid.forward import ForwardInput
from pellucid.platform import Platform
from pellucid.quant.base import LinearLayer, LinearShape, ParamSpec, matrix
from pellucid.quant.products import Multiplier, Product, plain_product


class Unquantized:
    """One matrix [out, in], multiplied in the activations' dtype."""

    def __init__(self, why: str = "") -> None:
        """why: codes are decoded."""
        self._why = why
        self._choice: Product | None = None
        self._multiply: Multiply = library_product

    def choose(self, shape: LinearShape, platform: Platform) -> Product:
        packs = platform.device == "cpu" and can_pack()
        self._choice = replace(plain_product(shape.dtype, platform, packs=packs), why=self._why)
        return self._choice

    def params(self, shape: LinearShape) -> dict[str, ParamSpec]:
        size = (shape.out_features, shape.in_features)
        return {"weight": ParamSpec(shape=size, dtype=shape.dtype, place=matrix(shape))}

    def finish(self, layer: LinearLayer) -> None:
        assert self._choice is not None, "choose() was not called"
        weight = layer.param("weight")
        if self._choice.multiplier is Multiplier.PACKED:
            self._multiply = PackedProduct(weight)
            layer.replace("weight", None)
        elif self._choice.multiplier is Multiplier.TUNED:
            self._multiply = TunedProduct(weight)

    def apply(self, layer: LinearLayer, x: Tensor, fwd: ForwardInput | None) -> Tensor:
        return self._multiply(layer, x)

    def apply_gated(self, layer: LinearLayer, x: Tensor, act: str) -> Tensor | None:
        return self._multiply.gated(layer, x, act) if isinstance(self._multiply, TunedProduct) else None


Multiply = Callable[[LinearLayer, Tensor], Tensor]


def library_product(layer: LinearLayer, x: Tensor) -> Tensor:
    """The library's."""
    return F.linear(x, layer.param("weight"), layer.bias)


class PackedProduct:
    """oneDNN's, with weights in its own opaque layout."""

    def __init__(self, weight: Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())

    def __call__(self, layer: LinearLayer, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.default(x, self._packed, layer.bias, "none", [], "")


class TunedProduct:
    """By the kernels that are fastest for this shape and so many rows, ours or the library's."""

    def __init__(self, weight: Tensor) -> None:
        from pellucid.kernels.own_products import OwnProducts, choices_for  # where Triton is installed

        self._own = OwnProducts(weight, choices_for(weight))

    def __call__(self, layer: LinearLayer, x: Tensor) -> Tensor:
        y = self._multiply(layer, x)
        return library_product(layer, x) if y is None else y

    def gated(self, layer: LinearLayer, x: Tensor, act: str) -> Tensor | None:
        """act(gate) * up, or None where the library is faster."""
        return self._multiply(layer, x, act)

    def _multiply(self, layer: LinearLayer, x: Tensor, act: str | None = None) -> Tensor | None:
        y = self._own(x.reshape(-1, x.shape[-1]), layer.param("weight"), bias=layer.bias, act=act)
        return None if y is None else y.view(*x.shape[:-1], y.shape[-1])


@cache
def can_pack() -> bool:
    """Whether this torch and this CPU multiply bfloat16 with packed weights, tried on a small matrix."""
    with torch.device("cpu"):  # also where a model is built that is only looked at
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
