"""FP8 weights (E4M3) and FP8 activations: quantized while plain weights load, or stored so by other tools.

Here is what checkpoints say and where their tensors go; `bytes_product.py` has the arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pellucid.forward import ForwardInput
from pellucid.kernels.products.round_rows import (
    BY_ROWS,
    FP8,
    Rounding,
    may_be_shared,
    rounded_bytes_ref,
)
from pellucid.platform import Platform
from pellucid.quant.base import (
    Coords,
    HoldsCodes,
    LinearLayer,
    LinearShape,
    ParamSpec,
    ScalarPerPart,
    check_shape,
    elements,
    kept_in_bytes,
    matrix,
    slice_of,
)
from pellucid.quant.bytes_product import BytesProduct, OfBytes
from pellucid.quant.products import Product, fp8_product
from pellucid.quant.rounding import in_slices
from pellucid.quant.tables import rows_in
from pellucid.quant.unquantized import Unquantized

Activations = Literal["dynamic", "static"]
Block = tuple[int, int]  # (outputs, inputs) that share a scale
LEAST_BLOCK = 16  # inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Format:
    """How a checkpoint stores its FP8 matrices.

    block: of the weights' scales; None has one for each output or for the whole matrix, as the tensors show.
    """

    activations: Activations = "dynamic"
    block: Block | None = None
    scale_name: str = "weight_scale"


class Fp8(OfBytes):
    """FP8 weights from a checkpoint."""

    def __init__(self, format: Fp8Format) -> None:
        self.format = format

    def choose(self, shape: LinearShape, platform: Platform) -> Product:
        is_static = self.format.activations == "static"
        self._choice = fp8_product(shape, platform, block=self._block(shape), is_static=is_static)
        return self._choice

    def params(self, shape: LinearShape) -> dict[str, ParamSpec]:
        num_blocks = elements(shape.in_features, self._block(shape))
        size = (shape.out_features, shape.in_features)
        params = {
            "weight": ParamSpec(shape=size, dtype=FP8, place=matrix(shape)),
            self.format.scale_name: ParamSpec(
                shape=(shape.out_features, num_blocks),
                dtype=torch.float32,
                place=OutputScales(shape, self.format.block),
                fill="one" if self.format.block else "near_one",  # outputs share those of blocks
            ),
        }
        if self.format.activations == "static":
            params["input_scale"] = scale_of_inputs(shape)
        return params

    def finish(self, layer: LinearLayer) -> None:
        weight, scale = layer.param("weight"), layer.param(self.format.scale_name)
        layer.replace(self.format.scale_name, None)
        # The parts see the same inputs; the largest of their scales loses none of them.
        static = layer.param("input_scale").max() if self.format.activations == "static" else None
        assert self._choice is not None, "choose() was not called"
        block = self._block(layer.shape)
        rounding = Rounding(None if block == layer.shape.in_features else block, static)
        self._product = BytesProduct(layer, weight, scale, self._choice, rounding)

    def apply(self, layer: LinearLayer, x: Tensor, fwd: ForwardInput | None) -> Tensor:
        return self._loaded(layer, x)

    def takes_rounded(self, shape: LinearShape) -> bool:
        return super().takes_rounded(shape) and may_be_shared(self.format.block and self._block(shape))

    def _block(self, shape: LinearShape) -> int:
        return inputs_of(shape, self.format.block)


@dataclass(frozen=True, slots=True)
class OutputScales:
    """A scale for each output and block of inputs.

    The checkpoint may have one for the matrix, each output, or each block.  Merged matrices keep their own;
    where the checkpoint has one matrix for several, each has a piece.
    """

    shape: LinearShape
    block: Block | None

    def __call__(self, param: Tensor, part: int, tensor: Tensor, coords: Coords) -> None:
        sizes, is_out = self.shape.out_partitions, self.shape.split == "out"
        num_outputs, num_inputs = sizes[part], self.shape.in_features
        if is_out:
            num_outputs = coords.whole(num_outputs)
        else:
            num_inputs = coords.whole(num_inputs)
        piece = coords.piece
        whole = self._spread(tensor, piece.total if piece else num_outputs, num_inputs)
        if piece is not None:
            whole = whole[piece.first : piece.first + piece.num]
        target, axis = param.narrow(0, sum(sizes[:part]), sizes[part]), 0 if is_out else 1
        if is_out or self.block:
            whole = slice_of(whole, axis, target.shape[axis], coords)
        target.copy_(whole)

    def _spread(self, tensor: Tensor, num_outputs: int, num_inputs: int) -> Tensor:
        """The checkpoint's scales as those of each output and block, of the whole layer."""
        if tensor.dtype == torch.uint8:  # powers of two
            tensor = tensor.view(torch.float8_e8m0fnu).float()
        cut = inputs_of(self.shape, self.block)
        num_blocks = elements(num_inputs, cut) if self.block else 1
        if tensor.numel() == 1:
            return tensor.reshape(1, 1).expand(num_outputs, num_blocks)
        if self.block is None:
            check_shape(tensor, (num_outputs, 1)[: tensor.dim()])
            return tensor.view(num_outputs, 1)
        rows, inputs = self.block
        check_shape(tensor, (elements(num_outputs, rows), elements(num_inputs, inputs)))
        tensor = tensor.repeat_interleave(inputs // cut, 1)[:, :num_blocks]
        return tensor.repeat_interleave(rows, 0)[:num_outputs]


def inputs_of(shape: LinearShape, block: Block | None) -> int:
    """The inputs that share a scale: of blocks that ranks cut, as many as divide both."""
    if block is None or not shape.is_part:
        return shape.in_features if block is None else block[1]
    cut = math.gcd(block[1], shape.in_features)
    if cut < min(LEAST_BLOCK, block[1]):
        raise ValueError(
            f"has blocks of {block[1]} inputs, and each rank gets {shape.in_features}, which cut them too "
            "small; use another tensor_parallel_size"
        )
    return cut


def scale_of_inputs(shape: LinearShape) -> ParamSpec:
    """What a checkpoint has of static activations: one scale for each matrix that is merged."""
    parts = (len(shape.out_partitions),)
    return ParamSpec(shape=parts, dtype=torch.float32, place=ScalarPerPart(), fill="near_one")


class QuantizedWhenLoaded(OfBytes):
    """Plain weights that become FP8 once they are loaded, with a scale for each output."""

    def __init__(self) -> None:
        self.table: HoldsCodes | None = None

    def choose(self, shape: LinearShape, platform: Platform) -> Product:
        self._choice = fp8_product(shape, platform, block=shape.in_features)
        return self._choice

    def params(self, shape: LinearShape) -> dict[str, ParamSpec]:
        return kept_in_bytes(Unquantized().params(shape))

    def finish(self, layer: LinearLayer) -> None:
        weight = layer.param("weight")
        shared = rows_in(self.table, FP8)
        rounded, scale = shared or in_slices(weight, lambda rows: rounded_bytes_ref(rows, rows.shape[1]))
        assert self._choice is not None, "choose() was not called"
        self._product = BytesProduct(layer, rounded, scale, self._choice, BY_ROWS)

    def apply(self, layer: LinearLayer, x: Tensor, fwd: ForwardInput | None) -> Tensor:
        return self._loaded(layer, x)
