"""What ranks say to each other: sums, gathers, messages.  The one place that calls torch.distributed.

A group of one is `SingleRank`, which says nothing, so nobody asks whether there are others.  Ranks meet at a
port that the system has chosen, at the address of the first one's node; if that is the only one, no other
machine can reach it.  GPUs that can write into each other's memory have mailboxes there, through which little
goes faster than through NCCL.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from pellucid.dist import parallel_state
from pellucid.dist.mesh import Mesh
from pellucid.kernels.ranks.all_reduce import Mailbox, gather_ranks, memory_shape, sum_rows
from pellucid.platform import has_triton

logger = logging.getLogger(__name__)

# Gloo and NCCL give up long after whoever started the ranks has missed them and said which one is silent.
_PATIENCE = timedelta(days=1)
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where a rank is."""

    node: int = 0
    address: str | None = None  # of its node, for ranks on others; None: all ranks are on this machine
    first: str = LOOPBACK  # of rank 0's node


HERE = Site()


class PeerError(RuntimeError):
    """A collective failed: most likely another rank has died, and its own error says why."""


class Group(Protocol):
    """Ranks that work together; all of them make the same calls in the same order."""

    rank: int  # within the group
    size: int
    mailbox: Mailbox | None  # for kernels that speak to other ranks themselves, if these can

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """Every rank's tensor: [...] -> [size, ...]."""
        ...

    def scatter_sum(self, x: Tensor) -> Tensor:
        """Of the sum over ranks of x [size * T, D] this rank's rows, [T, D]; x may be written over."""
        ...

    def minimum(self, value: int) -> int:
        """The least of all ranks' numbers, on the host."""
        ...


class SingleRank:
    """A group of one."""

    rank = 0
    size = 1
    mailbox: Mailbox | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor:
        return x[None]

    def scatter_sum(self, x: Tensor) -> Tensor:
        return x

    def minimum(self, value: int) -> int:
        return value


ALONE = SingleRank()


class TorchGroup:
    """A group of several, over gloo (CPU) or NCCL (CUDA), and through a mailbox what is small."""

    def __init__(
        self, ranks: tuple[int, ...], world_rank: int, device: torch.device, entered: Callable[[str], None]
    ) -> None:
        self.rank, self.size = ranks.index(world_rank), len(ranks)
        self._device, self._entered = device, entered
        self._group = _new_group(ranks)
        self.mailbox: Mailbox | None = None

    def open_mailbox(self, node: int) -> None:
        """Let the ranks write into each other's memory, if all of them can.  Call it once, on every rank.

        node: which this rank is on.
        """
        assert self._group is not None, "this rank is not in the group"
        index = torch.tensor([self._device.index], device=self._device)
        on_one_node = self.minimum(node) == -self.minimum(-node)
        can_reach = on_one_node and all(
            torch.cuda.can_device_access_peer(self._device.index, peer)
            for peer in self.gather(index).flatten().tolist()
            if peer != self._device.index
        )
        if not self.minimum(can_reach and has_triton()):
            logger.info("without Triton, or GPUs that reach each other's memory, small sums go through NCCL")
            return
        mailbox = None
        try:
            mailbox = _make_mailbox(self._group, self.rank, self._device)
        except RuntimeError as error:
            logger.warning("no memory that ranks share, small sums go through NCCL: %s", error)
        if self.minimum(mailbox is not None):  # and every mailbox is empty before a rank sends
            self.mailbox = mailbox

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.mailbox is not None and self.mailbox.can_sum(x):
            return sum_rows(x, self.mailbox)
        with self._calling("all_reduce"):
            dist.all_reduce(x, group=self._group)
        return x

    def gather(self, x: Tensor) -> Tensor:
        if self.mailbox is not None and self.mailbox.can_send(x) and x.nbytes % 4 == 0:
            return gather_ranks(x, self.mailbox)
        gathered = x.new_empty((self.size, *x.shape))
        with self._calling("all_gather"):
            dist.all_gather(list(gathered.unbind()), x.contiguous(), group=self._group)
        return gathered

    def scatter_sum(self, x: Tensor) -> Tensor:
        num_rows = len(x) // self.size
        is_small = self.mailbox is not None and self.mailbox.can_sum(x)
        if is_small or self._device.type == "cpu":  # gloo has nothing for it
            return self.all_reduce(x)[self.rank * num_rows :][:num_rows]
        own = x.new_empty((num_rows, *x.shape[1:]))
        with self._calling("reduce_scatter"):
            dist.reduce_scatter_tensor(own, x.contiguous(), group=self._group)
        return own

    def minimum(self, value: int) -> int:
        number = torch.tensor([value], dtype=torch.int64, device=self._device)
        with self._calling("all_reduce (minimum)"):
            dist.all_reduce(number, op=dist.ReduceOp.MIN, group=self._group)
        return int(number)

    @contextmanager
    def _calling(self, name: str) -> Iterator[None]:
        self._entered(name)
        with _naming_peers():
            yield


