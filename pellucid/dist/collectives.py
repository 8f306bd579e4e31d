"""What ranks say to each other: sums, gathers, messages.  The one place that calls torch.distributed.

A group of one is `Alone`, which says nothing, so nobody asks whether there are others.  Ranks meet through a
file that the system has named, on ports that it has chosen: two engines on a host never meet.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pellucid.dist.mesh import Mesh

# Gloo and NCCL give up long after whoever started the ranks has missed them and said which one is silent.
_PATIENCE = timedelta(days=1)


class PeerError(RuntimeError):
    """A collective failed: most likely another rank has died, and its own error says why."""


class Group(Protocol):
    """Ranks that work together; all of them make the same calls in the same order."""

    rank: int  # within the group
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """Every rank's tensor: [...] -> [size, ...]."""
        ...

    def minimum(self, value: int) -> int:
        """The least of all ranks' numbers, on the host."""
        ...


class Alone:
    """A group of one."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor:
        return x[None]

    def minimum(self, value: int) -> int:
        return value


ALONE = Alone()


class TorchGroup:
    """A group of several, over gloo (CPU) or NCCL (CUDA)."""

    def __init__(
        self, ranks: tuple[int, ...], world_rank: int, device: torch.device, entered: Callable[[str], None]
    ) -> None:
        self.rank, self.size = ranks.index(world_rank), len(ranks)
        self._device, self._entered = device, entered
        self._group = _new_group(ranks)

    def all_reduce(self, x: Tensor) -> Tensor:
        with self._calling("all_reduce"):
            dist.all_reduce(x, group=self._group)
        return x

    def gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty((self.size, *x.shape))
        with self._calling("all_gather"):
            dist.all_gather(list(gathered.unbind()), x.contiguous(), group=self._group)
        return gathered

    def minimum(self, value: int) -> int:
        number = torch.tensor([value], dtype=torch.int64, device=self._device)
        with self._calling("all_reduce (minimum)"):
            dist.all_reduce(number, op=dist.ReduceOp.MIN, group=self._group)
        return int(number)

    @contextmanager
    def _calling(self, name: str) -> Iterator[None]:
        self._entered(name)
        try:
            yield
        except RuntimeError as error:
            raise PeerError(str(error)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """This rank's groups."""

    mesh: Mesh
    world: Group
    tp: Group


UNLINKED = Links(mesh=Mesh(), world=ALONE, tp=ALONE)


def connect(mesh: Mesh, rendezvous: str, device: torch.device, entered: Callable[[str], None]) -> Links:
    """Meet the other ranks of the mesh.

    rendezvous: a path that only they know, in a folder that exists.  entered: told the name of each
    collective before it begins, so that a silent rank can be found.
    """
    if mesh.world == 1:
        return UNLINKED
    if device.type == "cpu":  # all ranks are on this host, whatever its name resolves to
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    store = dist.FileStore(rendezvous, mesh.world)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        store=store, rank=mesh.rank, world_size=mesh.world, timeout=_PATIENCE,
    )  # fmt: skip
    # Every rank makes every group, also those that it is not in: torch asks for that.
    made = {ranks: _group(ranks, mesh.rank, device, entered) for ranks in mesh.groups("tp")}
    world = _group(tuple(range(mesh.world)), mesh.rank, device, entered)
    return Links(mesh=mesh, world=world, tp=made[mesh.ranks("tp")])


def disconnect() -> None:
    """Leave; nothing happens if this process has met nobody."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _group(ranks: tuple[int, ...], rank: int, device: torch.device, entered: Callable[[str], None]) -> Group:
    if len(ranks) == 1:
        return ALONE
    if rank not in ranks:
        _new_group(ranks)
        return ALONE
    return TorchGroup(ranks, rank, device, entered)


def _new_group(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    """None for a rank that is not in it."""
    group = dist.new_group(list(ranks), timeout=_PATIENCE)
    return group if isinstance(group, dist.ProcessGroup) else None
