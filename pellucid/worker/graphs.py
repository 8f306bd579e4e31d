"""How a step is launched: kernel by kernel, or as a CUDA graph, recorded at start and replayed in one go.

Graphs serve steps whose rows all have the same number of queries, padded to the next recorded number of rows.
One graph holds the whole of a DeviceStep, for rows that sample with nothing but a temperature: gathering
inputs from the slots, the forward, sampling, advancing the slots, drafting.  Two more hold its halves: the
forward, behind which other rows sample kernel by kernel, and what follows it with the features that change
logits.  A
padding row is the spare slot, with no room for a token; it reads and writes block 0 alone.  Steps with prompt
chunks have recordings of another kind (chunks.py).  Whatever is not recorded is launched kernel by kernel.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

from pellucid.features.base import Halves
from pellucid.features.worker import NO_RIDERS, Riders, WorkerFeatures
from pellucid.sample.state import Feature, SamplingState
from pellucid.transfer import upload
from pellucid.worker.inputs import InputBuilder, StepCounts, StepRows

T = TypeVar("T")
B = TypeVar("B")  # what a step's first half hands to its second
B_co = TypeVar("B_co", covariant=True)
Y = TypeVar("Y")  # what a step yields, on the device
Y_co = TypeVar("Y_co", covariant=True)
Run = Callable[[], T]
LARGEST = 512  # rows; beyond it launches no longer matter


class Recorder(Protocol):
    """Turns what launches kernels on memory that stays in its place into its replay."""

    def __call__(self, run: Run[T]) -> Run[T]: ...


class Step(Protocol[B, Y_co]):
    """The device's part of a step, in two halves: device_step.py."""

    def begin(self, rows: StepRows) -> B:
        """Up to the forward's end."""
        ...

    def finish(self, rows: StepRows, begun: B) -> Y_co:
        """What follows."""
        ...


class Launcher(Protocol[Y_co]):
    """Runs the device's part of a step."""

    def __call__(self, counts: StepCounts) -> Y_co:
        """The step's yield, on the device; valid until the next call."""
        ...

    def begin(self, counts: StepCounts) -> Callable[[], Y_co]:
        """Launch the forward alone; what is returned launches the rest, before any other step."""
        ...

    def measure(self) -> int:
        """Bytes of device memory that `capture` will hold, beside what any step needs."""
        ...

    def capture(self) -> None:
        """Record whatever is to be recorded; the KV cache is in its place from now on."""
        ...


class ChunkSteps(Protocol[B_co, Y]):
    """Recordings of steps with prompt chunks: chunks.py."""

    def step(self, counts: StepCounts) -> Y | None:
        """Replay a step whose rows sample with nothing but a temperature; None: there is no recording."""
        ...

    def capture(
        self, record: Recorder, finish: Callable[[StepRows, B_co], Y], *, only_largest: bool = False
    ) -> None:
        """Record every shape.  finish: what follows the forward."""
        ...

    def kept_bytes(self) -> int:
        """Bytes that all recordings keep from one replay to the next, but for the largest, which is there."""
        ...

    def forget(self) -> None:
        """Give the recordings up."""
        ...


class EagerLauncher(Generic[B, Y]):
    """Kernel by kernel."""

    def __init__(self, step: Step[B, Y], inputs: InputBuilder) -> None:
        self.step, self.inputs = step, inputs

    def __call__(self, counts: StepCounts) -> Y:
        return self.begin(counts)()

    def begin(self, counts: StepCounts) -> Callable[[], Y]:
        rows = self.inputs.ship(counts)
        begun = self.step.begin(rows)
        return lambda: self.step.finish(rows, begun)

    def measure(self) -> int:
        return 0

    def capture(self) -> None:
        """There is nothing to record."""


