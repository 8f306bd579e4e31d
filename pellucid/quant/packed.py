"""Codes that stay codes: 4 or 8 bits a weight in memory, whichever format a checkpoint has them in.

Integers of 2 and 3 bits are kept in 4, those of 5 to 7 in 8; with scales, zeros and minima of groups, and
tables of 16 numbers.  Inputs that GPTQ has quantized in an order of its own are brought into it when the
layer is called.  `kernels/packed/packed_weight.py` says how they lie, `packed_products.py` multiplies.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from pellucid.forward import ForwardInput
from pellucid.kernels.packed.packed_weight import (
    LEAST_GROUP,
    TILE,
    GroupCodes,
    Numbers,
    PackedWeight,
    numbers_of,
    packed,
)
from pellucid.native.library import library, serves
from pellucid.native.matrix import NativeMatrix
from pellucid.platform import Platform
from pellucid.quant.base import Coords, LinearLayer, LinearShape, ParamSpec, Sliced
from pellucid.quant.codes import E2M1, E4M3, E5M2, LUT4, PLAIN, S8, Code, Codes, Scales
from pellucid.quant.layouts.base import LayerFormat
from pellucid.quant.native_codes import native_numbers
from pellucid.quant.products import Multiplier, Product, packed_product

logger = logging.getLogger(__name__)
Multiply = Callable[[Tensor, Tensor | None], Tensor]  # x [T, K], bias [N] -> [T, N]
NUMBERS = {E2M1: Numbers.E2M1, LUT4: Numbers.TABLE, E4M3: Numbers.E4M3, E5M2: Numbers.E5M2}
WITH_ZEROS = ("awq", "ggml/Q2_K", "ggml/Q4_K", "ggml/Q5_K", "ggml/Q4_1", "ggml/Q5_1")  # or minima
DUMMY_SPREAD = 0.02  # standard deviation of dummy weights
SLICE_BYTES = 32 << 20  # of numbers that are made of codes at once, where no kernel does it in registers


def bits_kept(code: Code) -> int:
    """Of a weight, in memory."""
    return 4 if code.bits <= 4 else 8


def kept_bits(format: LayerFormat, num_in: int) -> float:
    """Of a weight, in memory, scales and all, as far as its format tells."""
    beside = 2 if format.options & {"asym"} or format.layout in WITH_ZEROS else 1
    return bits_kept(format.code) + 16 * beside / (format.group.inputs or num_in)


def refusal(format: LayerFormat) -> str | None:
    """Why codes of this format cannot stay packed; None: they can."""
    if format.code == PLAIN:
        return "its numbers are no codes of at most 8 bits"
    if format.group.inputs and math.gcd(format.group.inputs, TILE) < LEAST_GROUP:
        return f"groups of {format.group.inputs} inputs are no steps of {LEAST_GROUP}"
    return None


class Packed:
    """Matrices of codes from a checkpoint, or of whoever calls `keep`."""

    def __init__(self, format: LayerFormat) -> None:
        self.format = format
        self._choice: Product | None = None
        self._multiply: Multiply | None = None

    def choose(self, shape: LinearShape, platform: Platform) -> Product:
        kept = f"{bits_kept(self.format.code)} bits"
        native = platform.device == "cpu" and serves(shape.dtype)
        kind = f"{self.format.layout} {self.format.code.name}, {kept}"
        self._choice = packed_product(kind, platform, native=native)
        return self._choice

    def params(self, shape: LinearShape) -> dict[str, ParamSpec]:
        place = CodeSlices(shape.out_partitions, slice_axis=0 if shape.split == "out" else 1)
        size = (shape.out_features, shape.in_features)
        bits = kept_bits(self.format, shape.in_features)
        return {"weight": ParamSpec(shape=size, dtype=torch.uint8, place=place, fill="bits", kept_bits=bits)}

    def finish(self, layer: LinearLayer) -> None:
        weight = layer.param("weight")
        found = weight.spec.place.found  # pyright: ignore[reportAttributeAccessIssue]
        if found:
            parts = [found[part] for part in sorted(found)]
        else:
            parts = [dummy(part, self.format) for part in weight.split(list(layer.shape.out_partitions))]
        layer.replace("weight", None)
        self.keep(layer, parts)
        found.clear()

    def keep(self, layer: LinearLayer, parts: Sequence[GroupCodes | Tensor]) -> None:
        """Multiply with these matrices, one below the other, from now on; plain ones if any is plain."""
        assert self._choice is not None, "choose() was not called"
        try:
            self._multiply = product_of(parts, layer.shape.dtype, self._choice, layer.bias)
        except ValueError as error:
            logger.warning("a matrix of %s is decoded: %s", self._choice.kind, error)
            self._multiply = Dense(parts, layer.shape.dtype)

    def apply(self, layer: LinearLayer, x: Tensor, fwd: ForwardInput | None) -> Tensor:
        assert self._multiply is not None, "finish() was not called after loading"
        y = self._multiply(x.reshape(-1, x.shape[-1]), layer.bias)
        return y.view(*x.shape[:-1], layer.shape.out_features)

    def apply_gated(self, layer: LinearLayer, x: Tensor, act: str) -> Tensor | None:
        if not isinstance(self._multiply, Gates):
            return None
        y = self._multiply.gated(x.reshape(-1, x.shape[-1]), act, layer.bias)
        return None if y is None else y.view(*x.shape[:-1], y.shape[-1])


@runtime_checkable
class Gates(Protocol):
    """What may gate in the same pass in which it multiplies."""

    def gated(self, x: Tensor, act: str, bias: Tensor | None = None) -> Tensor | None: ...


@dataclass(frozen=True, slots=True)
class CodeSlices(Sliced):
    """Merged matrices of codes, a slice of each; their scales and all that belongs to codes is kept here."""

    found: dict[int, GroupCodes | Tensor] = field(default_factory=dict)

    def __call__(self, param: Tensor, part: int, tensor: Tensor, coords: Coords) -> None:
        """A matrix that turns out to be plain."""
        if tensor.device.type == "meta":  # whose shape alone is wanted to know
            Sliced.__call__(self, param, part, tensor, coords)
            return
        size = (self.sizes[part], param.shape[1])
        plain = torch.empty(size, dtype=tensor.dtype, device=param.device)
        Sliced(size[:1], 0, self.slice_axis)(plain, 0, tensor, coords)
        self.found[part] = plain

    def keep(self, param: Tensor, part: int, codes: Codes, coords: Coords) -> None:
        target = param.narrow(0, sum(self.sizes[:part]), self.sizes[part])
        whole = group_codes(codes)
        if coords.piece is not None:
            num = self._part(tuple(param.shape), part, coords)[0]
            first = coords.piece.within(num)[0]
            whole = whole.cut(slice(first, first + num), slice(0, whole.q.shape[1]))
        sizes, local = list(whole.q.shape), target.shape[self.slice_axis]
        first = min(coords.rank * local, sizes[self.slice_axis])
        cuts = [slice(0, sizes[0]), slice(0, sizes[1])]
        cuts[self.slice_axis] = slice(first, min(first + local, sizes[self.slice_axis]))
        slice_ = whole.cut(*cuts).padded(*target.shape)
        self.found[part] = replace(slice_, q=target.copy_(slice_.q))


def group_codes(codes: Codes) -> GroupCodes:
    """The same with a scale for each output and group of inputs.  Raises ValueError if they are no codes."""
    if codes.code == PLAIN:
        raise ValueError("its numbers are no codes of at most 8 bits")
    group = codes.group.inputs or codes.q.shape[1]
    scale = torch.ones(1, 1, device=codes.q.device) if codes.scale is None else codes.scale.numbers()
    middle, zero = 0, spread(codes, codes.zero)
    offset = spread(codes, codes.offset)
    scale = spread(codes, Scales(scale))
    assert scale is not None
    q = codes.q if codes.q.dtype == torch.uint8 else codes.q.view(torch.uint8)
    if codes.code == S8:
        q, middle = q ^ 128, 128
    if zero is not None and not is_whole(zero):
        offset = zero * scale if offset is None else offset + zero * scale
        zero = None
    if zero is not None and codes.code not in NUMBERS and bool((zero == zero[0, 0]).all()):
        middle, zero = middle + int(zero[0, 0]), None
    return GroupCodes(
        q=q,
        numbers=NUMBERS.get(codes.code, Numbers.INTEGER),
        bits=bits_kept(codes.code),
        group=group,
        scale=scale,
        middle=middle,
        zero=zero,
        offset=offset,
        table=codes.table,
        index=codes.index,
    )


def is_whole(zero: Tensor) -> bool:
    """Whether zeros are integers that 16-bit types hold exactly."""
    return bool((zero == zero.round()).all()) and float(zero.abs().max()) <= 256


def spread(codes: Codes, scales: Scales | None) -> Tensor | None:
    """A number for each output and group, float32 [N, G]."""
    if scales is None:
        return None
    numbers, (out, inn) = scales.numbers(), codes.q.shape[-2:]
    rows, groups = codes.group.counts(out, inn)
    if codes.index is not None:
        groups = max(groups, numbers.shape[1])
    numbers = numbers.expand(max(rows if codes.group.rows != 1 else out, numbers.shape[0]), groups)
    if len(numbers) != out:
        numbers = numbers.repeat_interleave(codes.group.rows or out, 0)[:out]
    return numbers.contiguous()


def dummy(bits: Tensor, format: LayerFormat) -> GroupCodes:
    """Random codes with scales that make them look like a model's weights."""
    kept, numbers = bits_kept(format.code), NUMBERS.get(format.code, Numbers.INTEGER)
    q = bits & (1 << format.code.bits) - 1
    if numbers in (Numbers.E4M3, Numbers.E5M2):
        q = bits & 0xBB  # none is infinite or large
    group = format.group.inputs or bits.shape[1]
    deviation = {Numbers.E2M1: 2.9, Numbers.TABLE: 0.6, Numbers.E4M3: 0.5, Numbers.E5M2: 0.5}
    step = DUMMY_SPREAD / deviation.get(numbers, 0.29 * (1 << format.code.bits))
    num_groups = -(-bits.shape[1] // group)
    scale = torch.full((len(bits), num_groups), step, device=bits.device)
    table = torch.linspace(-1, 1, 16, device=bits.device) if numbers is Numbers.TABLE else None
    middle = 1 << format.code.bits - 1 if numbers is Numbers.INTEGER else 0
    return GroupCodes(q=q, numbers=numbers, bits=kept, group=group, scale=scale, middle=middle, table=table)


def product_of(
    parts: Sequence[GroupCodes | Tensor], dtype: torch.dtype, product: Product, bias: Tensor | None = None
) -> Multiply:
    """What multiplies these matrices.  Raises ValueError where they cannot stay packed, and why."""
    codes = [part for part in parts if isinstance(part, GroupCodes)]
    if len(codes) < len(parts):
        raise ValueError("it is stored as plain numbers")
    ordered = [part.in_order() for part in codes]
    orders = [order for _, order in ordered]
    if any(order is not None for order in orders) and len(orders) > 1:
        raise ValueError("matrices of one layer have inputs in several orders")
    alike = {(part.numbers, part.bits, part.middle, part.zero is None) for part in codes}
    if len(alike) > 1:
        codes = [with_zeros(part) for part, _ in ordered]
    else:
        codes = [part for part, _ in ordered]
    if product.multiplier is Multiplier.UNPACKED:
        from pellucid.kernels.packed.packed_products import PackedProducts, gates  # where Triton is installed

        gated = is_pair(codes) and gates(codes[0], dtype)
        return PackedProducts(packed(codes, dtype, gated=gated), orders[0])
    if product.multiplier is Multiplier.NATIVE:
        return NativeProduct(codes, dtype, orders[0], bias)
    return Slices(packed(codes, dtype), orders[0])


def is_pair(parts: Sequence[GroupCodes]) -> bool:
    """Whether they are gates and as many outputs that these open."""
    return len(parts) == 2 and len(parts[0].q) == len(parts[1].q)


def with_zeros(part: GroupCodes) -> GroupCodes:
    """The same with all that is subtracted from codes in `zero`.  Raises ValueError for codes of a table."""
    if part.numbers is not Numbers.INTEGER:
        raise ValueError("matrices of one layer have codes of different kinds")
    zero = torch.zeros_like(part.scale) if part.zero is None else part.zero
    return replace(part, zero=zero + part.middle, middle=0)


class Dense:
    """The numbers of the codes: what is left where they cannot stay packed."""

    def __init__(self, parts: Sequence[GroupCodes | Tensor], dtype: torch.dtype) -> None:
        self.weight = torch.cat([plain(part).to(dtype) for part in parts])

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.weight, bias)


