"""Where this process is among the ranks of its engine, by vLLM's names, for code brought into a worker.

The engine's own code asks `Links` and `Mesh`, which it is handed; these helpers ask the ones of this process.
Without other ranks everything is 0 of 1.  Engines of `data_parallel_size`
have ranks in common only where they share experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from pellucid.dist.mesh import Mesh

if TYPE_CHECKING:
    from pellucid.dist.collectives import Group, Links

_here: list[Links] = []  # at most one


def remember(links: Links | None) -> None:
    """This process has met the others, or leaves them."""
    _here[:] = [] if links is None else [links]


@dataclass(frozen=True, slots=True)
class GroupCoordinator:
    """Ranks along one axis, as this one sees them."""

    rank: int  # of all ranks of the engine
    ranks: Sequence[int]  # of these, those in the group
    group: Group | None  # None: they only pass things on to each other

    @property
    def rank_in_group(self) -> int:
        return self.ranks.index(self.rank)

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def first_rank(self) -> int:
        return self.ranks[0]

    @property
    def last_rank(self) -> int:
        return self.ranks[-1]

    @property
    def is_first_rank(self) -> bool:
        return self.rank == self.first_rank

    @property
    def is_last_rank(self) -> bool:
        return self.rank == self.last_rank

    @property
    def next_rank(self) -> int:
        return self.ranks[(self.rank_in_group + 1) % self.world_size]

    @property
    def prev_rank(self) -> int:
        return self.ranks[self.rank_in_group - 1]

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, which may be made in place."""
        return self._speaking().all_reduce(x)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """All ranks' tensors, one behind the other along `dim`."""
        parts: Tensor = self._speaking().gather(x)  # [ranks, ...]
        dim %= x.ndim
        size = (*x.shape[:dim], self.world_size * x.shape[dim], *x.shape[dim + 1 :])
        return parts.movedim(0, dim).reshape(size)

    def _speaking(self) -> Group:
        assert self.group is not None, "stages of a pipeline have channels, and no sums: see Links.channels"
        return self.group


def model_parallel_is_initialized() -> bool:
    """Has this process met other ranks?"""
    return bool(_here)


def get_world_group() -> GroupCoordinator:
    """All ranks of this engine."""
    mesh = _mesh()
    engine = next(ranks for ranks in mesh.engines() if mesh.rank in ranks)
    return GroupCoordinator(mesh.rank, engine, _links().world)


def get_tp_group() -> GroupCoordinator:
    """Ranks that share this one's layers."""
    return GroupCoordinator(_mesh().rank, _mesh().ranks("tp"), _links().tp)


def get_pp_group() -> GroupCoordinator:
    """A rank of each stage of the pipeline."""
    return GroupCoordinator(_mesh().rank, _mesh().ranks("pp"), None)


def get_dp_group() -> GroupCoordinator:
    """Ranks that hold the same part of copies which work in step."""
    return GroupCoordinator(_mesh().rank, _mesh().ranks("dp"), _links().dp)


def get_tensor_model_parallel_rank() -> int:
    return get_tp_group().rank_in_group


def get_tensor_model_parallel_world_size() -> int:
    return get_tp_group().world_size


def get_pipeline_model_parallel_rank() -> int:
    return get_pp_group().rank_in_group


def get_pipeline_model_parallel_world_size() -> int:
    return get_pp_group().world_size


def tensor_model_parallel_all_reduce(x: Tensor) -> Tensor:
    return get_tp_group().all_reduce(x)


def tensor_model_parallel_all_gather(x: Tensor, dim: int = -1) -> Tensor:
    return get_tp_group().all_gather(x, dim)


def _mesh() -> Mesh:
    return _links().mesh


def _links() -> Links:
    from pellucid.dist.collectives import UNLINKED

    return _here[0] if _here else UNLINKED