class StaticRows:
    """Rows of `num_query` queries each, in buffers that never move, so a graph may read them again."""

    def __init__(self, max_rows: int, num_query: int, spare: int, device: torch.device) -> None:
        self.max_rows, self.num_query, self.spare, self.device = max_rows, num_query, spare, device
        self._host = np.full(max_rows, spare, dtype=np.int64)
        self._loaded = self._host, 0  # what `load` was last asked for
        self._slots = torch.full((max_rows,), spare, dtype=torch.int64, device=device)
        self._num_query = torch.full_like(self._slots, num_query)
        self._num_drafts = torch.full_like(self._slots, num_query - 1)
        self._tokens = torch.arange(max_rows * num_query, device=device)
        self._cu_query = torch.arange(max_rows + 1, device=device) * num_query

    def load(self, slots: np.ndarray, num_rows: int) -> None:
        """Bring the rows' slots to the device, padded to `num_rows`, if they are not the last step's."""
        if slots is self._loaded[0] and num_rows == self._loaded[1]:
            return
        self._loaded = slots, num_rows
        host = self._host[:num_rows]
        are_padded = np.count_nonzero(host[len(slots) :] != self.spare) == 0
        if are_padded and np.array_equal(host[: len(slots)], slots):
            return
        host[: len(slots)], host[len(slots) :] = slots, self.spare
        self._slots[:num_rows].copy_(upload(host.copy(), self.device))

    def view(
        self, num_rows: int, host_slots: Sequence[int] | np.ndarray = (), riders: Riders = NO_RIDERS
    ) -> StepRows:
        """The first rows.  host_slots: of the rows that are no padding, as far as the host is to know."""
        slots, num_tokens = self._slots[:num_rows], num_rows * self.num_query
        known = np.full(num_rows, self.spare)
        known[: len(host_slots)] = host_slots
        return StepRows(
            counts=replace(StepCounts.uniform(known, self.num_query), riders=riders),
            slots=slots,
            num_query=self._num_query[:num_rows],
            num_drafts=self._num_drafts[:num_rows],
            num_sampled=self._num_query[:num_rows],
            cu_query=self._cu_query[: num_rows + 1],
            cu_logits=self._cu_query[: num_rows + 1],
            logits_index=self._tokens[:num_tokens],
            score_index=slots[:0],
            score_slots=slots[:0],
        )


@dataclass(frozen=True, slots=True)
class Recording(Generic[B, Y]):
    """The replays of a step of so many rows: the whole, or its forward and then the rest with features."""

    whole: Run[Y]
    first: Run[B]
    rest: Run[Y]  # behind `first`, with what features have filled


