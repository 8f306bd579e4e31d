"""Where a checkpoint's tensors of experts go: one tensor for each expert's matrix, or all experts in one.

A parameter holds all experts of a rank, [E, M * I, D] or, of what is summed over I, [E, D, I].  Of M matrices
that are merged, gate and up, rows lie in it by turns: row M * i + m is row i of matrix m.  Ranks divide I
among them, or whole experts.  Biases lack the last axis.

Legend: E experts here, I their hidden features here, D model dim.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pellucid.quant.base import Coords, Split, check_shape, slice_of


@dataclass(frozen=True, slots=True)
class OneByOne:
    """Part e * M + m is matrix m of expert e, of those that are here; or its bias."""

    num_merged: int  # M
    split: Split

    def __call__(self, param: Tensor, part: int, tensor: Tensor, coords: Coords) -> None:
        check_shape(tensor, self.whole(tuple(param.shape), part, coords))
        expert, matrix = divmod(part, self.num_merged)
        target = param[expert].unflatten(0, (-1, self.num_merged))[:, matrix]
        axis = 0 if self.split == "out" else 1
        target.copy_(slice_of(tensor, axis, target.shape[axis], coords))

    def whole(self, shape: tuple[int, ...], part: int, coords: Coords) -> tuple[int, ...]:
        """See `Sliced.whole`."""
        rows, *inputs = shape[1] // self.num_merged, *shape[2:]
        return (coords.whole(rows), *inputs) if self.split == "out" else (rows, *map(coords.whole, inputs))


@dataclass(frozen=True, slots=True, kw_only=True)
class AllInOne:
    """A tensor with all experts of a checkpoint, of which those from `first` on are here.

    A part is a matrix: with as many of them as are merged, each has a tensor of its own.
    by_turns: rows of merged matrices in one tensor, and not matrix by matrix.
    transposed: [E, D, I]; inputs before outputs.
    """

    num_merged: int
    num_tensors: int = 1
    split: Split | None  # None: as vectors of outputs that every rank adds
    first: int
    num_experts: int  # of the checkpoint
    by_turns: bool = False
    transposed: bool = False

    def __call__(self, param: Tensor, part: int, tensor: Tensor, coords: Coords) -> None:
        check_shape(tensor, self.whole(tuple(param.shape), part, coords))
        if self.transposed:
            tensor = tensor.transpose(1, 2)
        tensor = tensor.narrow(0, self.first, len(param))
        if self.split == "in":
            param.copy_(slice_of(tensor, 2, param.shape[2], coords))
            return
        rows = param.unflatten(1, (-1, self.num_merged))  # [E, I, M, ..]
        if self.num_tensors > 1:
            rows[:, :, part].copy_(slice_of(tensor, 1, rows.shape[1], coords))
        elif self.by_turns:
            rows.copy_(slice_of(tensor.unflatten(1, (-1, self.num_merged)), 1, rows.shape[1], coords))
        else:
            by_matrix = tensor.unflatten(1, (self.num_merged, -1)).transpose(1, 2)
            rows.copy_(slice_of(by_matrix, 1, rows.shape[1], coords))

    def whole(self, shape: tuple[int, ...], part: int, coords: Coords) -> tuple[int, ...]:
        """See `Sliced.whole`."""
        axis = 2 if self.split == "in" else 1
        sizes = list(shape)
        sizes[0] = self.num_experts
        merged = self.num_merged if axis == 1 else 1
        sizes[axis] = coords.whole(sizes[axis] // merged) * merged // (self.num_tensors if axis == 1 else 1)
        return (sizes[0], sizes[2], sizes[1]) if self.transposed else tuple(sizes)


@dataclass(frozen=True, slots=True)
class AddedOnce:
    """Vectors that the sum over ranks is to have once: the first rank holds those of its experts, or all.

    num_experts: of the checkpoint's tensor; None: part e is the vector of expert e, of those that are here.
    """

    first: int
    num_experts: int | None
    every_rank: bool  # each holds other experts

    def __call__(self, param: Tensor, part: int, tensor: Tensor, coords: Coords) -> None:
        if self.num_experts is None:
            param, own = param[part], tensor
            check_shape(tensor, tuple(param.shape))
        else:
            check_shape(tensor, (self.num_experts, param.shape[1]))
            own = tensor.narrow(0, self.first, len(param))
        if coords.rank == 0 or self.every_rank:
            param.copy_(own)
        else:
            param.zero_()


ExpertPlace = OneByOne | AllInOne
