"""The door for linear methods: what one linear layer's weights are in memory, and how they are applied.

Neither the weight loader nor `layers/linear.py` knows any method: a `ParamSpec` carries its own rule for
where a checkpoint's tensor goes, and the common rules stand ready below.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from pellucid.forward import ForwardInput
from pellucid.kernels.experts.experts import ExpertWeights, Gating, More
from pellucid.kernels.experts.packed_experts import PackedExperts
from pellucid.kernels.experts.routing import Chosen
from pellucid.kernels.pointwise.embedding import CodedTable
from pellucid.kernels.products.round_rows import Rounded, Rounding
from pellucid.platform import Platform, platform_of

if TYPE_CHECKING:
    from pellucid.quant.codes import Codes
    from pellucid.quant.expert_places import ExpertPlace
    from pellucid.quant.layouts.base import LayerFormat
    from pellucid.quant.products import Product

Split = Literal["out", "in"]  # which features tensor-parallel ranks divide among them
ExpertMatrix = Literal["gate_up", "down"]
Fill = Literal["normal", "near_one", "one", "bits"]  # what dummy weights look like


@dataclass(frozen=True, slots=True)
class Piece:
    """The outputs of a checkpoint's matrix that are one part's, where it holds those of several."""

    first: int
    num: int
    total: int  # outputs of all parts

    def within(self, elements: int) -> tuple[int, int]:
        """The first element and all elements of a tensor in which `elements` stand for these outputs.

        Raises ValueError if the piece begins or ends amid an element.
        """
        first, odd = divmod(self.first * elements, self.num)
        if odd or (elements * self.total % self.num and self.first + self.num < self.total):
            raise ValueError(
                f"holds several matrices, and outputs {self.first} to {self.first + self.num} of "
                f"{self.total} are not whole elements of it, nor whole groups that share a scale; "
                "use a checkpoint that is quantized otherwise, or plain"
            )
        return first, -(-self.total * elements // self.num)


@dataclass(frozen=True, slots=True)
class Coords:
    """Which of `size` equal slices of a checkpoint's tensor is this rank's.

    Ranks that share one key-value head hold the same slice, so their coordinates for it are equal.
    total: features of the whole, if shares may be filled up with zeros: of a vocabulary, or of an MLP.
    piece: what the slices are of, if not of the whole tensor.
    """

    rank: int = 0
    size: int = 1
    total: int | None = None
    piece: Piece | None = None

    def whole(self, local: int) -> int:
        """Elements of the whole, of which this rank's slice has `local`, padding included."""
        return local * self.size if self.total is None else self.total


WHOLE = Coords()


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """A linear layer as one rank sees it: y [T, sum(out_partitions)] = x [T, in_features] W^T + bias.

    `out_partitions` has one entry for each of the checkpoint's matrices merged here (q, k, v are three).
    """

    in_features: int
    out_partitions: tuple[int, ...]
    split: Split
    dtype: torch.dtype  # of activations, and of weights that are not quantized
    is_part: bool = False  # of rows, of which other ranks have the rest

    @property
    def out_features(self) -> int:
        return sum(self.out_partitions)


class Place(Protocol):
    """Where a checkpoint's tensor goes.  Raises ValueError if its shape is not the expected one."""

    def __call__(self, param: Tensor, part: int, tensor: Tensor, coords: Coords) -> None:
        """Copy this rank's slice of `tensor`, the layer's matrix number `part`, into `param`."""
        ...


@runtime_checkable
class KnowsWhole(Protocol):
    """A place of matrices, which may be stored in codes: they are decoded by their shape."""

    def whole(self, shape: tuple[int, ...], part: int, coords: Coords) -> tuple[int, ...]:
        """The shape of the checkpoint's tensor, of which a parameter of `shape` has this rank's slice."""
        ...


