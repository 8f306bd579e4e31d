"""How a step's forward is run: as it is, or as a CUDA graph, recorded at start and replayed with one launch.

Graphs serve steps whose rows have one query each, padded to the next recorded number of rows; all else runs
as it is.  A padding row reads and writes page 0 alone.  Both give the same hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from pellucid.attention.base import AttentionBackend
from pellucid.forward import ForwardInput

Run = Callable[[], Tensor]
LARGEST = 512  # rows; beyond it launches no longer matter


class Forward(Protocol):
    """Runs the model on a step's input."""

    def __call__(self, fwd: ForwardInput) -> Tensor:
        """Hidden states [T, D]; valid until the next call."""
        ...

    def measure(self) -> int:
        """Bytes of device memory that `capture` will hold, beside what any step needs."""
        ...

    def capture(self) -> None:
        """Record whatever is to be recorded; the KV cache is in its place from now on."""
        ...


class EagerForward:
    """Kernel by kernel."""

    def __init__(self, model: Callable[[ForwardInput], Tensor], backend: AttentionBackend) -> None:
        self.model, self.backend = model, backend

    def __call__(self, fwd: ForwardInput) -> Tensor:
        fwd.attn = tuple(self.backend.plan(fwd, group) for group in range(len(fwd.block_tables)))
        return self.model(fwd)

    def measure(self) -> int:
        return 0

    def capture(self) -> None:
        """There is nothing to record."""


class StaticInput:
    """The input of a step of single queries, in buffers that never move, so a graph may read them again."""

    def __init__(self, max_rows: int, table_widths: tuple[int, ...], device: torch.device) -> None:
        def ints(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.max_rows = max_rows
        self.input_ids = ints(max_rows, dtype=torch.int32)
        self.positions = ints(max_rows)
        self.slots = ints(max_rows)
        self.seq_lens = ints(max_rows, dtype=torch.int32)
        self.block_tables = tuple(ints(max_rows, width, dtype=torch.int32) for width in table_widths)
        self.slot_mappings = tuple(ints(max_rows) for _ in table_widths)
        self.cu_seqlens_q = torch.arange(max_rows + 1, dtype=torch.int32, device=device)

    def load(self, fwd: ForwardInput, num_rows: int) -> None:
        """Copy a step in, and pad it to `num_rows`: token 0 at position 0, in page 0."""
        for buffer, value, padding in (
            (self.input_ids, fwd.input_ids, 0),
            (self.positions, fwd.positions, 0),
            (self.slots, fwd.slots, 0),
            (self.seq_lens, fwd.seq_lens, 1),
            *((mine, theirs, 0) for mine, theirs in zip(self.block_tables, fwd.block_tables, strict=True)),
            *((mine, theirs, 0) for mine, theirs in zip(self.slot_mappings, fwd.slot_mappings, strict=True)),
        ):
            buffer[: fwd.num_rows].copy_(value)
            if fwd.num_rows < num_rows:
                buffer[fwd.num_rows : num_rows].fill_(padding)

    def view(self, num_rows: int) -> ForwardInput:
        """The first rows, as the model sees them."""
        return ForwardInput(
            input_ids=self.input_ids[:num_rows],
            positions=self.positions[:num_rows],
            slots=self.slots[:num_rows],
            cu_seqlens_q=self.cu_seqlens_q[: num_rows + 1],
            seq_lens=self.seq_lens[:num_rows],
            block_tables=tuple(table[:num_rows] for table in self.block_tables),
            slot_mappings=tuple(mapping[:num_rows] for mapping in self.slot_mappings),
            logits_index=self.slots[:0],
            query_lens=[1] * num_rows,
            max_query=1,
        )


class GraphedForward:
    """Replays a recording where there is one for the step, and runs the step as it is where there is none.

    make_recorder: makes what turns a function that launches a forward on static input into its replay.
    """

    def __init__(
        self, eager: EagerForward, static: StaticInput, make_recorder: Callable[[], Callable[[Run], Run]]
    ) -> None:
        self.eager, self.static, self._make_recorder = eager, static, make_recorder
        self._replays: dict[int, Run] = {}  # by rows

    def __call__(self, fwd: ForwardInput) -> Tensor:
        num_rows = self.num_rows_for(fwd)
        if num_rows is None:
            return self.eager(fwd)
        self.static.load(fwd, num_rows)
        return self._replays[num_rows]()[: fwd.num_rows]

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
        for num_rows in sorted(sizes, reverse=True):
            self.static.load(self.static.view(0), num_rows)  # all padding
            fwd = self.static.view(num_rows)
            self._replays[num_rows] = record(lambda fwd=fwd: self.eager(fwd))

    def num_rows_for(self, fwd: ForwardInput) -> int | None:
        """The rows of the recording that serves this step."""
        if fwd.max_query != 1 or fwd.tree is not None:
            return None
        return min((n for n in self._replays if n >= fwd.num_rows), default=None)


def bucket_sizes(max_rows: int) -> list[int]:
    """Numbers of rows to record: few, and so that padding wastes little."""
    sizes = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, LARGEST]
    return [n for n in sizes if n < max_rows] + [max_rows]


class CudaRecorder:
    """Records CUDA graphs that share one memory pool, since only one runs at a time; it dies with them."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        run()  # compiles and loads what it needs; nothing of that may happen while recording
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Of this thread alone: NCCL asks for its events from another one.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            hidden = run()

        def replay() -> Tensor:
            graph.replay()
            return hidden

        return replay
