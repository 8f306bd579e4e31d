"""How a step is launched: kernel by kernel, or as a CUDA graph, recorded at start and replayed in one go.

What is recorded is a DeviceStep on rows that never move (static_rows.py), for each of a lattice of shapes
(shapes.py): gathering inputs from the slots, the forward, sampling, advancing the slots, drafting.  A step is
padded to the smallest shape with room.  One graph holds the whole of it, for rows that sample with no more
than a temperature.  Two more hold its halves: the forward, behind which other rows sample kernel by kernel,
and what follows it with the features that change logits.  Steps with prompt chunks have the halves alone, the
second one without features.  Whatever is not recorded is launched kernel by kernel.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import cache
from itertools import islice
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

from pellucid.features.base import Halves
from pellucid.features.worker import Riders, WorkerFeatures
from pellucid.forward import TileMaps
from pellucid.sample.state import Feature, SamplingState
from pellucid.worker.inputs import InputBuilder, StepCounts, StepRows
from pellucid.worker.shapes import StepShape
from pellucid.worker.static_rows import StaticRows

T = TypeVar("T")
B = TypeVar("B")  # what a step's first half hands to its second
Y = TypeVar("Y")  # what a step yields, on the device
Y_co = TypeVar("Y_co", covariant=True)
Run = Callable[[], T]


class Recorder(Protocol):
    """Turns what launches kernels on memory that stays in its place into its replay."""

    def __call__(self, run: Run[T]) -> Run[T]: ...


class Step(Protocol[B, Y]):
    """The device's part of a step, in two halves: device_step.py."""

    def begin(self, rows: StepRows, tiles: TileMaps | None = None) -> B:
        """Up to the forward's end.  tiles: of a forward that is recorded for any chunks."""
        ...

    def finish(self, rows: StepRows, begun: B) -> Y:
        """What follows."""
        ...

    def among(self, yielded: Y, places: np.ndarray) -> Y:
        """What rows have yielded that are at these places, between padding."""
        ...

    def alone(self, rows: StepRows, begun: B) -> B:
        """What `begin` gives for these rows, from what it gave for them among padding."""
        ...

    def num_bytes(self, begun: B) -> int:
        """That are kept from one half to the other."""
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


class Recording(Generic[B, Y]):
    """The replays of a step of one shape: the whole, and perhaps its forward and then the rest.

    Nothing in it refers to itself: a graph that the garbage collector lets go spoils the one being recorded.
    """

    def __init__(self, rows: StaticRows, record: Recorder, step: Step[B, Y]) -> None:
        self.rows, self._record, self._step = rows, record, step
        self._whole: Run[Y] | None = None
        self._first: Run[B] | None = None
        self._rest: Run[Y] | None = None  # behind `first`
        self.begun: list[B] = []  # what the last replay of a forward has begun
        if rows.shape.samples_all:
            view = rows.view()
            self._whole = record(lambda: step.finish(view, step.begin(view, rows.tiles)))
        else:
            self.record_halves()

    def record_halves(self, riders: Riders | None = None) -> None:
        """riders: what the second half is to have beside tokens."""
        rows, step = self.rows, self._step
        view = rows.view()
        with_riders = view if riders is None else rows.view(riders=riders)
        self._first = self._record(lambda: step.begin(view, rows.tiles))
        self.first()
        self._rest = self._record(lambda: step.finish(with_riders, self.begun[0]))

    @property
    def has_halves(self) -> bool:
        return self._first is not None

    def first(self) -> None:
        """The forward of the rows that have been loaded."""
        assert self._first is not None, f"{self.rows.shape} is recorded whole"
        self.begun = [self._first()]

    def rest(self) -> Y:
        """What follows it."""
        assert self._rest is not None, f"{self.rows.shape} is recorded whole"
        return self._rest()

    def whole(self) -> Y:
        """All of the step."""
        if self._whole is not None:
            return self._whole()
        self.first()
        return self.rest()


