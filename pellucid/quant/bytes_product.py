"""Products with FP8 or INT8 weights: activations are rounded, too, where the machine multiplies such bytes.

y is the sum over blocks of inputs of s_x s_w (x / s_x) (w / s_w), added up in float32, or nearly so: Hopper's
tensor cores keep about 14 bits of a sum, which few rows' kernels and the vendor's product of whole rows take
as it is, where there are blocks of each alone; FP8 itself has four.  A block is a whole row or as many inputs
as the checkpoint says.  GPUs of compute capability 8.9 and newer multiply in FP8; older ones widen the
weights in registers and leave activations as they are; CPUs multiply the same rounded numbers in float32,
exact but slow: there it is for checking results.  Sums of integers are exact, and rounded once, in float32.
`products.py` decides.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from pellucid.kernels.products.round_rows import Rounded, Rounding, round_rows, round_rows_ref
from pellucid.kernels.products.scaled_matmul import scaled_matmul, scaled_matmul_ref
from pellucid.quant.base import LinearLayer, LinearShape
from pellucid.quant.products import Multiplier, Product

BLOCK = 128  # outputs, and inputs
MOST_FEW = 128  # rows, that are kernels' of ours where the vendor has a product of blocks


class Multiply(Protocol):
    """x [T, K] times FP8 or INT8 weight [N, K] transposed, with a scale for each `block` of a row's inputs.

    x_scale: of rounded activations; None: they are as they were.
    """

    def __call__(
        self,
        x: Tensor,
        x_scale: Tensor | None,
        weight: Tensor,
        weight_scale: Tensor,
        *,
        block: int,
        dtype: torch.dtype,
    ) -> Tensor: ...


class Few(Protocol):
    """The product for few rows, rounded or not, bias added; None where the others are no slower."""

    def __call__(self, x: Tensor | Rounded, layer: LinearLayer) -> Tensor | None: ...


class BytesProduct:
    """The product with an FP8 or INT8 matrix [N, K], which becomes the layer's "weight".

    scale: float32 [N, G], of each output and block of inputs.  rounding: of activations, to blocks as long.
    """

    def __init__(
        self,
        layer: LinearLayer,
        weight: Tensor,
        scale: Tensor,
        product: Product,
        rounding: Rounding,
    ) -> None:
        layer.replace("weight", weight.detach())
        layer.replace("weight_scale", scale.detach())
        self.rounds = product.rounds
        if rounding.static is not None:
            layer.replace("input_scale", rounding.static.detach() if self.rounds else None)
        self.block = rounding.group or weight.shape[1]
        self.rounding = rounding
        self.round = round_rows if weight.device.type == "cuda" else round_rows_ref
        self.multiply: Multiply = MULTIPLY[product.multiplier]
        self.few: Few = few_rows(weight, self.rounding) if product.has_few_rows else no_few_rows
        self.blocks = None
        if product.multiplier is Multiplier.FP8_BLOCKS:
            self.blocks = scales_of_blocks(weight, scale)

    def __call__(self, layer: LinearLayer, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if not self.rounds:
            y = self._product(layer, rows, None, x.dtype)
        else:
            y = None if self._is_many(rows) else self.few(rows, layer)
            y = self._of_many(layer, self.round(rows, self.rounding)) if y is None else y
        return y.view(*x.shape[:-1], y.shape[-1])

    def of_rounded(self, layer: LinearLayer, x: Rounded) -> Tensor:
        """The same for rows [T, K] that were rounded as `rounding` says."""
        y = None if self._is_many(x.values) else self.few(x, layer)
        return self._of_many(layer, x) if y is None else y

    def _is_many(self, rows: Tensor) -> bool:
        """Whether the vendor's product of blocks is the fastest."""
        return self.blocks is not None and len(rows) > MOST_FEW

    def _of_many(self, layer: LinearLayer, x: Rounded) -> Tensor:
        if self._is_many(x.values):
            assert self.blocks is not None
            y = multiply_blocks(x, layer.param("weight"), self.blocks)
            return y if layer.bias is None else y + layer.bias
        return self._product(layer, x.values, x.scales, x.dtype)

    def _product(self, layer: LinearLayer, x: Tensor, x_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        weight, weight_scale = layer.param("weight"), layer.param("weight_scale")
        y = self.multiply(x, x_scale, weight, weight_scale, block=self.block, dtype=dtype)
        return y if layer.bias is None else y + layer.bias


class OfBytes:
    """What methods have in common whose product, once weights are loaded, is a `BytesProduct`."""

    _choice: Product | None = None
    _product: BytesProduct | None = None

    def takes_rounded(self, shape: LinearShape) -> bool:
        assert self._choice is not None, "choose() was not called"
        return self._choice.rounds

    def rounding(self) -> Rounding:
        return self._loaded.rounding

    def apply_rounded(self, layer: LinearLayer, x: Rounded) -> Tensor:
        return self._loaded.of_rounded(layer, x)

    @property
    def _loaded(self) -> BytesProduct:
        assert self._product is not None, "finish() was not called after loading"
        return self._product


def few_rows(weight: Tensor, rounding: Rounding) -> Few:
    """Kernels for few rows, those that are fast for this weight [N, K] on its GPU."""
    from pellucid.kernels.products.own_products import (  # where Triton is installed
        OwnByteProducts,
        choices_for,
    )

    small = OwnByteProducts(weight, choices_for(weight, rounding.group), rounding)

    def few(x: Tensor | Rounded, layer: LinearLayer) -> Tensor | None:
        return small(x, layer.param("weight"), layer.param("weight_scale"), bias=layer.bias)

    return few


def no_few_rows(x: Tensor | Rounded, layer: LinearLayer) -> None:
    """However few there are."""


def multiply_rows(
    x: Tensor, x_scale: Tensor | None, weight: Tensor, weight_scale: Tensor, *, block: int, dtype: torch.dtype
) -> Tensor:
    """The vendor's product, which knows one scale for each token and each output: a row is one block."""
    assert block == x.shape[1] and x_scale is not None, (block, x.shape)
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


def scales_of_blocks(weight: Tensor, scale: Tensor) -> Tensor | None:
    """Of scale [N, G], which each 128 outputs share, one of these, as the vendor's product wants them.

    None: outputs have scales of their own, or this torch has no such product.
    """
    blocks = scale.detach().view(-1, BLOCK, scale.shape[1])
    if not bool((blocks == blocks[:, :1]).all()) or not knows_blocks(weight.device):
        return None
    return blocks[:, 0].contiguous()


@cache
def knows_blocks(device: torch.device) -> bool:
    """Whether torch multiplies FP8 with scales of blocks, tried on a small matrix."""
    ones = torch.ones(BLOCK, 4 * BLOCK, device=device).to(torch.float8_e4m3fn)
    rounded = Rounded(ones, torch.ones(4, BLOCK, device=device).t(), torch.bfloat16)
    try:
        y = multiply_blocks(rounded, ones, torch.ones(1, 4, device=device))
    except (RuntimeError, ValueError):
        return False
    return bool((y == 4 * BLOCK).all())


def multiply_blocks(x: Rounded, weight: Tensor, blocks: Tensor) -> Tensor:
    """The vendor's product with a scale for each token and 128 inputs, and each 128 x 128 weights.

    On an H200 1,290 TFLOP/s of many rows, which is twice what kernels of ours reach.  Rows are filled up to
    whole sixteens, as it wants them.
    """
    num_rows, more = len(x.values), -len(x.values) % 16
    values, scales = x.values, x.scales.t().contiguous()
    if more:
        values = torch.nn.functional.pad(values.view(torch.uint8), (0, 0, 0, more)).view(values.dtype)
        scales = torch.nn.functional.pad(scales, (0, more))
    y = torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        values, weight.t(), scale_a=scales.t(), scale_b=blocks.t(), out_dtype=x.dtype
    )
    return y[:num_rows]


MULTIPLY: dict[Multiplier, Multiply] = {
    Multiplier.FP8_ROWS: multiply_rows,
    Multiplier.FP8_KERNELS: scaled_matmul,
    Multiplier.FP8_BLOCKS: scaled_matmul,
    Multiplier.FP8_KERNEL: scaled_matmul,
    Multiplier.INT8_KERNELS: scaled_matmul,
    Multiplier.WEIGHT_ONLY: scaled_matmul,
    Multiplier.REFERENCE: scaled_matmul_ref,
}
