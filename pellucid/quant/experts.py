"""How the experts of a layer are kept: as plain matrices, or as codes, from files or rounded here.

What `packed.py` is for linear layers.  Gates and ups must be alike, and those of all experts; codes multiply
plain activations, whatever a checkpoint says of rounding these.

Legend: E experts here, I their hidden features here, D model dim.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pellucid.kernels.experts.experts import ExpertWeights
from pellucid.kernels.experts.packed_experts import PackedExperts, pack_experts
from pellucid.kernels.packed.packed_weight import GroupCodes, Numbers
from pellucid.native.library import library, serves
from pellucid.native.matrix import PANEL
from pellucid.quant.base import Coords, ExpertMatrix, Experts, KnowsWhole, ParamSpec
from pellucid.quant.codes import Codes, Scales
from pellucid.quant.expert_places import AllInOne, ExpertPlace, OneByOne
from pellucid.quant.layouts.base import LayerFormat
from pellucid.quant.native_experts import Biases, NativeExperts, native_experts, native_plain
from pellucid.quant.packed import bits_kept, dummy, group_codes, kept_bits, plain, with_zeros
from pellucid.quant.products import Multiplier, name_of
from pellucid.quant.rounding import rounded

logger = logging.getLogger(__name__)
NATIVE = "native code, of the experts that are hit"
ONE_BY_ONE = "torch's products, of the experts that are hit"
NO_PANELS = f"native code takes matrices of whole {PANEL}s"
Matrices = list[list[GroupCodes | Tensor]]  # of each expert gate and up, or down


@dataclass(frozen=True, slots=True)
class PlainExperts:
    """Matrices of the activations' dtype.  why: codes are decoded."""

    why: str = ""
    device: str = "cuda"

    def spec(
        self, matrix: ExpertMatrix, shape: tuple[int, ...], dtype: torch.dtype, place: ExpertPlace
    ) -> ParamSpec:
        return ParamSpec(shape=shape, dtype=dtype, place=place)

    def describe(self, matrix: ExpertMatrix, shape: tuple[int, ...], dtype: torch.dtype) -> str:
        by, why = ONE_BY_ONE if self.device == "cpu" else "grouped products", self.why
        if self._is_native(dtype) and are_panels(matrix, shape):
            by = NATIVE
        elif self._is_native(dtype):
            why = f"{why}; {NO_PANELS}" if why else NO_PANELS
        return f"{name_of(dtype)}: {by}{f', for {why}' if why else ''}"

    def finish(self, gate_up: Tensor, down: Tensor, dtype: torch.dtype, biases: Biases) -> Experts:
        experts = ExpertWeights(gate_up, down, *biases)
        code = library() if self._is_native(dtype) else None
        return experts if code is None else native_plain(code, experts) or experts

    def _is_native(self, dtype: torch.dtype) -> bool:
        return self.device == "cpu" and dtype == torch.bfloat16 and serves(dtype)


