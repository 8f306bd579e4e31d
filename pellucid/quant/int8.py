"""INT8 weights with a scale for each output, stored so or made as plain weights load.

On a GPU activations are rounded to INT8, too, where a checkpoint says so (`bytes_product.py`); others stay as
they are, and kernels unpack the weights in registers (`packed.py`).  On a CPU the product is of integers,
packed once for it, and yet loses nothing of the activations: they are rounded to 16 bits, of the token's
largest, and the two bytes are two rows of the same product.  Sums of integers are exact, so a token's result
does not depend on which others are computed with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from pellucid.forward import ForwardInput
from pellucid.kernels.packed.packed_weight import GroupCodes
from pellucid.kernels.products.round_rows import Rounding
from pellucid.kernels.products.scaled_matmul import scaled_matmul
from pellucid.native.library import library, serves
from pellucid.native.matrix import NativeMatrix, in_int8
from pellucid.platform import Platform
from pellucid.quant.base import HoldsCodes, LinearLayer, LinearShape, ParamSpec, kept_in_bytes, matrix
from pellucid.quant.bytes_product import BytesProduct, OfBytes
from pellucid.quant.codes import ROW, S8, Codes, Scales
from pellucid.quant.fp8 import OutputScales, scale_of_inputs
from pellucid.quant.packed import Gates, Multiply, group_codes, product_of
from pellucid.quant.products import Multiplier, Product, int8_product
from pellucid.quant.rounding import in_slices
from pellucid.quant.tables import rows_in
from pellucid.quant.unquantized import Unquantized, is_pair

INT8_MAX = 127
LARGEST = 127 * 256  # of 16-bit activations: its upper byte, rounded, is 127
ZERO = 128  # what stands for 0 in an unsigned byte
SMALLEST = 1e-30  # of a token's largest activation: a token of zeros has a scale, too


@dataclass(frozen=True, slots=True)
class Int8Format:
    """How a checkpoint stores its INT8 matrices.

    activations: how GPUs are to round them to INT8; plain ones stay as they are, as they do on a CPU.
    """

    activations: Literal["plain", "dynamic", "static"] = "plain"


class Int8(OfBytes):
    """One matrix [out, in] of INT8 and a scale for each row.  stored: the checkpoint has them."""

    def __init__(self, stored: Int8Format | None = None) -> None:
        self.stored = stored
        self.activations = "plain" if stored is None else stored.activations
        self.table: HoldsCodes | None = None
        self._multiply: Multiply | None = None
        self._native: NativeMatrix | None = None  # in the stead of it, or `_product`

    def choose(self, shape: LinearShape, platform: Platform) -> Product:
        is_cpu = platform.device == "cpu"
        native = is_cpu and serves(shape.dtype)
        # Codes of a table that is looked up, too, lie as they are.
        packs = not native and can_pack() if is_cpu else self.table is None
        self._choice = int8_product(
            *(platform, shape.dtype),
            rounds=self.activations != "plain",
            is_static=self.activations == "static",
            packs=packs,
            native=native,
        )
        return self._choice

    def params(self, shape: LinearShape) -> dict[str, ParamSpec]:
        if self.stored is None:
            return kept_in_bytes(Unquantized().params(shape))
        size, scales = (shape.out_features, shape.in_features), OutputScales(shape, block=None)
        params = {
            "weight": ParamSpec(shape=size, dtype=torch.int8, place=matrix(shape), fill="bits"),
            "weight_scale": ParamSpec(shape=(size[0], 1), dtype=torch.float32, place=scales, fill="near_one"),
        }
        if self.activations == "static":
            params["input_scale"] = scale_of_inputs(shape)
        return params

    def finish(self, layer: LinearLayer) -> None:
        assert self._choice is not None, "choose() was not called"
        weight = layer.param("weight")
        if self.stored is not None:
            scale = layer.param("weight_scale")[:, 0]
            layer.replace("weight_scale", None)
        elif (shared := rows_in(self.table, torch.int8)) is not None:
            weight, scale = shared[0], shared[1][:, 0]
        else:
            weight, scale = in_slices(weight.detach(), quantize_rows)
        layer.replace("weight", None)
        multiplier = self._choice.multiplier
        if multiplier is Multiplier.NATIVE:
            self._native = native_matrix(weight, scale, layer)
        elif multiplier is Multiplier.INT8_KERNELS:
            # The parts see the same inputs; the largest of their scales loses none of them.
            static = layer.param("input_scale").max() if self.activations == "static" else None
            rounding = Rounding(static=static, dtype=torch.int8)
            self._product = BytesProduct(layer, weight, scale[:, None], self._choice, rounding)
        elif multiplier is Multiplier.UNPACKED:
            parts = parts_of(weight.detach(), scale.detach(), layer.shape)
            self._multiply = product_of(parts, layer.shape.dtype, self._choice)
        else:
            self._multiply = MULTIPLY[multiplier](weight, scale)

    def apply(self, layer: LinearLayer, x: Tensor, fwd: ForwardInput | None) -> Tensor:
        if self._product is not None:
            return self._product(layer, x)
        if self._native is not None:
            return self._native(x)
        assert self._multiply is not None, "finish() was not called after loading"
        y = self._multiply(x.reshape(-1, x.shape[-1]), layer.bias)
        return y.view(*x.shape[:-1], layer.shape.out_features)

    def apply_gated(self, layer: LinearLayer, x: Tensor, act: str) -> Tensor | None:
        if self._native is not None:
            return self._native.of_gate(x, act) if self._native.gated else None
        if not isinstance(self._multiply, Gates):
            return None
        y = self._multiply.gated(x.reshape(-1, x.shape[-1]), act, layer.bias)
        return None if y is None else y.view(*x.shape[:-1], y.shape[-1])


def parts_of(weight: Tensor, scale: Tensor, shape: LinearShape) -> list[GroupCodes]:
    """The matrices that weight [N, K] is merged of, as codes that can be packed.  scale: [N]."""
    codes = Codes(q=weight, code=S8, group=ROW, scale=Scales(scale[:, None]))
    whole, ends = group_codes(codes), list(accumulate(shape.out_partitions, initial=0))
    return [whole.cut(slice(*rows), slice(0, shape.in_features)) for rows in pairwise(ends)]


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

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = scaled_matmul(x, None, self.weight, self.scale, block=x.shape[1], dtype=x.dtype)
        return y if bias is None else y.add_(bias)


class WideProduct:
    """Weights widened at each call to a type in which they are exact; scales come last.

    That is the activations' own type, but for float16: sums of up to 127 times them would overflow it.
    """

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        self.weight, self.scale = weight, scale

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        wide = x.float() if x.dtype == torch.float16 else x
        y = (F.linear(wide, self.weight.to(wide.dtype)) * self.scale).to(x.dtype)
        return y if bias is None else y.add_(bias)


class PackedProduct:
    """oneDNN's product of bytes with packed INT8, two rows of bytes a token."""

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        self.packed = torch.ops.onednn.qlinear_prepack(weight, None)
        self.scale = scale
        self.zeros = torch.zeros(len(scale), dtype=torch.int32)  # INT8 weights are symmetric

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        bytes, step = split_bytes(x)
        y = torch.ops.onednn.qlinear_pointwise.default(
            *(bytes, 1.0, ZERO),
            *(self.packed, self.scale, self.zeros),
            *(None, 1.0, 0, torch.float32),  # no bias; the result is not quantized
            *("none", [], ""),  # nor anything done to it
        )
        low, high = y.view(2, len(x), len(self.scale))
        y = torch.add(low, high, alpha=256).mul_(step).to(x.dtype)
        return y if bias is None else y.add_(bias)


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
