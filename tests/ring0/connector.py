"""A toy KV connector: loads that write out of order and may fail, saves that read out of order.

Both start in stream order on every rank of each stage (with the plan that carries them) and end some ticks
later, on each rank by itself.  A rank has its share of every block's entries.  What a save has read is
compared with the truth, and may be loaded again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pellucid.connectors.base import KEEP, Ended, Job
from pellucid.connectors.host import KVTransfer
from pellucid.connectors.lending import Transfer
from pellucid.executor.base import Hear
from pellucid.kv.kinds import Kind
from pellucid.types import Request

if TYPE_CHECKING:
    from pellucid.schedule.scheduler import Scheduler
    from tests.ring0.worker import Stage

Key = tuple[int, bytes]  # (kind, digest)
Blocks = dict[int, list[int]]  # by layer: one block's entries


@dataclass(eq=False)
class Work:
    """A job on one rank of a stage."""

    job: Job
    transfer: Transfer
    stage: Stage
    rank: int  # of the stage
    ticks: int  # until it reads or writes
    fails: bool


@dataclass(eq=False)
class Told:
    """What workers need of a transfer beside its pages; `Job.what` is its number here."""

    transfer: Transfer
    broken: tuple[int, int] | None  # stage and rank on which it fails
    read: dict[Key, Blocks] = field(default_factory=dict)


class ToyConnector:
    """Both halves in one."""

    def __init__(
        self,
        remote: dict[Key, Blocks],
        truth: dict[Key, Blocks],
        kinds: tuple[Kind, ...],
        num_stages: int,
        save_rate: float,
        rng: random.Random,
    ) -> None:
        self.remote, self.truth, self.kinds = remote, truth, kinds
        self.num_stages, self.ranks_a_stage = num_stages, rng.choice([1, 1, 2, 3])
        self.save_rate, self.rng = save_rate, rng
        self.saves_published = rng.random() < 0.5
        self.told: list[Told] = []
        self.active: list[Work] = []
        self.kept: list[Transfer] = []
        self.feature: ToyTransfer
        self.num_loads = self.num_failed = self.num_saves = 0

    @property
    def num_ranks(self) -> int:
        return self.num_stages * self.ranks_a_stage

    # Scheduler side

    def lookup(self, request: Request, digests: Sequence[bytes], num_cached: int) -> int:
        found, num = list(digests), -1
        while num != len(found):
            num = len(found)
            for i, kind in enumerate(self.kinds):
                del found[kind.reach(found, {digest for of, digest in self.remote if of == i}) :]
        return num * self.kinds[0].block_size

    def load(self, transfer: Transfer) -> object:
        assert len(transfer.pages) == len(transfer.digests)
        where = self.rng.randrange(self.num_stages), self.rng.randrange(self.ranks_a_stage)
        return self.tell(transfer, where if self.rng.random() < 0.3 else None)

    def published(self, transfer: Transfer) -> object:
        if not self.saves_published or self.rng.random() >= self.save_rate:
            return None
        return self.tell(transfer, None)

    def left(self, request: Request, transfer: Transfer) -> object:
        if self.saves_published or self.rng.random() >= self.save_rate:
            return None
        if self.rng.random() < 0.2:
            self.kept.append(transfer)
            return KEEP
        return self.tell(transfer, None)

    def tell(self, transfer: Transfer, broken: tuple[int, int] | None) -> int:
        self.told.append(Told(transfer, broken))
        return len(self.told) - 1

    def ended(self, transfer: Transfer, *, ok: bool) -> None:
        told = next((each for each in self.told if each.transfer is transfer), None)
        if told is None:
            return  # it was kept
        assert ok == (told.broken is None), "one rank's failure is the transfer's"
        if transfer.is_load:
            self.num_failed += not ok
            self.num_loads += ok
            return
        self.num_saves += 1
        for key, blocks in told.read.items():
            assert blocks == self.truth[key], "saved something else than the block's KV"
        self.remote |= told.read

    def close(self) -> None:
        pass

    def forget(self) -> None:
        pass

    def counters(self) -> dict[str, int]:
        return {}

    def poll(self) -> None:
        while self.kept and self.rng.random() < 0.2:
            self.feature.end(self.kept.pop())

    # Workers' side

    def start(self, jobs: Sequence[Job], stage: Stage) -> None:
        for job in jobs:
            told = self.told[job.what]
            for rank in range(self.ranks_a_stage):
                ticks, fails = self.rng.choice([-1, 0, 1, 3, 7]), told.broken == (stage.index, rank)
                work = Work(job, told.transfer, stage, rank, ticks, fails)
                self.active.append(work)
                if ticks < 0:  # at once; it is told later
                    self.move(work)

    def tick(self, hear: Hear) -> None:
        for work in list(self.active):
            if work.ticks == 0:
                self.move(work)
            work.ticks -= 1
            if work.ticks < 0:
                self.active.remove(work)
                rank = work.stage.index * self.ranks_a_stage + work.rank
                hear(rank, "kv_transfer", Ended(work.job.number, not work.fails))

    def move(self, work: Work) -> None:
        (self.write if work.job.is_load else self.read)(work)

    def write(self, work: Work) -> None:
        for key, layer, entries in self.parts(work):
            own = self.remote[key][layer]
            for i in range(work.rank, len(own), self.ranks_a_stage):
                entries[i] = 0 if work.fails else own[i]

    def read(self, work: Work) -> None:
        read = self.told[work.job.what].read
        for key, layer, entries in self.parts(work):
            own = read.setdefault(key, {}).setdefault(layer, [0] * len(entries))
            own[work.rank :: self.ranks_a_stage] = entries[work.rank :: self.ranks_a_stage]

    def parts(self, work: Work) -> Iterator[tuple[Key, int, list[int]]]:
        """What a stage has of a transfer: by key and layer a block's entries."""
        stage, transfer = work.stage, work.transfer
        for layer in stage.layers:
            kind = stage.kind(layer)
            for pages, digest in zip(transfer.pages.tolist(), transfer.digests, strict=True):
                if pages[stage.places[layer][0]]:
                    yield (kind, digest), layer, stage.entries(pages, layer)  # type: ignore[misc]


class ToyTransfer(KVTransfer):
    """The feature around a toy, or none."""

    def __init__(self, connector: ToyConnector) -> None:
        self.num_ranks = connector.num_ranks
        self.toy = connector
        connector.feature = self

    def bind(self, scheduler: Scheduler, capacity: object) -> None:
        self.serve(scheduler, self.toy)