@runtime_checkable
class CodesPlace(Protocol):
    """Where a quantized matrix goes that is kept as codes.  Raises ValueError if they do not fit."""

    def keep(self, param: Tensor, part: int, codes: Codes, coords: Coords) -> None:
        """Put this rank's slice of `codes`, the layer's matrix number `part`, into `param`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One parameter of a layer, as this rank holds it, and the rule that fills it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    place: Place
    fill: Fill = "normal"
    default: float | None = None  # without such a tensor in the checkpoint; None: there must be one
    kept_bits: float | None = None  # of a weight, once the layer has repacked; None: as before


@dataclass(frozen=True, slots=True)
class Sliced:
    """Merged parts side by side along `part_axis`; of each, this rank's slice along `slice_axis`.

    sizes: of each part along `part_axis` on this rank, in elements of the parameter, also where an element of
    packed integers or of block scales stands for several features.
    """

    sizes: tuple[int, ...]
    part_axis: int = 0
    slice_axis: int = 0

    def __call__(self, param: Tensor, part: int, tensor: Tensor, coords: Coords) -> None:
        target = param.narrow(self.part_axis, sum(self.sizes[:part]), self.sizes[part])
        check_shape(tensor, self.whole(tuple(param.shape), part, coords))
        expected = self._part(tuple(param.shape), part, coords)
        if coords.piece is not None:
            num = expected[self.part_axis]
            tensor = tensor.narrow(self.part_axis, coords.piece.within(num)[0], num)
        target.copy_(slice_of(tensor, self.slice_axis, target.shape[self.slice_axis], coords))

    def whole(self, shape: tuple[int, ...], part: int, coords: Coords) -> tuple[int, ...]:
        """The shape of the checkpoint's tensor, of which a parameter of `shape` has this rank's slice."""
        sizes = self._part(shape, part, coords)
        if coords.piece is not None:
            _, sizes[self.part_axis] = coords.piece.within(sizes[self.part_axis])
        return tuple(sizes)

    def _part(self, shape: tuple[int, ...], part: int, coords: Coords) -> list[int]:
        """The same of one part, if the tensor holds several."""
        sizes = list(shape)
        sizes[self.part_axis] = self.sizes[part]
        sizes[self.slice_axis] = coords.whole(sizes[self.slice_axis])
        return sizes


def slice_of(tensor: Tensor, axis: int, local: int, coords: Coords) -> Tensor:
    """`local` elements of an axis, those of this rank; zeros behind the last."""
    size = tensor.shape[axis]
    first = min(coords.rank * local, size)
    found = tensor.narrow(axis, first, min(local, size - first))
    if found.shape[axis] == local:
        return found
    whole = found.new_zeros([*found.shape[:axis], local, *found.shape[axis + 1 :]])
    whole.narrow(axis, 0, found.shape[axis]).copy_(found)  # torch.cat of meta tensors imports a compiler
    return whole


class Replicated:
    """Every rank holds the whole tensor."""

    def __call__(self, param: Tensor, part: int, tensor: Tensor, coords: Coords) -> None:
        check_shape(tensor, tuple(param.shape))
        param.copy_(tensor)


class OnFirstRank:
    """The first rank holds the tensor and the others zeros: what is added once to a sum over ranks."""

    def __call__(self, param: Tensor, part: int, tensor: Tensor, coords: Coords) -> None:
        check_shape(tensor, tuple(param.shape))
        param.copy_(tensor) if coords.rank == 0 else param.zero_()


class ScalarPerPart:
    """A vector with one number for each merged part, such as the scale of an FP8 matrix."""

    def __call__(self, param: Tensor, part: int, tensor: Tensor, coords: Coords) -> None:
        if tensor.numel() != 1:
            raise ValueError(f"has shape {tuple(tensor.shape)}, must be a single number")
        param[part] = tensor.reshape(())


def matrix(shape: LinearShape, *, out_axis: int = 0, in_axis: int = 1) -> Sliced:
    """The rule for a tensor with one element for each weight, laid out [out, in] unless told otherwise."""
    return Sliced(shape.out_partitions, out_axis, out_axis if shape.split == "out" else in_axis)


def packed(
    shape: LinearShape, *, out_per: int = 1, in_per: int = 1, out_axis: int = 0, in_axis: int = 1
) -> Sliced:
    """The rule for packed integers and for blocks: an element stands for `out_per` x `in_per` weights."""
    assert shape.in_features % in_per == 0, (shape, in_per)
    sizes = tuple(elements(size, out_per) for size in shape.out_partitions)
    return Sliced(sizes, out_axis, out_axis if shape.split == "out" else in_axis)


def vector(shape: LinearShape) -> Place:
    """The rule for one number for each output: a bias, or the scales of whole rows."""
    return Sliced(shape.out_partitions) if shape.split == "out" else Replicated()


def kept_in_bytes(params: dict[str, ParamSpec]) -> dict[str, ParamSpec]:
    """Parameters that become a byte a weight, once the layer has repacked."""
    return {name: replace(spec, kept_bits=8.0) for name, spec in params.items()}


def elements(features: int, per: int) -> int:
    """How many elements hold `features` at `per` to an element, the last one perhaps not full."""
    return -(-features // per)


def check_shape(tensor: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != expected:
        raise ValueError(f"has shape {tuple(tensor.shape)}, this model expects {expected}")


class LinearLayer(Protocol):
    """What a method may see of the layer it serves."""

    shape: LinearShape

    @property
    def bias(self) -> Tensor | None: ...

    def param(self, name: str) -> Tensor: ...

    def replace(self, name: str, value: Tensor | None) -> None:
        """Put `value` in the parameter's place after loading; None lets it go."""
        ...


