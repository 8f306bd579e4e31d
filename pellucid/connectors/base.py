"""The door for KV connectors: stores of KV outside this engine's pool, read and written out of stream order.

A connector has two halves, which the feature `kv_transfer` calls.  The one beside the scheduler
(`KVConnector`, no torch) decides; the one in every worker (`WorkerConnector`) moves bytes.  A *transfer* is
some blocks whose pages are lent; a *job* is what workers are told of it.

    host    lookup      what could be loaded of a prompt
            load        its pages are there; it waits, without a slot, until that has ended
            published   blocks that can be found from now on: save them?
            left        a request leaves its slot: save its blocks, or keep them for somebody?
    worker  start       loads: behind all that is launched so far; saves: behind the plan that carries them
            done        this rank is through with a job, from any thread
    host    ended       all ranks are, and it is ok if all were

Law 5: pages of a transfer belong to it until every rank has spoken, whatever becomes of the request.
A load that failed, or has not ended after `kv_load_seconds`, is computed instead, or ends its request:
`kv_load_failure_policy`.  While one is late no other is begun: whoever has the KV may hang.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from pellucid.connectors.lending import Transfer
from pellucid.kv.kinds import Kind
from pellucid.registry import Registry
from pellucid.schedule.plan import Ints, ints
from pellucid.types import Request

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pellucid.executor.base import Capacity
    from pellucid.resolve import Resolved

# Instead of a job: no worker is told, and the pages stay lent until `Door.end`.
KEEP = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every worker is told of a transfer."""

    number: int
    is_load: bool  # it writes these pages; otherwise it reads them, if there are any
    # Of this engine's pool, block by block, and those of a block in the order of kinds; what a window does
    # not reach is left out.
    pages: Ints = field(default_factory=ints)
    what: Any = None  # the connector's own: plain data (dicts, lists, texts, numbers, bytes)


@dataclass(frozen=True, slots=True)
class Jobs:
    """What a plan carries."""

    jobs: list[Job]


@dataclass(frozen=True, slots=True)
class Ended:
    """What a rank says of a job: it is over here."""

    number: int
    ok: bool
    seconds: float = 0.0  # that its copies took, of who counts them


class Door(Protocol):
    """What a connector's half beside the scheduler may know and do."""

    kinds: tuple[Kind, ...]  # of KV
    block_size: int  # tokens
    num_ranks: int  # that must all say that a job has ended

    def start(self, what: object) -> Transfer:
        """Have a job without pages done behind the next plan; `ended` tells when."""
        ...

    def end(self, transfer: Transfer, *, ok: bool = True) -> None:
        """What was kept, or a job that nobody does any more, is over: its pages are free."""
        ...


class KVConnector(Protocol):
    """The half beside the scheduler.  Called in the engine's thread; nothing here may wait."""

    def lookup(self, request: Request, digests: Sequence[bytes], num_cached: int) -> int:
        """How many leading tokens the store could provide; at most `num_cached` is "nothing new".

        digests: of all full blocks that the request can use; of a window's only those count that are seen
        behind what is promised.  num_cached: tokens found in our own cache.
        """
        ...

    def load(self, transfer: Transfer) -> object:
        """Its pages are to be written: `Job.what` of a load."""
        ...

    def published(self, transfer: Transfer) -> object:
        """These blocks, of one kind, can be found: `Job.what` of a save behind this plan's forward; or None.

        A load's, too, when it has ended.
        """
        ...

    def left(self, request: Request, transfer: Transfer) -> object:
        """A request leaves its slot; its full blocks: `Job.what` of a save, KEEP, or None."""
        ...

    def ended(self, transfer: Transfer, *, ok: bool) -> None:
        """A transfer is over on all ranks."""
        ...

    def forget(self) -> None:
        """KV that was saved until now is of no use any more."""
        ...

    def poll(self) -> None:
        """Time has passed."""
        ...

    def counters(self) -> dict[str, int]:
        """For stats and metrics: totals since the start; names that end in _now are of what is there now."""
        ...

    def close(self) -> None:
        """Give everything back; nothing else is called any more."""
        ...


class Done(Protocol):
    """Tells that a job is over here, from any thread: its number, and the rest of `Ended`."""

    def __call__(self, number: int, ok: bool, seconds: float = 0.0, /) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDoor:
    """What a connector's half in a worker may know and do."""

    resolved: Resolved
    device: torch.device
    rank: int
    num_ranks: int
    done: Done
    load_seconds: float = 20.0  # behind which nobody waits for a load any more


class WorkerConnector(Protocol):
    """A worker's half.  It sees bytes, and knows no layers, kinds or requests."""

    def register(self, pages: Tensor, capacity: Capacity) -> None:
        """The tensor of all pages, page 0 for padding: bytes [num_pages + 1, page_bytes]."""
        ...

    def release(self) -> None:
        """The pages are about to go: wait for what is under way."""
        ...

    def start(self, jobs: Sequence[Job]) -> None:
        """Called with loads before a plan's forward is launched, with others behind it.

        Each is told of by `WorkerDoor.done`, once, also if it cannot be done.
        """
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class Connector(NamedTuple):
    """Both halves, as "module:Class".

    The one beside the scheduler is made of (door, resolved, capacity, options), the worker's of (door,
    options); options: `kv_connector_extra_config`.
    """

    host: str
    worker: str
    may_sleep: bool = True  # may its engine give its pages away, and take others?


Options = Mapping[str, object]

# By vLLM's names, as kv_transfer_config says them.
KV_CONNECTORS: Registry[Connector] = Registry(
    "KV connector",
    {
        "PeerConnector": "pellucid.connectors.peer:PEER",
        "NixlConnector": "pellucid.connectors.peer:PEER",
        "NixlPullConnector": "pellucid.connectors.peer:PEER",
        "P2pNcclConnector": "pellucid.connectors.peer:PEER",
        "OffloadingConnector": "pellucid.connectors.tiers:TIERS",
        "SimpleCPUOffloadConnector": "pellucid.connectors.tiers:TIERS",
        "ExampleConnector": "pellucid.connectors.tiers:TIERS",
        "MultiConnector": "pellucid.connectors.multi:MULTI",
    },
)
