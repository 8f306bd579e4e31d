"""A connector for tests, which ends its transfers when told to, on all ranks or on one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pellucid.connectors.base import Ended
from pellucid.connectors.host import KVTransfer
from pellucid.connectors.lending import Transfer
from pellucid.types import Request

if TYPE_CHECKING:
    from pellucid.schedule.scheduler import Scheduler


class Store:
    """A connector that promises `num_tokens` of every prompt, may save all, and ends when asked."""

    def __init__(self, num_tokens: int = 0, saves: bool = False, keeps: object = None) -> None:
        self.num_tokens, self.saves, self.keeps = num_tokens, saves, keeps
        self.num_lookups = self.num_forgotten = 0
        self.active: list[Transfer] = []
        self.over: list[tuple[Transfer, bool]] = []
        self.published_digests: list[bytes] = []

    def lookup(self, request: Request, digests: Sequence[bytes], num_cached: int) -> int:
        self.num_lookups += 1
        return min(self.num_tokens, len(digests) * 4)

    def load(self, transfer: Transfer) -> object:
        self.active.append(transfer)
        return {"load": len(transfer.digests)}

    def published(self, transfer: Transfer) -> object:
        self.published_digests += transfer.digests
        return None

    def left(self, request: Request, transfer: Transfer) -> object:
        if not self.saves:
            return None
        self.active.append(transfer)
        return self.keeps or {"save": len(transfer.digests)}

    def ended(self, transfer: Transfer, *, ok: bool) -> None:
        self.active.remove(transfer)
        self.over.append((transfer, ok))

    def close(self) -> None:
        pass

    def forget(self) -> None:
        self.num_forgotten += 1

    def counters(self) -> dict[str, int]:
        return {}

    def poll(self) -> None:
        pass


class StoreTransfer(KVTransfer):
    """The feature around a store."""

    def __init__(self, store: Store, num_ranks: int = 1, *, fails: bool = False) -> None:
        self.store, self.num_ranks, self.fails = store, num_ranks, fails

    def bind(self, scheduler: Scheduler, capacity: object) -> None:
        self.serve(scheduler, self.store)

    def say_all(self, *, ok: bool = True, ranks: int | None = None) -> dict[str, str | None]:
        """Ranks say of all jobs under way that they have ended; each rank once."""
        failed: dict[str, str | None] = {}
        for number in list(self._transfers._under_way):
            for rank in range(self.num_ranks if ranks is None else ranks):
                failed |= self.hear(rank, Ended(number, ok))
        return failed