@dataclass(frozen=True, slots=True)
class CodedExperts:
    """Codes, of formats by how many inputs a row has.  is_stored: as files have them, else rounded here."""

    gate_up: Callable[[int], LayerFormat]
    down: Callable[[int], LayerFormat]
    is_stored: bool
    device: str = "cuda"

    def format(self, matrix: ExpertMatrix, num_in: int) -> LayerFormat:
        return (self.gate_up if matrix == "gate_up" else self.down)(num_in)

    def spec(
        self, matrix: ExpertMatrix, shape: tuple[int, ...], dtype: torch.dtype, place: ExpertPlace
    ) -> ParamSpec:
        bits = kept_bits(self.format(matrix, shape[2]), shape[2])
        if not self.is_stored:
            return ParamSpec(shape=shape, dtype=dtype, place=place, kept_bits=bits)
        return ParamSpec(
            shape=shape, dtype=torch.uint8, place=CodesOfExperts(place), fill="bits", kept_bits=bits
        )

    def describe(self, matrix: ExpertMatrix, shape: tuple[int, ...], dtype: torch.dtype) -> str:
        format = self.format(matrix, shape[2])
        by = "grouped products that unpack codes in registers, activations as they are"
        if self.device == "cpu":
            by = NATIVE if serves(dtype) else Multiplier.SLICES.value
            if by == NATIVE and not are_panels(matrix, shape):
                by = f"{Multiplier.SLICES.value}, for {NO_PANELS}"
        return f"{format.layout} {format.code.name}, {bits_kept(format.code)} bits: {by}"

    def finish(self, gate_up: Tensor, down: Tensor, dtype: torch.dtype, biases: Biases) -> Experts:
        ups, downs = self._matrices("gate_up", gate_up, 2), self._matrices("down", down, 1)
        num, hidden, dim = down.shape[0], down.shape[2], down.shape[1]
        try:
            if down.device.type == "cpu" and (mixed := native(ups, downs, dtype, biases)) is not None:
                return mixed
            return PackedExperts(
                gate_up=pack_experts(alike(ups), dtype, gated=True),
                down=pack_experts(alike(downs), dtype),
                num_experts=num,
                hidden=hidden,
                dim=dim,
                gate_up_bias=biases[0],
                down_bias=biases[1],
            )
        except ValueError as error:
            logger.warning("experts are decoded: %s", error)
        both = [torch.stack([plain(part).to(dtype) for part in parts], 1).flatten(0, 1) for parts in ups]
        return ExpertWeights(
            torch.stack(both), torch.stack([plain(part).to(dtype) for (part,) in downs]), *biases
        )

    def _matrices(self, matrix: ExpertMatrix, weight: Tensor, num: int) -> Matrices:
        """Of each expert `num` matrices."""
        format, values = self.format(matrix, weight.shape[2]), weight.detach()
        if not self.is_stored:
            return [[self._rounded(expert[i::num], format) for i in range(num)] for expert in values]
        place = weight.spec.place  # pyright: ignore[reportAttributeAccessIssue]
        assert isinstance(place, CodesOfExperts), place
        if place.found:
            made = [[place.found[expert, i] for i in range(num)] for expert in range(len(values))]
            place.found.clear()
            return made
        return [[dummy(bits, format) for bits in expert.chunk(num)] for expert in values]

    def _rounded(self, matrix: Tensor, format: LayerFormat) -> GroupCodes:
        with matrix.device:
            return group_codes(rounded(matrix, format))


def are_panels(matrix: ExpertMatrix, shape: tuple[int, ...]) -> bool:
    """Whether native code takes matrices of gate_up [E, 2 * I, D] or down [E, D, I]."""
    num_out = shape[1] // (2 if matrix == "gate_up" else 1)
    return num_out % PANEL == 0 and shape[2] % PANEL == 0


def native(gate_up: Matrices, down: Matrices, dtype: torch.dtype, biases: Biases) -> NativeExperts | None:
    """As native code multiplies them; None: it does not, on this CPU or such matrices."""
    code = library()
    if code is None or not serves(dtype):
        return None
    try:
        return native_experts(code, coded(gate_up), coded(down), dtype, biases)
    except ValueError as error:
        logger.warning("experts' numbers are made at every call, which costs time: %s", error)
        return None


def coded(experts: Matrices) -> list[list[GroupCodes]]:
    """Raises ValueError if some are no codes."""
    codes = [[part for part in parts if isinstance(part, GroupCodes)] for parts in experts]
    if sum(map(len, codes)) < sum(map(len, experts)):
        raise ValueError("some are stored as plain numbers")
    return codes


def alike(experts: Matrices) -> list[list[GroupCodes]]:
    """The same with zeros where any has some.  Raises ValueError where they cannot stay packed, and why."""
    codes = coded(experts)
    every = [part for parts in codes for part in parts]
    if any(part.index is not None for part in every):
        raise ValueError("their inputs are in an order of their own")
    kinds = {(part.numbers, part.bits, part.middle, part.zero is None, part.offset is None) for part in every}
    if len(kinds) == 1:
        return codes
    if any(part.numbers is not Numbers.INTEGER for part in every):
        raise ValueError("their codes are of different kinds")
    has_offset = any(part.offset is not None for part in every)
    return [[with_offset(with_zeros(part)) if has_offset else with_zeros(part) for part in c] for c in codes]