def _make_mailbox(group: dist.ProcessGroup, rank: int, device: torch.device) -> Mailbox:
    """Memory on every rank's GPU that all of them can write.  Raises RuntimeError if there can be none."""
    from torch.distributed import _symmetric_memory as symmetric

    memory = symmetric.empty(memory_shape(group.size()), dtype=torch.int64, device=device).zero_()
    addresses = symmetric.rendezvous(memory, group).buffer_ptrs
    torch.cuda.synchronize(device)
    return Mailbox(
        rank=rank,
        memory=memory,
        addresses=torch.tensor(addresses, device=device),
        epochs=torch.zeros(memory.shape[2], dtype=torch.int32, device=device),
    )


class Message(Protocol):
    """A tensor on its way to another stage, or from one."""

    def wait(self) -> None:
        """Later work may use the tensor: on a GPU in stream order, on a CPU at once."""
        ...


class Channel(Protocol):
    """Messages between the stages of a pipeline.  Those from one stage to another keep their order."""

    def send(self, x: Tensor, to: int) -> Message:
        """Send to a stage.  x is not to change until the message has been waited for."""
        ...

    def receive(self, x: Tensor, source: int) -> Message:
        """Receive a stage's next message, of x's size, into x."""
        ...


class TorchChannel:
    """Over gloo (CPU) or NCCL (CUDA), where each pair of stages has a stream of its own for its messages."""

    def __init__(self, ranks: tuple[int, ...], waiting: Callable[[bool], None]) -> None:
        self._ranks, self._waiting = ranks, waiting
        self._group = _new_group(ranks)

    def send(self, x: Tensor, to: int) -> Message:
        with _naming_peers():
            return TorchMessage(x, dist.isend(x, self._ranks[to], group=self._group), self._waiting)

    def receive(self, x: Tensor, source: int) -> Message:
        with _naming_peers():
            return TorchMessage(x, dist.irecv(x, self._ranks[source], group=self._group), self._waiting)


class TorchMessage:
    """Holds on to its tensor until it has been waited for."""

    def __init__(self, x: Tensor, work: dist.Work | None, waiting: Callable[[bool], None]) -> None:
        assert work is not None, "this rank is not in the group"
        self._x, self._work, self._waiting = x, work, waiting

    def wait(self) -> None:
        self._waiting(True)
        with _naming_peers():
            self._work.wait()
        self._waiting(False)


@contextmanager
def _naming_peers() -> Iterator[None]:
    """What torch says of a peer that has gone becomes a PeerError."""
    try:
        yield
    except RuntimeError as error:
        raise PeerError(str(error)) from error


@dataclass(frozen=True, slots=True)
class Channels:
    """Between the stages of a pipeline, one for each kind of message: neither kind waits for the other."""

    streams: Channel  # residual streams, from each stage to the next
    feedback: Channel  # what the last stage has sampled, to all others


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """This rank's groups."""

    mesh: Mesh
    world: Group  # of this engine
    tp: Group
    dp: Group = ALONE  # the same ranks of other engines, if these work in step
    store: TCPStore | None = None  # where ranks have left their addresses
    channels: Channels | None = None  # without a pipeline there are none


