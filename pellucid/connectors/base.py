"""The door for KV connectors: stores of KV outside this engine's pool, read and written out of stream order.

Scheduler side (`KVConnector`, no torch): lookup, reserved, plan_meta, finished, update.
Worker side (`WorkerConnector`): register, load, save, poll.
Pages that a transfer reads or writes belong to the connector from `reserved` or `finished` until `update`
says that the transfer has ended on every rank, whatever becomes of the request meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pellucid.kv.manager import Transfer
from pellucid.types import Request


@dataclass(frozen=True, slots=True)
class TransferEnd:
    """A transfer is over on every rank; `ok` is false if any rank failed, and then a load means recompute."""

    transfer: Transfer
    ok: bool


class KVConnector(Protocol):
    """The scheduler's side.  Called in the engine's thread; nothing here may wait."""

    def lookup(self, request: Request, digests: Sequence[bytes], num_cached: int) -> int:
        """How many leading tokens the store could provide; at most `num_cached` is "nothing new".

        digests: of all full blocks that the request can use; of a window's only those count that are seen
        behind what is promised.  num_cached: tokens found in our own cache.
        """
        ...

    def reserved(self, transfer: Transfer) -> None:
        """The pages of a load are there; the load starts with the plan that carries it in kv_meta."""
        ...

    def plan_meta(self) -> list[object]:
        """What the workers must be told with this plan: loads and saves to start."""
        ...

    def finished(self, request: Request, transfer: Transfer) -> bool:
        """A sequence leaves its slot.  True: save these pages, which are held until `update` says so."""
        ...

    def update(self, kv_done: list[object]) -> list[TransferEnd]:
        """What has ended, by what workers reported (often nothing) or the connector found out itself."""
        ...


class WorkerConnector(Protocol):
    """A worker's side.  It sees bytes, and knows no layers."""

    def register(self, pool: object) -> None:
        """The tensor of all pages, page 0 for padding: bytes [num_pages + 1, page_bytes]."""
        ...

    def load(self, kv_meta: list[object]) -> None:
        """Start loads, in stream order: behind everything that may still write their pages."""
        ...

    def save(self, kv_meta: list[object]) -> None:
        """Start saves, behind this plan's forward."""
        ...

    def poll(self) -> list[object]:
        """What has ended here since the last call."""
        ...


class NullConnector:
    """No store."""

    def lookup(self, request: Request, digests: Sequence[bytes], num_cached: int) -> int:
        return 0

    def reserved(self, transfer: Transfer) -> None:
        raise AssertionError("a load was reserved, but lookup promised nothing")

    def plan_meta(self) -> list[object]:
        return []

    def finished(self, request: Request, transfer: Transfer) -> bool:
        return False

    def update(self, kv_done: list[object]) -> list[TransferEnd]:
        return []
