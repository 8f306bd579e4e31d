"""Weights as they are: float32, float16 or bfloat16 matrices.

On a CPU, bfloat16 matrices are packed once, into the layout of native code, or where there is none into that
of oneDNN, which is up to twice as fast as packing at every call; the plain copy is let go.  On a GPU,
products of few rows, which last as long as it takes to read the matrix, and gated ones have kernels of their
own.  Everything else is `F.linear`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from pellucid.forward import ForwardInput
from pellucid.native.library import library, serves
from pellucid.native.matrix import NativeMatrix, in_bfloat16
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
        self._widened: Widened | None = None

    def choose(self, shape: LinearShape, platform: Platform) -> Product:
        is_cpu = platform.device == "cpu"
        native = is_cpu and shape.dtype == torch.bfloat16 and multiplies_bfloat16()
        packs = is_cpu and not native and can_pack()
        choice = plain_product(shape.dtype, platform, packs=packs, native=native)
        self._choice = replace(choice, why=self._why)
        return self._choice

    def params(self, shape: LinearShape) -> dict[str, ParamSpec]:
        size = (shape.out_features, shape.in_features)
        return {"weight": ParamSpec(shape=size, dtype=shape.dtype, place=matrix(shape))}

    def finish(self, layer: LinearLayer) -> None:
        assert self._choice is not None, "choose() was not called"
        weight = layer.param("weight")
        if self._choice.multiplier is Multiplier.NATIVE:
            self._multiply = NativeProduct(weight.detach(), layer)
            layer.replace("weight", None)
        elif self._choice.multiplier is Multiplier.PACKED:
            self._multiply = PackedProduct(weight)
            layer.replace("weight", None)
        elif self._choice.multiplier is Multiplier.TUNED:
            self._multiply = TunedProduct(weight)

    def apply(self, layer: LinearLayer, x: Tensor, fwd: ForwardInput | None) -> Tensor:
        return self._multiply(layer, x)

    def widen(self, layer: LinearLayer, num_rows: int) -> Tensor | None:
        is_plain = self._multiply is library_product or isinstance(self._multiply, TunedProduct)
        if not is_plain:
            return None
        weight, bias = layer.param("weight"), layer.bias
        num_out = len(weight)
        rows = weight.new_zeros(num_out + num_rows, weight.shape[1])
        rows[:num_out].copy_(weight)
        layer.replace("weight", rows[:num_out])
        if bias is not None:
            bias = torch.cat([bias, bias.new_zeros(num_rows)])
        tuned = TunedProduct(rows) if isinstance(self._multiply, TunedProduct) else None
        self._widened = Widened(rows, bias, tuned)
        return rows[num_out:]

    def apply_widened(self, layer: LinearLayer, x: Tensor) -> Tensor:
        assert self._widened is not None, "widen() was not called"
        rows, bias, tuned = self._widened
        y = None if tuned is None else tuned.multiply(rows, bias, x)
        return F.linear(x, rows, bias) if y is None else y

    def apply_gated(self, layer: LinearLayer, x: Tensor, act: str) -> Tensor | None:
        can_gate = isinstance(self._multiply, TunedProduct | NativeProduct)
        return self._multiply.gated(layer, x, act) if can_gate else None


Multiply = Callable[[LinearLayer, Tensor], Tensor]


def library_product(layer: LinearLayer, x: Tensor) -> Tensor:
    """The library's."""
    return F.linear(x, layer.param("weight"), layer.bias)


class NativeProduct:
    """Native code's, which takes any number of rows in the same order of sums."""

    def __init__(self, weight: Tensor, layer: LinearLayer) -> None:
        code = library()
        assert code is not None, "choose() has found native code"
        numbers, gated = in_bfloat16(weight), is_pair(layer.shape)
        self._matrix = NativeMatrix(code, numbers, weight.dtype, bias=layer.bias, gated=gated)

    def __call__(self, layer: LinearLayer, x: Tensor) -> Tensor:
        return self._matrix(x)

    def gated(self, layer: LinearLayer, x: Tensor, act: str) -> Tensor | None:
        """act(gate) * up, or None where the outputs do not divide into such."""
        return self._matrix.of_gate(x, act) if self._matrix.gated else None


def is_pair(shape: LinearShape) -> bool:
    """Whether a layer has two matrices of equal size, as gates and what they open are."""
    return len(shape.out_partitions) == 2 and len(set(shape.out_partitions)) == 1


class PackedProduct:
    """oneDNN's, with weights in its own opaque layout."""

    def __init__(self, weight: Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())

    def __call__(self, layer: LinearLayer, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.default(x, self._packed, layer.bias, "none", [], "")


class TunedProduct:
    """By the kernels that are fastest for this shape and so many rows, ours or the library's."""

    def __init__(self, weight: Tensor) -> None:
        from pellucid.kernels.products.own_products import (  # where Triton is installed
            OwnProducts,
            choices_for,
        )

        self._own = OwnProducts(weight, choices_for(weight))

    def __call__(self, layer: LinearLayer, x: Tensor) -> Tensor:
        y = self.multiply(layer.param("weight"), layer.bias, x)
        return library_product(layer, x) if y is None else y

    def gated(self, layer: LinearLayer, x: Tensor, act: str) -> Tensor | None:
        """act(gate) * up, or None where the library is faster."""
        return self.multiply(layer.param("weight"), layer.bias, x, act)

    def multiply(
        self, weight: Tensor, bias: Tensor | None, x: Tensor, act: str | None = None
    ) -> Tensor | None:
        """With the weight that this was made for, wherever it is now; None where the library is faster."""
        y = self._own(x.reshape(-1, x.shape[-1]), weight, bias=bias, act=act)
        return None if y is None else y.view(*x.shape[:-1], y.shape[-1])


class Widened(NamedTuple):
    """A layer's matrix with others' rows behind it."""

    rows: Tensor  # [out_features + num_rows, in_features]
    bias: Tensor | None  # zeros for theirs
    tuned: TunedProduct | None  # None: the library's product


def multiplies_bfloat16() -> bool:
    """Whether native code is the fastest here: with narrow vectors torch's product is."""
    code = library() if serves(torch.bfloat16) else None
    return code is not None and code.lanes >= 8


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
