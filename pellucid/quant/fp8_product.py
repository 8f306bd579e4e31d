"""The arithmetic of FP8 (E4M3): rounding to it, and products of what was rounded.

y is the sum over blocks of inputs of s_x s_w (x / s_x) (w / s_w), added up in float32, or nearly so: Hopper's
tensor cores keep about 14 bits of a sum, which few rows' kernels and the vendor's product of whole rows take
as it is; FP8 itself has four.  A block is a whole row or as many inputs as the checkpoint says.  GPUs from
Hopper on multiply in FP8; others multiply the same rounded numbers in float32, exact but slow: there it is
for checking results.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from pellucid.kernels.block_fp8_matmul import block_fp8_matmul, block_fp8_matmul_ref
from pellucid.kernels.quantize_fp8 import Rounded, quantize_fp8, quantize_fp8_ref
from pellucid.platform import has_triton
from pellucid.quant.base import LinearLayer, LinearShape


class Multiply(Protocol):
    """x [T, K] times weight [N, K] transposed, both FP8 with a scale for each `block` of a row's inputs."""

    def __call__(
        self,
        x: Tensor,
        x_scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        *,
        block: int,
        dtype: torch.dtype,
    ) -> Tensor: ...


class Few(Protocol):
    """The product for few rows, rounded or not, bias added; None where the others are no slower."""

    def __call__(self, x: Tensor | Rounded, layer: LinearLayer) -> Tensor | None: ...


class Fp8Product:
    """The product with an FP8 matrix [N, K], which becomes the layer's "weight".

    scale: float32 [N, G], of each output and block of inputs.  block: inputs a block, K for whole rows.
    static: one scale of all activations; None gives each token (and block) its own.
    """

    def __init__(
        self, layer: LinearLayer, weight: Tensor, scale: Tensor, *, block: int, static: Tensor | None = None
    ) -> None:
        layer.replace("weight", weight.detach())
        layer.replace("weight_scale", scale.detach())
        if static is not None:
            layer.replace("input_scale", static.detach())
        self.block = block
        self.is_static = static is not None
        is_fused = weight.device.type == "cuda" and has_triton()
        self.quantize = quantize_fp8 if is_fused else quantize_fp8_ref
        self.multiply: Multiply = choose_multiply(layer.shape, weight.device, block)
        has_few = is_fused and self.multiply is multiply_rows and not self.is_static
        self.few: Few = few_rows(weight) if has_few else no_few_rows

    def __call__(self, layer: LinearLayer, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y = self.few(rows, layer)
        if y is None:
            static = layer.param("input_scale") if self.is_static else None
            y = self._product(layer, Rounded(*self.quantize(rows, self.block, static), x.dtype))
        return y.view(*x.shape[:-1], y.shape[-1])

    def of_rounded(self, layer: LinearLayer, x: Rounded) -> Tensor:
        """The same for rows [T, K] that were rounded as `quantize` would: a row is one block."""
        assert self.block == x.values.shape[1] and not self.is_static, (self.block, x.values.shape)
        y = self.few(x, layer)
        return self._product(layer, x) if y is None else y

    def _product(self, layer: LinearLayer, x: Rounded) -> Tensor:
        weight, weight_scale = layer.param("weight"), layer.param("weight_scale")
        y = self.multiply(x.values, x.scales, weight, weight_scale, block=self.block, dtype=x.dtype)
        return y if layer.bias is None else y + layer.bias


def choose_multiply(shape: LinearShape, device: torch.device, block: int) -> Multiply:
    """The hardware's product where there is one; it rounds to bfloat16, too coarse for other dtypes."""
    has_fp8 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    if not has_fp8 or shape.dtype != torch.bfloat16:
        return block_fp8_matmul_ref
    if block == shape.in_features:
        fits = shape.in_features % 16 == 0 and shape.out_features % 16 == 0
        return multiply_rows if fits else block_fp8_matmul_ref
    fits = block >= 32 and block & (block - 1) == 0 and has_triton()
    return block_fp8_matmul if fits else block_fp8_matmul_ref


def few_rows(weight: Tensor) -> Few:
    """Kernels for few rows, those that are fast for this weight [N, K] on its GPU."""
    from pellucid.kernels.own_products import OwnFp8Products, choices_for  # where Triton is installed

    small = OwnFp8Products(weight, choices_for(weight))

    def few(x: Tensor | Rounded, layer: LinearLayer) -> Tensor | None:
        return small(x, layer.param("weight"), layer.param("weight_scale"), bias=layer.bias)

    return few


def no_few_rows(x: Tensor | Rounded, layer: LinearLayer) -> None:
    """However few there are."""


def multiply_rows(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, *, block: int, dtype: torch.dtype
) -> Tensor:
    """The vendor's product, which knows one scale for each token and each output: a row is one block."""
    assert block == x.shape[1], (block, x.shape)
    if len(x) == 0:
        return x.new_empty(0, len(weight), dtype=dtype)
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        x,
        weight.t(),
        scale_a=x_scale,
        scale_b=weight_scale.view(1, -1),
        out_dtype=dtype,
        use_fast_accum=True,
    )