UNLINKED = Links(mesh=Mesh(), world=ALONE, tp=ALONE)


def connect(
    mesh: Mesh, meet: Callable[[int | None], int], device: torch.device, *,
    entered: Callable[[str], None], waiting: Callable[[bool], None], site: Site = HERE,
) -> Links:  # fmt: skip
    """Meet the other ranks of the mesh.

    meet: is told rank 0's port, and tells it to the others, which say None.  entered: told the name of each
    collective before it begins.  waiting: told when this rank begins to wait for another stage, and when that
    is over.  So a silent rank can be found.
    """
    if mesh.world == 1:
        return UNLINKED
    _choose_interface(device, site)
    if mesh.dp > 1:  # one engine may replay what another launches: no buffers of their own are registered
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    store = _make_store(mesh, meet, site.first)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        store=store, rank=mesh.rank, world_size=mesh.world, timeout=_PATIENCE,
    )  # fmt: skip
    # Every rank makes every group, also those that it is not in: torch asks for that.
    made = {
        ranks: _group(ranks, mesh.rank, device, entered)
        for ranks in dict.fromkeys((*mesh.groups("tp"), *mesh.groups("dp"), *mesh.engines()))
    }
    tp, dp = made[mesh.ranks("tp")], made[mesh.ranks("dp")]
    for group in (tp, dp):
        if isinstance(group, TorchGroup) and device.type == "cuda":
            group.open_mailbox(site.node)
    world = next(made[ranks] for ranks in mesh.engines() if mesh.rank in ranks)
    links = Links(
        mesh=mesh, world=world, tp=tp, dp=dp, store=store, channels=_channels(mesh, device, waiting)
    )
    parallel_state.remember(links)
    return links


def _choose_interface(device: torch.device, site: Site) -> None:
    """Gloo and NCCL speak where this node is reached, unless the user has said otherwise."""
    if site.address is None:
        if device.type == "cpu":  # all ranks are on this host, whatever its name resolves to
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        return
    for name, addresses in psutil.net_if_addrs().items():
        # All of 127.0.0.0/8 is the loopback interface's, which lists one address.
        if any(site.address == a.address or _are_loopback(site.address, a.address) for a in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def _are_loopback(*addresses: str) -> bool:
    return all(address.startswith("127.") for address in addresses)


def _make_store(mesh: Mesh, meet: Callable[[int | None], int], host: str) -> TCPStore:
    """Where ranks leave their addresses: a server in rank 0's process, on its node."""
    if mesh.rank:
        return TCPStore(host, meet(None), mesh.world, timeout=_PATIENCE)
    with socket.create_server((host, 0)) as listener:  # the store's own would listen at all addresses
        port = meet(listener.getsockname()[1])
        return TCPStore(
            host, port, mesh.world, is_master=True, wait_for_workers=False, timeout=_PATIENCE,
            master_listen_fd=listener.detach(),
        )  # fmt: skip


def _channels(mesh: Mesh, device: torch.device, waiting: Callable[[bool], None]) -> Channels | None:
    if mesh.pp == 1:
        return None
    made = {
        ranks: Channels(TorchChannel(ranks, waiting), TorchChannel(ranks, waiting))
        for ranks in mesh.groups("pp")
    }
    channels = made[mesh.ranks("pp")]
    _greet(channels, mesh.rank_of("pp"), mesh.pp, device)
    return channels


def _greet(channels: Channels, stage: int, num_stages: int, device: torch.device) -> None:
    """Let each pair of stages meet, which NCCL does at their first message, and there both hosts wait."""
    last, x = num_stages - 1, torch.zeros(1, device=device)
    if stage > 0:
        channels.streams.receive(x, stage - 1).wait()
    if stage < last:
        channels.streams.send(x, stage + 1).wait()
        channels.feedback.receive(x, last).wait()
    else:
        for other in range(last):
            channels.feedback.send(x, other).wait()


def disconnect() -> None:
    """Leave; nothing happens if this process has met nobody."""
    parallel_state.remember(None)
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
