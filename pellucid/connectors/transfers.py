"""Pages that are lent to the KV connector, and the join: a transfer is over when every rank says so (law 5).

Numbers its jobs, keeps what the next plan carries, and takes pages back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pellucid.connectors.base import KEEP, Ended, Job
from pellucid.connectors.lending import Transfer, take_back
from pellucid.kv.manager import KVManager
from pellucid.schedule.plan import ints


@dataclass(slots=True)
class UnderWay:
    """A transfer that workers have been told of, or will be with the next plan."""

    transfer: Transfer
    num_left: int  # ranks that have not spoken
    ok: bool = True


class Transfers:
    """Lends, counts what ranks say, and takes back."""

    def __init__(self, kv: KVManager, num_ranks: int) -> None:
        self._kv, self._num_ranks = kv, num_ranks
        self._next_number = 0
        self._under_way: dict[int, UnderWay] = {}  # by number of the job
        self._kept: dict[Transfer, None] = {}
        self._to_carry: list[Job] = []
        self._is_stale: set[Transfer] = set()  # loads of what is of no use any more

    def __len__(self) -> int:
        """Those that have pages, and jobs that no plan has carried yet."""
        return len(self._kv.lent) + sum(not job.pages for job in self._to_carry)

    def __iter__(self) -> Iterator[Transfer]:
        return (each.transfer for each in self._under_way.values())

    def begin(self, transfer: Transfer, what: object) -> None:
        """Its pages are lent.  what: for the job; or KEEP."""
        if what is KEEP:
            self._kept[transfer] = None
            return
        pages = transfer.pages[transfer.pages > 0]
        job = Job(number=self._next_number, is_load=transfer.is_load, pages=ints(pages.tobytes()), what=what)
        self._next_number += 1
        self._under_way[job.number] = UnderWay(transfer, self._num_ranks)
        self._to_carry.append(job)

    def carry(self) -> list[Job]:
        """What the next plan tells workers."""
        jobs, self._to_carry = self._to_carry, []
        return jobs

    def hear(self, ended: Ended) -> tuple[Transfer, bool] | None:
        """A rank has spoken.  Returns the transfer that is over by it, and whether all went well."""
        under_way = self._under_way.get(ended.number)
        if under_way is None:
            return None  # it was given up
        under_way.num_left -= 1
        under_way.ok &= ended.ok
        transfer = under_way.transfer
        transfer.copy_seconds = max(transfer.copy_seconds, ended.seconds)
        if under_way.num_left:
            return None
        del self._under_way[ended.number]
        return transfer, under_way.ok

    def give_up(self, transfer: Transfer) -> None:
        """No word of it counts any more."""
        self._kept.pop(transfer, None)
        for number in [number for number, each in self._under_way.items() if each.transfer is transfer]:
            del self._under_way[number]
            self._to_carry = [job for job in self._to_carry if job.number != number]

    def take_back(self, transfer: Transfer, *, ok: bool) -> None:
        """It is over: publish what a load brought, if it did, and drop its pages."""
        is_of_use = ok and transfer.is_load and transfer not in self._is_stale
        self._is_stale.discard(transfer)
        if transfer in self._kv.lent:
            take_back(self._kv, transfer, publish=is_of_use)

    def forget(self, *transfers: Transfer) -> None:
        """What these loads bring from now on is not to be found; without any, what all bring."""
        self._is_stale.update(transfers or [transfer for transfer in self if transfer.is_load])
