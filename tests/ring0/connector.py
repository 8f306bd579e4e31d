"""A toy KV connector: loads that write out of order and may fail, saves that read out of order.

Both start in stream order on each stage (with the plan that carries them) and end some ticks later.  What a
save has read is compared with the truth, and may be loaded again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pellucid.connectors.base import TransferEnd
from pellucid.kv.kinds import Kind
from pellucid.kv.manager import Transfer
from pellucid.types import Request

if TYPE_CHECKING:
    from tests.ring0.worker import Stage

Key = tuple[int, bytes]  # (kind, digest)
Blocks = dict[int, list[int]]  # by layer: one block's entries


@dataclass(eq=False)
class Job:
    """A transfer on its way over the stages."""

    transfer: Transfer
    fails: bool
    due: dict[int, int] = field(default_factory=dict)  # stage -> ticks until it reads or writes there
    stages: dict[int, Stage] = field(default_factory=dict)
    read: dict[Key, Blocks] = field(default_factory=dict)


class ToyConnector:
    """Scheduler side and workers' side in one."""

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
        self.num_stages, self.save_rate, self.rng = num_stages, save_rate, rng
        self.pending: list[Job] = []
        self.active: list[Job] = []
        self.ended: list[Job] = []
        self.num_loads = self.num_failed = self.num_saves = 0

    # Scheduler side

    def lookup(self, request: Request, digests: Sequence[bytes], num_cached: int) -> int:
        found, num = list(digests), -1
        while num != len(found):
            num = len(found)
            for i, kind in enumerate(self.kinds):
                del found[kind.reach(found, {digest for of, digest in self.remote if of == i}) :]
        return num * self.kinds[0].block_size

    def reserved(self, transfer: Transfer) -> None:
        assert len(transfer.pages) == len(transfer.digests)
        self.pending.append(Job(transfer, self.rng.random() < 0.3))

    def plan_meta(self) -> list[object]:
        meta, self.pending = self.pending, []
        self.active += meta
        return list(meta)

    def finished(self, request: Request, transfer: Transfer) -> bool:
        if self.rng.random() >= self.save_rate:
            return False
        self.pending.append(Job(transfer, False))
        return True

    def update(self, kv_done: list[object]) -> list[TransferEnd]:
        self.tick()
        done = [job for job in kv_done if isinstance(job, Job)]
        if self.rng.random() < 0.5:  # the rest comes with a result, or later
            done += self.report()
        return [self.end(job) for job in done]

    def end(self, job: Job) -> TransferEnd:
        if job.transfer.is_load:
            self.num_failed += job.fails
            self.num_loads += not job.fails
        else:
            self.num_saves += 1
            for key, blocks in job.read.items():
                assert blocks == self.truth[key], "saved something else than the block's KV"
            self.remote |= job.read
        return TransferEnd(job.transfer, not job.fails)

    # Workers' side

    def start(self, job: Job, stage: Stage) -> None:
        job.due[stage.index], job.stages[stage.index] = self.rng.choice([0, 0, 1, 3, 7]), stage

    def tick(self) -> None:
        for job in self.active:
            for index, ticks in job.due.items():
                job.due[index] = ticks - 1
                if ticks == 0:
                    (self.write if job.transfer.is_load else self.read)(job, job.stages[index])
        over = [job for job in self.active if len(job.due) == self.num_stages and max(job.due.values()) < 0]
        self.active = [job for job in self.active if job not in over]
        self.ended += over

    def report(self) -> list[object]:
        ended, self.ended = self.ended, []
        return list(ended)

    def write(self, job: Job, stage: Stage) -> None:
        broken = job.fails and stage.index == self.num_stages - 1
        for key, layer, entries in self.parts(job, stage):
            own = self.remote[key][layer]
            entries[:] = [0] * len(own) if broken else own

    def read(self, job: Job, stage: Stage) -> None:
        for key, layer, entries in self.parts(job, stage):
            job.read.setdefault(key, {})[layer] = [*entries]

    def parts(self, job: Job, stage: Stage) -> Iterator[tuple[Key, int, list[int]]]:
        """What a stage has of a transfer: by key and layer a block's entries."""
        for layer in stage.layers:
            kind = stage.kind(layer)
            for pages, digest in zip(job.transfer.pages.tolist(), job.transfer.digests, strict=True):
                if pages[stage.places[layer][0]]:
                    yield (kind, digest), layer, stage.entries(pages, layer)  # type: ignore[misc]
