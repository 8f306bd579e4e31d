"""The arithmetic of FP8 (E4M3): rounding to it, and products of what was rounded.

y is the sum over blocks of inputs of s_x s_w (x / s_x) (w / s_w), added up in float32.  A block is a whole
row or as many inputs as the checkpoint says.  GPUs from Hopper on multiply in FP8; others multiply the same
rounded numbers in float32, exact but slow: there it is for checking results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from pellucid.quant.base import LinearLayer, LinearShape, elements

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
SMALLEST = 1e-12  # of the largest element: a group of zeros has a scale, too

Multiply = Callable[[Tensor, Tensor, LinearLayer], Tensor]  # x FP8 [T, K], scales [T, G], layer -> y [T, N]


class Quantize(Protocol):
    """Rounds activations to FP8."""

    def __call__(self, x: Tensor, group: int, static: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x [T, K] -> (FP8 [T, K], float32 scales [T, G]), a scale for `group` features or the static one."""
        ...


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
        self.quantize: Quantize = choose_quantize(weight.device)
        self.multiply: Multiply = choose_multiply(layer.shape, weight.device, block)

    def __call__(self, layer: LinearLayer, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        static = layer.param("input_scale") if self.is_static else None
        y = self.multiply(*self.quantize(tokens, self.block, static), layer)
        return y.view(*x.shape[:-1], y.shape[-1])


def quantize_groups(x: Tensor, group: int, static: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As `Quantize` says, in plain torch."""
    num_tokens, num_features = x.shape
    num_groups = elements(num_features, group)
    wide = F.pad(x.float(), (0, num_groups * group - num_features)).view(num_tokens, num_groups, group)
    if static is None:
        scale = wide.abs().amax(dim=-1, keepdim=True).clamp_min(SMALLEST) * (1 / FP8_MAX)
    else:
        scale = static.view(1, 1, 1).expand(num_tokens, num_groups, 1)
    rounded = (wide / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return rounded.view(num_tokens, num_groups * group)[:, :num_features], scale.squeeze(-1)


def choose_quantize(device: torch.device) -> Quantize:
    """One kernel on a GPU, plain torch elsewhere."""
    if device.type != "cuda":
        return quantize_groups
    from pellucid.kernels.quantize_fp8 import quantize_fp8  # not every machine has Triton

    return quantize_fp8


def choose_multiply(shape: LinearShape, device: torch.device, block: int) -> Multiply:
    """The hardware's product where there is one; it rounds to bfloat16, too coarse for other dtypes."""
    has_fp8 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    if not has_fp8 or shape.dtype != torch.bfloat16:
        return ExactMultiply(block)
    if block == shape.in_features:
        fits = shape.in_features % 16 == 0 and shape.out_features % 16 == 0
        return multiply_rows if fits else ExactMultiply(block)
    return BlockMultiply(block) if block >= 32 and block & (block - 1) == 0 else ExactMultiply(block)


def multiply_rows(x: Tensor, scale: Tensor, layer: LinearLayer) -> Tensor:
    """The hardware's product with one scale for each token and each output."""
    if len(x) == 0:
        return x.new_empty(0, layer.shape.out_features, dtype=layer.shape.dtype)
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        x,
        layer.param("weight").t(),
        scale_a=scale,
        scale_b=layer.param("weight_scale").view(1, -1),
        bias=layer.bias,
        out_dtype=layer.shape.dtype,
    )


class BlockMultiply:
    """The hardware's product with scales of blocks."""

    def __init__(self, block: int) -> None:
        from pellucid.kernels.block_fp8_matmul import block_fp8_matmul  # not every machine has Triton

        self.block = block
        self.kernel = block_fp8_matmul

    def __call__(self, x: Tensor, scale: Tensor, layer: LinearLayer) -> Tensor:
        weight, weight_scale = layer.param("weight"), layer.param("weight_scale")
        y = self.kernel(x, scale, weight, weight_scale, block=self.block, dtype=layer.shape.dtype)
        return y if layer.bias is None else y + layer.bias


class ExactMultiply:
    """The product of the rounded numbers in float32."""

    def __init__(self, block: int) -> None:
        self.block = block

    def __call__(self, x: Tensor, scale: Tensor, layer: LinearLayer) -> Tensor:
        weight = self._widen(layer.param("weight"), layer.param("weight_scale"))
        y = F.linear(self._widen(x, scale), weight).to(layer.shape.dtype)
        return y if layer.bias is None else y + layer.bias

    def _widen(self, rounded: Tensor, scale: Tensor) -> Tensor:
        if scale.shape[1] > 1:
            scale = scale.repeat_interleave(self.block, dim=1)[:, : rounded.shape[1]]
        return rounded.float() * scale