class LinearMethod(Protocol):
    """How one linear layer is stored and applied; each layer has its own instance, which may keep state."""

    def params(self, shape: LinearShape) -> dict[str, ParamSpec]:
        """The parameters of such a layer, the bias aside, by the checkpoint's suffix (such as "weight")."""
        ...

    def finish(self, layer: LinearLayer) -> None:
        """Repack, once the weights are loaded."""
        ...

    def apply(self, layer: LinearLayer, x: Tensor, fwd: ForwardInput | None) -> Tensor:
        """x [..., in_features] -> [..., out_features], bias added.  fwd is None for the head."""
        ...


@runtime_checkable
class MixesItself(Protocol):
    """Experts that bring their own products."""

    def mix(
        self,
        x: Tensor,
        chosen: Chosen,
        gating: Gating,
        *,
        weighs_input: bool = False,
        more: More | None = None,
    ) -> Tensor:
        """x [T, D] -> [T, D]; see `mix_experts`."""
        ...


Experts = ExpertWeights | PackedExperts | MixesItself


class ExpertsMethod(Protocol):
    """How the matrices of one layer's experts are stored and kept."""

    def spec(
        self, matrix: ExpertMatrix, shape: tuple[int, ...], dtype: torch.dtype, place: ExpertPlace
    ) -> ParamSpec:
        """Of gate_up [E, 2 * I, D] or down [E, D, I].  Raises ValueError if it cannot be kept so."""
        ...

    def describe(self, matrix: ExpertMatrix, shape: tuple[int, ...], dtype: torch.dtype) -> str:
        """What multiplies them, and why nothing faster or smaller does.  shape: see `spec`."""
        ...

    def finish(
        self, gate_up: Tensor, down: Tensor, dtype: torch.dtype, biases: tuple[Tensor | None, Tensor | None]
    ) -> Experts:
        """Once they are loaded."""
        ...


class TableCodes(Protocol):
    """How a table of embeddings is kept that becomes codes once it is loaded."""

    @property
    def format(self) -> LayerFormat: ...

    def bits(self, dim: int) -> float:
        """Of a number of a table with rows of `dim`, scales and all."""
        ...

    def coded(self, weight: Tensor) -> CodedTable:
        """The codes of a loaded table [L, D]."""
        ...


class HoldsCodes(Protocol):
    """A table of embeddings, of which there may be codes once it is loaded."""

    codes: CodedTable | None


@runtime_checkable
class MultipliesTable(Protocol):
    """A method that may multiply by the codes of a table, where a head shares one that is kept alike."""

    table: HoldsCodes | None  # loaded before; None: the layer has a matrix of its own


@runtime_checkable
class ChoosesProduct(Protocol):
    """A method that says, before weights are loaded, what will multiply them."""

    def choose(self, shape: LinearShape, platform: Platform) -> Product:
        """The product of such a layer on this machine.  Raises ValueError if there is none.

        Asked once, before all but `params`.
        """
        ...


@runtime_checkable
class Widens(Protocol):
    """A method that may multiply by more rows in the same pass."""

    def widen(self, layer: LinearLayer, num_rows: int) -> Tensor | None:
        """Make room for so many rows behind those of the layer's matrix, once; called behind `finish`.

        Returns them, zeros [num_rows, in_features], for whoever fills them; None: it cannot.
        """
        ...

    def apply_widened(self, layer: LinearLayer, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features + num_rows], bias added to the first ones."""
        ...


@runtime_checkable
class Gates(Protocol):
    """A method that may gate in the same pass in which it multiplies."""

    def apply_gated(self, layer: LinearLayer, x: Tensor, act: str) -> Tensor | None:
        """act(gate) * up of the [gate | up] that `apply` gives for x [..., in_features].

        act: see kernels/pointwise/silu_mul.py.  None: a product and a gate apart are no slower for so many
        rows.
        """
        ...


@runtime_checkable
class TakesRounded(Protocol):
    """A method that may multiply rows rounded to bytes, FP8 or INT8."""

    def takes_rounded(self, shape: LinearShape) -> bool:
        """Whether it rounds the activations of such a layer: then who computes them may do so."""
        ...

    def rounding(self) -> Rounding:
        """How, once the weights are loaded."""
        ...

    def apply_rounded(self, layer: LinearLayer, x: Rounded) -> Tensor:
        """What `apply` gives for rows that are not rounded yet."""
        ...


def choose_product(method: LinearMethod, shape: LinearShape, device: torch.device) -> Product | None:
    """What will multiply a layer on `device`; None: the method does not say."""
    return method.choose(shape, platform_of(device)) if isinstance(method, ChoosesProduct) else None
