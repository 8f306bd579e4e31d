"""INT8 weights with a scale for each output, stored so or made as plain weights load; activations stay plain.

On a GPU a kernel widens weights in registers, so memory is read a byte a weight.  On a CPU the product is of
integers, packed once for it, and yet loses nothing of the activations: they are rounded to 16 bits, of the
token's largest, and the two bytes are two rows of the same product.  Sums of integers are exact, so a token's
result does not depend on which others are computed with it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from pellucid.forward import ForwardInput
from pellucid.kernels.scaled_matmul import scaled_matmul
from pellucid.native.library import library, serves
from pellucid.native.matrix import NativeMatrix, in_int8
from pellucid.platform import Platform
from pellucid.quant.base import HoldsCodes, LinearLayer, LinearShape, ParamSpec, kept_in_bytes, matrix
from pellucid.quant.fp8 import OutputScales
from pellucid.quant.products import Multiplier, Product, int8_product
from pellucid.quant.rounding import in_slices
from pellucid.quant.tables import rows_in
from pellucid.quant.unquantized import Unquantized, is_pair

INT8_MAX = 127
LARGEST = 127 * 256  # of 16-bit activations: its upper byte, rounded, is 127
ZERO = 128  # what stands for 0 in an unsigned byte
SMALLEST = 1e-30  # of a token's largest activation: a token of zeros has a scale, too

Multiply = Callable[[Tensor], Tensor]  # x [T, K] -> [T, N]


class Int8:
    """One matrix [out, in] of INT8 and a scale for each row.  is_stored: the checkpoint has them."""

    def __init__(self, *, is_stored: bool = False) -> None:
        self._is_stored = is_stored
        self.table: HoldsCodes | None = None
        self._choice: Product | None = None
        self._multiply: Multiply | None = None
        self._native: NativeMatrix | None = None  # in the stead of it

    def choose(self, shape: LinearShape, platform: Platform) -> Product:
        is_cpu = platform.device == "cpu"
        native = is_cpu and serves(shape.dtype)
        self._choice = int8_product(platform, packs=is_cpu and not native and can_pack(), native=native)
        return self._choice

    def params(self, shape: LinearShape) -> dict[str, ParamSpec]:
        if not self._is_stored:
            return kept_in_bytes(Unquantized().params(shape))
        size, scales = (shape.out_features, shape.in_features), OutputScales(shape, block=None)
        return {
            "weight": ParamSpec(shape=size, dtype=torch.int8, place=matrix(shape), fill="bits"),
            "weight_scale": ParamSpec(shape=(size[0], 1), dtype=torch.float32, place=scales, fill="near_one"),
        }

    def finish(self, layer: LinearLayer) -> None:
        weight = layer.param("weight")
        if self._is_stored:
            scale = layer.param("weight_scale")[:, 0]
            layer.replace("weight_scale", None)
        elif (shared := rows_in(self.table, torch.int8)) is not None:
            weight, scale = shared[0], shared[1][:, 0]
        else:
            weight, scale = in_slices(weight.detach(), quantize_rows)
        layer.replace("weight", None)
        assert self._choice is not None, "choose() was not called"
        if self._choice.multiplier is Multiplier.NATIVE:
            self._native = native_matrix(weight, scale, layer)
            return
        self._multiply = MULTIPLY[self._choice.multiplier](weight, scale)

    def apply(self, layer: LinearLayer, x: Tensor, fwd: ForwardInput | None) -> Tensor:
        if self._native is not None:
            return self._native(x)
        assert self._multiply is not None, "finish() was not called after loading"
        y = self._multiply(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], layer.shape.out_features)
        return y if layer.bias is None else y + layer.bias

    def apply_gated(self, layer: LinearLayer, x: Tensor, act: str) -> Tensor | None:
        if self._native is None or not self._native.gated:
            return None
        return self._native.of_gate(x, act)


def native_matrix(weight: Tensor, scale: Tensor, layer: LinearLayer) -> NativeMatrix:
    """INT8 [N, K] with a scale for each output [N], for native code."""
    code = library()
    assert code is not None, "choose() has found native code"
    shape = layer.shape
    numbers, gated = in_int8(weight.detach(), scale.detach()), is_pair(shape)
    return NativeMatrix(code, numbers, shape.dtype, bias=layer.bias, gated=gated)


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> (INT8 [N, K], float32 scales [N]) with weight about their product."""
    wide = weight.float()
    scale = wide.abs().amax(dim=-1) / INT8_MAX
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (wide / scale[:, None]).round().to(torch.int8), scale


class KernelProduct:
    """Ours for GPUs."""

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        self.weight, self.scale = weight, scale[:, None].contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        return scaled_matmul(x, None, self.weight, self.scale, block=x.shape[1], dtype=x.dtype)


class WideProduct:
    """Weights widened at each call to a type in which they are exact; scales come last.

    That is the activations' own type, but for float16: sums of up to 127 times them would overflow it.
    """

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        self.weight, self.scale = weight, scale

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype == torch.float16 else x
        return (F.linear(wide, self.weight.to(wide.dtype)) * self.scale).to(x.dtype)


class PackedProduct:
    """oneDNN's product of bytes with packed INT8, two rows of bytes a token."""

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        self.packed = torch.ops.onednn.qlinear_prepack(weight, None)
        self.scale = scale
        self.zeros = torch.zeros(len(scale), dtype=torch.int32)  # INT8 weights are symmetric

    def __call__(self, x: Tensor) -> Tensor:
        bytes, step = split_bytes(x)
        y = torch.ops.onednn.qlinear_pointwise.default(
            *(bytes, 1.0, ZERO),
            *(self.packed, self.scale, self.zeros),
            *(None, 1.0, 0, torch.float32),  # no bias; the result is not quantized
            *("none", [], ""),  # nor anything done to it
        )
        low, high = y.view(2, len(x), len(self.scale))
        return torch.add(low, high, alpha=256).mul_(step).to(x.dtype)


MULTIPLY: dict[Multiplier, Callable[[Tensor, Tensor], Multiply]] = {
    Multiplier.WEIGHT_ONLY: KernelProduct,
    Multiplier.PACKED: PackedProduct,
    Multiplier.WIDENED: WideProduct,
}


def split_bytes(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> (bytes [2T, K], step [T, 1]), so that x is about (low + 256 high) step.

    low and high are the upper and the lower T rows less ZERO, each in -128 .. 127.
    """
    largest = x.abs().amax(dim=-1, keepdim=True).float().clamp_min(SMALLEST)
    # Adding ZERO to both bytes makes them unsigned and carries from low to high; the half rounds.
    shifted = (x * (LARGEST / largest)).add_(ZERO * 257 + 0.5).to(torch.int32).to(torch.uint16)
    pairs = shifted.view(torch.uint8).view(*x.shape, 2)
    return pairs.permute(2, 0, 1).reshape(-1, x.shape[1]), largest / LARGEST


@cache
def can_pack() -> bool:
    """Whether this torch and this CPU multiply packed INT8 exactly, tried where lesser CPUs saturate."""
    with torch.device("cpu"):  # also where a model is built that is only looked at
        weight = torch.full((16, 64), INT8_MAX, dtype=torch.int8)
        weight[::2] *= -1
        x = torch.ones(2, 64)
        x[1, 32:] = -1
        try:
            y = PackedProduct(weight, torch.ones(16))(x)
        except (AttributeError, RuntimeError):
            return False
        return torch.allclose(y, F.linear(x, weight.float()))