class GraphLauncher(Generic[B, Y]):
    """Replays a recording where there is one for the step; launches kernels one by one where there is none.

    Of a step whose rows ask for more than a recording knows, the forward is replayed and the rest is not.
    make_recorder: makes what turns a function that launches a step on static rows into its replay.
    chunks: recordings of steps with chunks, if there are any.
    """

    def __init__(
        self, eager: EagerLauncher[B, Y], static: StaticRows, state: SamplingState, features: WorkerFeatures,
        make_recorder: Callable[[], Recorder], chunks: ChunkSteps[B, Y] | None = None,
    ) -> None:  # fmt: skip
        self.eager, self.static, self.state, self.features = eager, static, state, features
        self._make_recorder = make_recorder
        self._chunks = chunks
        self._recordings: dict[int, Recording[B, Y]] = {}  # by rows
        self._sizes: list[int] = []  # of these, ascending
        self._begun: list[B] = []  # what the last replay of a forward has begun
        features.make_room(static.max_rows * static.num_query)

    def __call__(self, counts: StepCounts) -> Y:
        num_rows = self.num_rows_for(counts)
        if num_rows is None:
            return self._chunked(counts) or self.eager(counts)
        if self._may_replay(counts) > Halves.WHOLE:
            return self.begin(counts)()
        self.static.load(counts.slots, num_rows)
        return self._recordings[num_rows].whole()

    def begin(self, counts: StepCounts) -> Callable[[], Y]:
        num_rows = self.num_rows_for(counts)
        if num_rows is None:
            return self.eager.begin(counts)
        self.static.load(counts.slots, num_rows)
        self._begun = [self._recordings[num_rows].first()]
        return lambda: self._finish(counts, num_rows)

    def _chunked(self, counts: StepCounts) -> Y | None:
        """Replay a step with chunks; None: there is no recording."""
        if self._chunks is None or self._may_replay(counts) > Halves.WHOLE:
            return None
        return self._chunks.step(counts)

    def _finish(self, counts: StepCounts, num_rows: int) -> Y:
        if self._may_replay(counts) < Halves.EAGER:
            self.features.clear(counts)
            return self._recordings[num_rows].rest()
        rows = self.static.view(num_rows, counts.slots, counts.riders)
        return self.eager.step.finish(rows, self._begun[0])

    def num_rows_for(self, counts: StepCounts) -> int | None:
        """The rows of the recording that serves this step, or at least its forward."""
        if counts.uniform_query != self.static.num_query or counts.num_propose != self.static.num_query - 1:
            return None
        place = bisect_left(self._sizes, counts.num_rows)
        return self._sizes[place] if place < len(self._sizes) else None

    def _may_replay(self, counts: StepCounts) -> Halves:
        """A row that samples with more than a temperature, or a feature, may ask for kernels of its own."""
        return counts.riders.halves if self.state.is_plain(counts.sampled_slots) else Halves.EAGER

    def measure(self) -> int:
        """Record the largest graphs, whose memory the others share, and forget them again."""
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        self._capture([self.static.max_rows], only_largest=True)
        num_bytes = torch.cuda.memory_reserved() - before
        self._recordings.clear()
        self._sizes.clear()
        self._begun.clear()
        if self._chunks is not None:
            num_bytes += self._chunks.kept_bytes()
            self._chunks.forget()
        return num_bytes

    def capture(self) -> None:
        """Record every number of rows worth recording, the largest first."""
        self._capture(bucket_sizes(self.static.max_rows))

    @torch.inference_mode()
    def _capture(self, sizes: list[int], *, only_largest: bool = False) -> None:
        record = self._make_recorder()
        self.state.features[self.static.spare] = Feature.RANDOM  # what is recorded draws; at 0 that is greedy
        self.static.load(np.empty(0, dtype=np.int64), self.static.max_rows)
        for num_rows in sorted(sizes, reverse=True):
            self._recordings[num_rows] = self._record(record, num_rows)
        self._sizes = sorted(self._recordings)
        if self._chunks is not None:
            self._chunks.capture(record, self.eager.step.finish, only_largest=only_largest)
        torch.cuda.empty_cache()  # of what ran before it was recorded

    def _record(self, record: Recorder, num_rows: int) -> Recording[B, Y]:
        step, rows = self.eager.step, self.static.view(num_rows)
        with_features = self.static.view(num_rows, riders=self.features.split_riders(num_rows))
        whole = record(lambda: step.finish(rows, step.begin(rows)))
        first = record(lambda: step.begin(rows))
        self._begun = [first()]
        return Recording(whole, first, record(lambda: step.finish(with_features, self._begun[0])))


def bucket_sizes(max_rows: int) -> list[int]:
    """Numbers of rows to record: few, and so that padding wastes little."""
    sizes = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, LARGEST]
    return [n for n in sizes if n < max_rows] + [max_rows]


class CudaRecorder:
    """Records CUDA graphs that share one memory pool, since only one runs at a time; it dies with them.

    abridged: within, a run launches whatever it does otherwise, but less often.
    """

    def __init__(self, abridged: Callable[[], AbstractContextManager[None]]) -> None:
        self._abridged, self._pool = abridged, torch.cuda.graph_pool_handle()

    def __call__(self, run: Run[T]) -> Run[T]:
        with self._abridged():
            run()  # loads what it needs, and makes what it keeps; nothing of that may happen while recording
        graph, stream = torch.cuda.CUDAGraph(), recording_stream(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Of this thread alone: NCCL asks for its events from another one.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                yielded = run()
            finally:
                graph.capture_end()

        def replay() -> T:
            graph.replay()
            return yielded

        return replay


@cache
def recording_stream(device: int) -> torch.cuda.Stream:
    """The one that all is recorded on there: libraries keep a workspace for each that they have seen."""
    return torch.cuda.Stream(device)
