"""How a step is launched: kernel by kernel, or as a CUDA graph, recorded at start and replayed in one go.

A graph holds the whole of a DeviceStep: gathering inputs from the slots, the forward, sampling, advancing the
slots, drafting.  Graphs serve steps whose rows all have the same number of queries and sample with nothing
but a temperature, padded to the next recorded number of rows; all else is launched kernel by kernel.  A
padding row is the spare slot, with no room for a token; it reads and writes page 0 alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

from pellucid.sample.state import Feature, SamplingState
from pellucid.transfer import upload
from pellucid.worker.inputs import InputBuilder, StepCounts, StepRows

Y = TypeVar("Y")  # what a step yields, on the device
Y_co = TypeVar("Y_co", covariant=True)
Run = Callable[[], Y]
LARGEST = 512  # rows; beyond it launches no longer matter


class Launcher(Protocol[Y_co]):
    """Runs the device's part of a step."""

    def __call__(self, counts: StepCounts) -> Y_co:
        """The step's yield, on the device; valid until the next call."""
        ...

    def measure(self) -> int:
        """Bytes of device memory that `capture` will hold, beside what any step needs."""
        ...

    def capture(self) -> None:
        """Record whatever is to be recorded; the KV cache is in its place from now on."""
        ...


class EagerLauncher(Generic[Y]):
    """Kernel by kernel."""

    def __init__(self, step: Callable[[StepRows], Y], inputs: InputBuilder) -> None:
        self.step, self.inputs = step, inputs

    def __call__(self, counts: StepCounts) -> Y:
        return self.step(self.inputs.ship(counts))

    def measure(self) -> int:
        return 0

    def capture(self) -> None:
        """There is nothing to record."""


class StaticRows:
    """Rows of `num_query` queries each, in buffers that never move, so a graph may read them again."""

    def __init__(self, max_rows: int, num_query: int, spare: int, device: torch.device) -> None:
        self.max_rows, self.num_query, self.spare, self.device = max_rows, num_query, spare, device
        self._host = np.full(max_rows, spare, dtype=np.int64)
        self._slots = torch.full((max_rows,), spare, dtype=torch.int64, device=device)
        self._num_query = torch.full_like(self._slots, num_query)
        self._num_drafts = torch.full_like(self._slots, num_query - 1)
        self._tokens = torch.arange(max_rows * num_query, device=device)
        self._cu_query = torch.arange(max_rows + 1, device=device) * num_query

    def load(self, slots: np.ndarray, num_rows: int) -> None:
        """Bring the rows' slots to the device, padded to `num_rows`, if they are not the last step's."""
        wanted = np.full(num_rows, self.spare, dtype=np.int64)
        wanted[: len(slots)] = slots
        if not np.array_equal(wanted, self._host[:num_rows]):
            self._host[:num_rows] = wanted
            self._slots[:num_rows].copy_(upload(wanted, self.device))

    def view(self, num_rows: int) -> StepRows:
        """The first rows; what the host knows of them holds for padding."""
        slots, num_tokens = self._slots[:num_rows], num_rows * self.num_query
        return StepRows(
            counts=StepCounts.uniform(np.full(num_rows, self.spare), self.num_query),
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


class GraphLauncher(Generic[Y]):
    """Replays a recording where there is one for the step; launches kernels one by one where there is none.

    make_recorder: makes what turns a function that launches a step on static rows into its replay.
    """

    def __init__(
        self, eager: EagerLauncher[Y], static: StaticRows, state: SamplingState,
        make_recorder: Callable[[], Callable[[Run[Y]], Run[Y]]],
    ) -> None:  # fmt: skip
        self.eager, self.static, self.state, self._make_recorder = eager, static, state, make_recorder
        self._replays: dict[int, Run[Y]] = {}  # by rows

    def __call__(self, counts: StepCounts) -> Y:
        num_rows = self.num_rows_for(counts)
        if num_rows is None:
            return self.eager(counts)
        self.static.load(counts.slots, num_rows)
        return self._replays[num_rows]()

    def num_rows_for(self, counts: StepCounts) -> int | None:
        """The rows of the recording that serves this step."""
        if counts.uniform_query != self.static.num_query or counts.num_propose != self.static.num_query - 1:
            return None
        if self.state.features_of(counts.slots) & ~Feature.RANDOM:
            return None
        return min((n for n in self._replays if n >= counts.num_rows), default=None)

    def measure(self) -> int:
        """Record the largest graph, whose memory the others share, and forget it again."""
        before = torch.cuda.memory_reserved()
        self._capture([self.static.max_rows])
        num_bytes = torch.cuda.memory_reserved() - before
        self._replays.clear()
        return num_bytes

    def capture(self) -> None:
        """Record every number of rows worth recording, the largest first."""
        self._capture(bucket_sizes(self.static.max_rows))

    @torch.inference_mode()
    def _capture(self, sizes: list[int]) -> None:
        record = self._make_recorder()
        self.state.features[self.static.spare] = Feature.RANDOM  # what is recorded draws; at 0 that is greedy
        self.static.load(np.empty(0, dtype=np.int64), self.static.max_rows)
        for num_rows in sorted(sizes, reverse=True):
            rows = self.static.view(num_rows)
            self._replays[num_rows] = record(lambda rows=rows: self.eager.step(rows))


def bucket_sizes(max_rows: int) -> list[int]:
    """Numbers of rows to record: few, and so that padding wastes little."""
    sizes = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, LARGEST]
    return [n for n in sizes if n < max_rows] + [max_rows]


class CudaRecorder:
    """Records CUDA graphs that share one memory pool, since only one runs at a time; it dies with them."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run[Y]) -> Run[Y]:
        run()  # compiles and loads what it needs; nothing of that may happen while recording
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Of this thread alone: NCCL asks for its events from another one.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            yielded = run()

        def replay() -> Y:
            graph.replay()
            return yielded

        return replay