def plain(part: GroupCodes | Tensor) -> Tensor:
    """float32 [N, K] of codes whose inputs may be in any order; of a plain matrix itself."""
    if isinstance(part, Tensor):
        return part
    ordered = part
    if part.index is not None:  # a group for each input
        ordered = replace(
            part,
            index=None,
            group=1,
            scale=part.scale[:, part.index],
            zero=None if part.zero is None else part.zero[:, part.index],
            offset=None if part.offset is None else part.offset[:, part.index],
        )
    return ordered.dequantized()


class NativeProduct:
    """Native code's, which unpacks codes in registers for any number of rows."""

    def __init__(
        self, parts: Sequence[GroupCodes], dtype: torch.dtype, order: Tensor | None, bias: Tensor | None
    ) -> None:
        code, numbers = library(), native_numbers(parts)
        assert code is not None, "choose() has found native code"
        self.order = order
        self.matrix = NativeMatrix(code, numbers, dtype, bias=bias, gated=is_pair(parts))

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.matrix(x if self.order is None else x[:, self.order])

    def gated(self, x: Tensor, act: str, bias: Tensor | None = None) -> Tensor | None:
        if not self.matrix.gated:
            return None
        return self.matrix.of_gate(x if self.order is None else x[:, self.order], act)


class Slices:
    """The product where no kernel unpacks: some of W's numbers at a time."""

    def __init__(self, weight: PackedWeight, order: Tensor | None) -> None:
        self.weight, self.order = weight, order

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        x = x if self.order is None else x[:, self.order]
        num_out = self.weight.num_out
        step = max(1, SLICE_BYTES // (4 * self.weight.num_in * TILE)) * TILE
        slices = (numbers_of(self.weight, n, min(n + step, num_out)) for n in range(0, num_out, step))
        y = torch.cat([F.linear(x, numbers) for numbers in slices], -1)
        return y if bias is None else y + bias
