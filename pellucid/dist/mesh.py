"""The grid of ranks: which of them share a layer, which share the layers among them, which hold whole copies.

Arithmetic alone.  Every group of every rank follows from one `arange(world).view(dp, pp, tp)`; it opens no
connection, see collectives.py.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal

import numpy as np

Axis = Literal["dp", "pp", "tp"]
AXES: tuple[Axis, ...] = ("dp", "pp", "tp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The grid, and this rank's place in it.  The tensor-parallel ranks of a stage are neighbours."""

    dp: int = 1
    pp: int = 1
    tp: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.world, (self.rank, self.world)

    @property
    def world(self) -> int:
        return self.dp * self.pp * self.tp

    def size_of(self, axis: Axis) -> int:
        """Ranks along the axis."""
        return self._grid().shape[AXES.index(axis)]

    def rank_of(self, axis: Axis) -> int:
        """This rank's coordinate along the axis."""
        return int(np.argwhere(self._grid() == self.rank)[0, AXES.index(axis)])

    def ranks(self, axis: Axis) -> tuple[int, ...]:
        """The ranks that differ from this one along `axis` alone, itself included, in order."""
        return next(group for group in self.groups(axis) if self.rank in group)

    def groups(self, axis: Axis) -> list[tuple[int, ...]]:
        """All groups along the axis; each rank is in one of them."""
        lines = np.moveaxis(self._grid(), AXES.index(axis), -1).reshape(-1, self.size_of(axis))
        return [tuple(line) for line in lines.tolist()]

    def engines(self) -> list[tuple[int, ...]]:
        """The ranks of each whole copy."""
        return [tuple(ranks) for ranks in self._grid().reshape(self.dp, -1).tolist()]

    def _grid(self) -> np.ndarray:
        return np.arange(self.world).reshape(self.dp, self.pp, self.tp)


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a pipeline: number `index` of those that cut a model's layers among them.

    cuts: the first layer of each stage but stage 0, ascending; without cuts one stage holds all.
    """

    index: int = 0
    cuts: tuple[int, ...] = ()

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == len(self.cuts)

    def holds(self, layer: int) -> bool:
        return bisect_right(self.cuts, layer) == self.index


WHOLE_MODEL = Stage()
NOWHERE = Stage(1, (0, 0))  # holds nothing, and is neither the first nor the last
