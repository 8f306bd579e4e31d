"""What an engine did, step by step, in a file: to look at again, and to run the scheduler on again.

Lines of JSON: the engine, then requests as they come, steps as they come home, and pictures for the X-ray.
There are no tokens in it: of a prompt it has a number for each block, the same for the same beginning.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from pellucid.kv.hashes import Prefix, root_digest
from pellucid.kv.kinds import Kind
from pellucid.observe.statistics import EngineStats
from pellucid.observe.xray import LiveXRay
from pellucid.schedule.plan import Admission, StepPlan, StepResult
from pellucid.schedule.scheduler import Scheduler
from pellucid.schedule.step import Flight, SchedulerOptions
from pellucid.types import Request

VERSION = 1
FLUSH_SECONDS = 1.0
NOBODY_ASKED: dict[str, Any] = {  # what a picture says of requests over HTTP
    "engine": 0,
    "num_engines": 1,
    "requests": {"num_failed": 0, "waits": [], "gaps": {"num": 0, "sum": 0.0, "longest": 0.0}},
}
DIGEST_BYTES = 4  # of a block's number


class EngineRecord(msgspec.Struct, tag="engine", tag_field="kind"):
    """The first line."""

    version: int
    options: SchedulerOptions
    kinds: list[Kind]
    num_pages: int
    has_prefix_cache: bool


class RequestRecord(msgspec.Struct, tag="request", tag_field="kind"):
    """A request has come in.  Times of this file are seconds since it was begun."""

    id: str
    arrival: float
    prompt_len: int
    blocks: list[int]  # of its prompt, those that are full
    max_tokens: int | None
    priority: int = 0
    is_streamed: bool = False


class StepRecord(msgspec.Struct, tag="step", tag_field="kind"):
    """A step has come home."""

    id: int
    landed: float
    seconds: float  # that it took
    rows: list[tuple[int, int, int, int]]  # sequence, tokens computed, drafts among them, tokens it yielded
    admitted: list[tuple[int, str]]  # sequences and the requests that they are
    num_cached: int  # tokens of these that were in the cache
    num_waiting: int
    num_preemptions: int  # so far
    kv_usage: float


class PictureRecord(msgspec.Struct, tag="picture", tag_field="kind"):
    """What the X-ray shows of an engine: a `Sight` of server/xray.py, for which nobody asked."""

    sight: dict[str, Any]


Record = EngineRecord | RequestRecord | StepRecord | PictureRecord


class Trace(Protocol):
    """Is told what an engine does, in its thread."""

    def arrives(self, request: Request) -> None: ...

    def lands(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """A plan will be committed, whose step took so many seconds."""
        ...

    def rests(self) -> None:
        """There is nothing to do."""
        ...


class NullTrace:
    """Nobody wants to know."""

    def arrives(self, request: Request) -> None:
        pass

    def lands(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        pass

    def rests(self) -> None:
        pass


class StepTrace:
    """Writes to a file.  Raises ValueError if there can be none.

    One that is there becomes FILE.old: an engine that starts anew may have died of what it tells.
    """

    def __init__(
        self,
        path: Path,
        scheduler: Scheduler,
        stats: Callable[[], EngineStats],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler, self._stats, self._clock = scheduler, stats, clock
        self._xray = LiveXRay(scheduler, clock)
        self._encode = msgspec.json.Encoder().encode
        self._began = self._flushed = clock()
        try:
            if path.is_file():
                path.replace(f"{path}.old")
            self._file = open(path, "wb", buffering=2**16)  # noqa: SIM115
        except OSError as error:
            raise ValueError(f"trace_steps is {str(path)!r}, which cannot be written: {error}") from error
        kv = scheduler.kv
        self._write(
            EngineRecord(
                VERSION, scheduler.options, list(kv.kinds), kv.pool.num_pages, kv.enable_prefix_caching
            )
        )

    def arrives(self, request: Request) -> None:
        prefix = Prefix(root_digest(*request.cache_key), self._scheduler.kv.block_size)
        prefix.extend(request.prompt_token_ids)
        blocks = [int.from_bytes(digest[:DIGEST_BYTES], "little") for digest in prefix.digests]
        arrival = (request.arrival or self._clock()) - self._began
        self._write(
            RequestRecord(
                request.id,
                round(max(0.0, arrival), 6),
                len(request.prompt_token_ids),
                blocks,
                request.sampling.max_tokens,
                request.priority,
                request.is_streamed,
            )
        )

    def lands(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        scheduler, now = self._scheduler, self._clock()
        flight = scheduler.rows_in_flight()
        rows = [
            (seq_id, row.num_query, row.num_draft, num_new)
            for seq_id, row, num_new in zip(
                flight.ids.tolist(), plan.rows, self._num_new(flight, result), strict=True
            )
        ]
        self._write(
            StepRecord(
                plan.id,
                round(now - self._began, 6),
                round(seconds, 6),
                rows,
                self._names(plan.admitted),
                sum(admission.num_computed for admission in plan.admitted),
                scheduler.num_waiting,
                scheduler.counters.num_preemptions,
                round(scheduler.kv.usage, 4),
            )
        )
        self._xray.lands(plan, result, seconds)
        self._draw()
        if now - self._flushed > FLUSH_SECONDS:
            self._flush(now)

    def _num_new(self, flight: Flight, result: StepResult) -> list[int]:
        """Of each row the new tokens that its request gets: none behind a stop, none if it has left."""
        table, counts, tokens = self._scheduler.table, list(result.num_new), result.tokens
        is_alive = table.epoch[flight.rows.slots] == flight.epochs
        for index, row in enumerate(flight.rows):
            seq = table.seqs[row.slot] if is_alive[index] and index not in result.failed else None
            if seq is None:
                counts[index] = 0
            elif counts[index] > 1:
                update = seq.update(tokens[index])
                seq.stop(update, int(table.computed[row.slot]) + row.num_query - row.num_draft)
                counts[index] = len(update.new_token_ids)
        return counts

    def rests(self) -> None:
        self._draw()
        self._flush(self._clock())

    def _names(self, admitted: list[Admission]) -> list[tuple[int, str]]:
        """Of the sequences that entered, and are still there."""
        if not admitted:
            return []
        names = {seq.id: seq.request.id for seq in self._scheduler.running()}
        return [(new.seq_id, names[new.seq_id]) for new in admitted if new.seq_id in names]

    def _draw(self) -> None:
        frame = self._xray.frame(is_stale=False)
        if frame is not None:
            self._write(PictureRecord({**NOBODY_ASKED, "stats": self._stats(), "frame": frame}))

    def _write(self, record: Record) -> None:
        self._file.write(self._encode(record) + b"\n")

    def _flush(self, now: float) -> None:
        self._file.flush()
        self._flushed = now
