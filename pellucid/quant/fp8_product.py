"""The arithmetic of FP8 (E4M3): rounding to it, and products of what was rounded.

y is the sum over blocks of inputs of s_x s_w (x / s_x) (w / s_w), added up in float32.  A block is a whole
row or as many inputs as the checkpoint says.  GPUs from Hopper on multiply in FP8; others multiply the same
rounded numbers in float32, exact but slow: there it is for checking results.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from pellucid.kernels.block_fp8_matmul import block_fp8_matmul, block_fp8_matmul_ref
from pellucid.kernels.quantize_fp8 import quantize_fp8, quantize_fp8_ref
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

    def __call__(self, layer: LinearLayer, x: Tensor) -> Tensor:
        static = layer.param("input_scale") if self.is_static else None
        tokens, scale = self.quantize(x.reshape(-1, x.shape[-1]), self.block, static)
        weight, weight_scale = layer.param("weight"), layer.param("weight_scale")
        y = self.multiply(tokens, scale, weight, weight_scale, block=self.block, dtype=x.dtype)
        y = y.view(*x.shape[:-1], y.shape[-1])
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


def multiply_rows(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, *, block: int, dtype: torch.dtype
) -> Tensor:
    """The vendor's product, which knows one scale for each token and each output: a row is one block."""
    assert block == x.shape[1], (block, x.shape)
    if len(x) == 0:
        return x.new_empty(0, len(weight), dtype=dtype)
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        x, weight.t(), scale_a=x_scale, scale_b=weight_scale.view(1, -1), out_dtype=dtype
    )
