"""How a step is launched: kernel by kernel, or as a CUDA graph, recorded at start and replayed in one go.

What is recorded is a DeviceStep on rows that never move (static_rows.py), for each of a lattice of shapes
(shapes.py): gathering inputs from the slots, the forward, sampling, advancing the slots, drafting.  A step is
padded to the smallest shape with room.  One graph holds the whole of it, for rows that sample with no more
than a temperature.  Two more hold its halves: the forward, behind which other rows sample kernel by kernel,
and what follows it with the features that change logits.  Steps with prompt chunks have the halves alone, the
second one without features.  Whatever is not recorded is launched kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import cache
from typing import Generic, Protocol, TypeVar

import torch

from pellucid.features.base import Halves
from pellucid.features.worker import NO_RIDERS, WorkerFeatures
from pellucid.graphs.recordings import B, Recorder, Recording, Recordings, Run, Step, T, Y
from pellucid.graphs.shapes import StepShape
from pellucid.graphs.static_rows import StaticRows
from pellucid.sample.state import SamplingState, Trait
from pellucid.worker.inputs import InputBuilder, StepCounts

Y_co = TypeVar("Y_co", covariant=True)


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

    def forget(self) -> None:
        """Let go of all recordings: what they know of addresses will not be true any more."""
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

    def forget(self) -> None:
        """There are no recordings."""


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
        # By the bits of features that change what the forward sees: none, and perhaps all of them.
        self._recordings: dict[int, Recordings[B, Y]] = {}
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
        recordings = self._recordings.get(counts.riders.bits & self.features.forward_bits)
        if counts.common is not None:
            shape = counts.common.shape
            return None if recordings is None or shape is None else recordings[shape]
        return None if recordings is None else recordings.find(counts, by_halves=by_halves)

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
            others = (shape.num_tokens for shape in self.shapes if shape.samples_all is kind)
            num_others = sum(others) - largest.num_tokens
            for recordings in self._recordings.values():
                kept = self.eager.step.num_bytes(recordings[largest].begun[0]) / largest.num_tokens
                num_bytes += int(kept * num_others)
        self._recordings.clear()
        return num_bytes

    def capture(self) -> None:
        """Record every shape, the largest first."""
        self._capture(self.shapes)

    def forget(self) -> None:
        self._recordings.clear()

    @torch.inference_mode()
    def _capture(self, shapes: Iterable[StepShape]) -> None:
        record, slots = self._make_recorder(), self.eager.inputs.slots
        self.state.traits[slots.spare] = Trait.RANDOM  # what is recorded draws; at 0 that is greedy
        for bits in {0, self.features.forward_bits}:
            recordings = {
                shape: self._record(shape, record, has_forward=bits > 0)
                for shape in sorted(shapes, reverse=True)
            }
            self._recordings[bits] = Recordings(recordings)
        torch.cuda.empty_cache()  # of what ran before it was recorded

    def _record(self, shape: StepShape, record: Recorder, *, has_forward: bool) -> Recording[B, Y]:
        """has_forward: with what features change of the forward."""
        slots, features = self.eager.inputs.slots, self.features
        forward = features.forward_riders(shape.num_rows) if has_forward else NO_RIDERS
        recording = Recording(StaticRows(shape, slots.spare, slots.device), record, self.eager.step, forward)
        if shape.samples_all and self.shapes[shape]:
            recording.record_halves(features.split_riders(shape.num_rows))
        return recording


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