class GraphLauncher(Generic[B, Y]):
    """Replays a recording where there is one for the step; launches kernels one by one where there is none.

    Of a step whose rows ask for more than a recording knows, the forward is replayed and the rest is not.
    shapes: to be recorded, and whether by halves, too; those with chunks always are.
    make_recorder: makes what turns a function that launches a step on static rows into its replay.
    """

    def __init__(
        self, eager: EagerLauncher[B, Y], shapes: Mapping[StepShape, bool], state: SamplingState,
        features: WorkerFeatures, make_recorder: Callable[[], Recorder],
    ) -> None:  # fmt: skip
        self.eager, self.shapes, self.state, self.features = eager, shapes, state, features
        self._make_recorder = make_recorder
        self._recordings: dict[StepShape, Recording[B, Y]] = {}
        # Of these, ascending: of decodes and verifications alone, and for steps with chunks.
        self._sampling: list[StepShape] = []
        self._chunked: list[StepShape] = []
        features.make_room(max(shape.num_logits for shape in shapes))

    def __call__(self, counts: StepCounts) -> Y:
        if self._may_replay(counts) > Halves.WHOLE:
            return self.begin(counts)()
        recording = self.find(counts)
        if recording is None:
            return self.eager(counts)
        recording.rows.load(counts)
        yielded = recording.whole()
        return self.eager.step.among(yielded, recording.rows.places(counts)) if counts.has_chunks else yielded

    def begin(self, counts: StepCounts) -> Callable[[], Y]:
        recording, step = self.find(counts, by_halves=True), self.eager.step
        if recording is None:
            return self.eager.begin(counts)
        recording.rows.load(counts)
        recording.first()
        if counts.has_chunks:
            rows = self.eager.inputs.ship(counts)
            begun = step.alone(rows, recording.begun[0])
            return lambda: step.finish(rows, begun)
        return lambda: self._finish(counts, recording)

    def _finish(self, counts: StepCounts, recording: Recording[B, Y]) -> Y:
        if self._may_replay(counts) < Halves.EAGER:
            self.features.clear(counts)
            return recording.rest()
        return self.eager.step.finish(recording.rows.view(counts), recording.begun[0])

    def find(self, counts: StepCounts, *, by_halves: bool = False) -> Recording[B, Y] | None:
        """The smallest recording with room for the step; None: there is none."""
        if counts.any_scores:
            return None
        shapes = self._chunked if counts.has_chunks else self._sampling
        least = bisect_left(shapes, (counts.num_tokens,))
        fits = (self._recordings[shape] for shape in islice(shapes, least, None) if has_room(shape, counts))
        if counts.has_chunks:  # as many short rows as may be, for they are attended to as such
            return min(fits, key=lambda recording: order(recording.rows, counts), default=None)
        return next((found for found in fits if found.has_halves or not by_halves), None)

    def _may_replay(self, counts: StepCounts) -> Halves:
        """A row that samples with more than a temperature, or a feature, may ask for kernels of its own."""
        return counts.riders.halves if self.state.is_plain(counts.sampled_slots) else Halves.EAGER

    def measure(self) -> int:
        """Record the largest graphs, whose memory the others share, and forget them again."""
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        of_kind = {shape.samples_all: shape for shape in sorted(self.shapes)}  # the last of each
        self._capture(of_kind.values())
        num_bytes = torch.cuda.memory_reserved() - before
        for kind, largest in of_kind.items():
            kept = self.eager.step.num_bytes(self._recordings[largest].begun[0]) / largest.num_tokens
            others = (shape.num_tokens for shape in self.shapes if shape.samples_all is kind)
            num_bytes += int(kept * (sum(others) - largest.num_tokens))
        self._recordings.clear()
        self._sampling.clear()
        self._chunked.clear()
        return num_bytes

    def capture(self) -> None:
        """Record every shape, the largest first."""
        self._capture(self.shapes)

    @torch.inference_mode()
    def _capture(self, shapes: Iterable[StepShape]) -> None:
        record, slots = self._make_recorder(), self.eager.inputs.slots
        self.state.features[slots.spare] = Feature.RANDOM  # what is recorded draws; at 0 that is greedy
        for shape in sorted(shapes, reverse=True):
            rows = StaticRows(shape, slots.spare, slots.device)
            recording = self._recordings[shape] = Recording(rows, record, self.eager.step)
            if shape.samples_all and self.shapes[shape]:
                recording.record_halves(self.features.split_riders(shape.num_rows))
        self._sampling = sorted(shape for shape in self._recordings if shape.samples_all)
        self._chunked = sorted(shape for shape in self._recordings if not shape.samples_all)
        torch.cuda.empty_cache()  # of what ran before it was recorded


def has_room(shape: StepShape, counts: StepCounts) -> bool:
    """Is there a place for each row, token and logit, and do drafts follow if they are wanted?"""
    num_short = min(counts.num_leading(shape.max_query), shape.num_short)
    return (
        counts.num_tokens <= shape.num_tokens
        and counts.num_rows - num_short <= shape.num_chunks
        and counts.num_logits <= shape.num_logits
        and (shape.max_query > 1 or not counts.num_propose)
    )


def order(rows: StaticRows, counts: StepCounts) -> tuple[int, int, StepShape]:
    return rows.shape.num_tokens, -rows.num_short(counts), rows.shape


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