def with_offset(part: GroupCodes) -> GroupCodes:
    return replace(part, offset=torch.zeros_like(part.scale)) if part.offset is None else part


@dataclass(frozen=True, slots=True)
class CodesOfExperts:
    """Where codes go: a byte a weight, matrix by matrix; scales and all that belongs to codes is kept here.

    place: of plain tensors that are stored in such a way.
    """

    place: ExpertPlace
    found: dict[tuple[int, int], GroupCodes | Tensor] = field(
        default_factory=dict[tuple[int, int], GroupCodes | Tensor]
    )

    def __call__(self, param: Tensor, part: int, tensor: Tensor, coords: Coords) -> None:
        """Matrices that turn out to be plain."""
        if tensor.device.type == "meta":  # whose shape alone is wanted to know
            self.place(param, part, tensor, coords)
            return
        own = torch.empty(param.shape, dtype=tensor.dtype, device=param.device)
        self.place(own, part, tensor, coords)
        for expert, matrix in self._parts(len(param), part):
            self.found[expert, matrix] = own[expert].unflatten(0, (-1, self.place.num_merged))[:, matrix]

    def whole(self, shape: tuple[int, ...], part: int, coords: Coords) -> tuple[int, ...]:
        """See `Sliced.whole`."""
        assert isinstance(self.place, KnowsWhole)
        return self.place.whole(shape, part, coords)

    def keep(self, param: Tensor, part: int, codes: Codes, coords: Coords) -> None:
        merged = self.place.num_merged
        for expert, matrix in self._parts(len(param), part):
            target = param[expert].chunk(merged)[matrix]
            slice_ = self._slice(codes, expert, matrix, target, coords)
            self.found[expert, matrix] = replace(slice_, q=target.copy_(slice_.q))

    def _slice(self, codes: Codes, expert: int, matrix: int, target: Tensor, coords: Coords) -> GroupCodes:
        """This rank's of one matrix, [I, D] or [D, I]."""
        place, rows = self.place, slice(None)
        if isinstance(place, AllInOne):
            codes = one_of(codes, place.first + expert)
            if place.num_tensors < place.num_merged:
                num = len(codes.q) // place.num_merged
                rows = slice(matrix * num, (matrix + 1) * num)
                rows = slice(matrix, None, place.num_merged) if place.by_turns else rows
        whole = group_codes(codes)
        some = whole.cut(rows, slice(0, whole.q.shape[1]))
        sizes = [slice(0, size) for size in some.q.shape]
        if place.split is not None:
            axis = 0 if place.split == "out" else 1
            local = target.shape[axis]
            first = min(coords.rank * local, some.q.shape[axis])
            sizes[axis] = slice(first, min(first + local, some.q.shape[axis]))
        return some.cut(*sizes).padded(*target.shape)

    def _parts(self, num_experts: int, part: int) -> Iterator[tuple[int, int]]:
        """(expert, matrix) of all that a tensor holds."""
        place = self.place
        if isinstance(place, OneByOne):
            yield divmod(part, place.num_merged)
        elif place.num_tensors == place.num_merged:
            yield from ((expert, part) for expert in range(num_experts))
        else:
            yield from ((expert, i) for expert in range(num_experts) for i in range(place.num_merged))


def one_of(codes: Codes, expert: int) -> Codes:
    """An expert's of codes [E, N, K]."""

    def some(scales: Scales | None) -> Scales | None:
        if scales is None:
            return None
        values, outer = (
            None if each is None else each[expert] if each.ndim == 3 and len(each) == len(codes.q) else each
            for each in scales
        )
        assert values is not None
        return Scales(values, outer)

    return replace(
        codes,
        q=codes.q[expert],
        scale=some(codes.scale),
        zero=some(codes.zero),
        offset=some(codes.offset),
    )
