"""The forward of steps with prompt chunks, replayed: small ones take less time than launching their kernels.

A recording has room for some decodes, one token each and first, and for some chunks of any length behind
them.  What a step leaves of it is padding, so that it always has the same number of tokens: of the spare
slot, and written to page 0 alone.  Only the forward is recorded; what comes before and behind it, which
depends on who samples and how, sees the step as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pellucid.forward import MakeTiles
from pellucid.transfer import upload
from pellucid.worker.device_step import Begun, Forward
from pellucid.worker.inputs import StepCounts, StepRows

CHUNKED = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)  # tokens of all chunks
DECODES = (0, 64, 256)
CHUNKS = 32  # of a recording, at most
# Tokens times bytes of weights beyond which the device takes longer than launching does.
WORTH_RECORDING = 35e12

Outputs = tuple[Tensor, dict[str, Tensor]]  # hidden states [T, D], and what a proposer taps
Recorder = Callable[[Callable[[], Outputs]], Callable[[], Outputs]]


class ChunkShape(NamedTuple):
    """What a recording has room for."""

    num_tokens: int
    num_decodes: int

    @property
    def num_chunks(self) -> int:
        return min(CHUNKS, self.num_chunked // 8)

    @property
    def num_chunked(self) -> int:
        """Tokens of chunks."""
        return self.num_tokens - self.num_decodes

    @property
    def num_rows(self) -> int:
        """The last one is of padding."""
        return self.num_decodes + self.num_chunks + 1


def chunk_shapes(max_tokens: int, max_rows: int) -> list[ChunkShape]:
    """What is worth recording, the largest first; at least half of a step's tokens are those of chunks.

    max_tokens: of a step's chunks.
    """
    decodes = [n for n in DECODES if n < max_rows] + [min(max_rows, DECODES[-1])]
    shapes = [ChunkShape(n + d, d) for n in CHUNKED if n <= max_tokens for d in decodes if d <= n]
    return sorted(shapes, reverse=True)


class Bounds(StepCounts):
    """What the host knows of a recording: each chunk may have all tokens that are not decodes'."""

    @classmethod
    def of(cls, shape: ChunkShape, spare: int) -> Bounds:
        num_query = np.full(shape.num_rows, shape.num_tokens - shape.num_decodes)
        num_query[: shape.num_decodes] = 1
        none = np.zeros_like(num_query)
        slots = np.full_like(num_query, spare)
        return cls(slots=slots, num_query=num_query, num_drafts=none, num_sampled=none, num_scores=none)

    @property
    def num_tokens(self) -> int:
        num_decodes = int((self.num_query == 1).sum())
        return num_decodes + int(self.num_query[-1])


class TileMaps:
    """A recording's maps from tiles of queries to chunks, in buffers that are filled before each replay."""

    def __init__(self, shape: ChunkShape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self._maps: dict[int, tuple[Tensor, MakeTiles]] = {}  # by queries a tile

    def get(self, tile_queries: int, make: MakeTiles) -> Tensor:
        """The map [num_tiles, 2] for tiles of so many queries; what is over looks at padding."""
        if tile_queries not in self._maps:
            num_tokens = self.shape.num_tokens - self.shape.num_decodes
            num_tiles = -(-num_tokens // tile_queries) + self.shape.num_chunks + 1
            self._maps[tile_queries] = self._padding(num_tiles), make
        return self._maps[tile_queries][0]

    def fill(self, query_lens: Sequence[int]) -> None:
        """Bring in the chunks of the step that comes."""
        for tile_queries, (buffer, make) in self._maps.items():
            tiles = make(query_lens, tile_queries)
            whole = np.empty(buffer.shape, dtype=np.int32)
            whole[:] = self.shape.num_chunks, 0
            whole[: len(tiles)] = tiles
            buffer.copy_(upload(whole, self.device))

    def _padding(self, num_tiles: int) -> Tensor:
        row = torch.tensor([self.shape.num_chunks, 0], dtype=torch.int32)
        return row.expand(num_tiles, 2).contiguous().to(self.device)


class StaticChunks:
    """A recording's rows, in buffers that never move."""

    def __init__(self, shape: ChunkShape, spare: int, device: torch.device) -> None:
        self.shape, self.spare, self.device = shape, spare, device
        self.tiles = TileMaps(shape, device)
        width = shape.num_rows + 2 & ~1  # so that each column begins at a multiple of 16 bytes
        self._packed = torch.zeros(3, width, dtype=torch.int64, device=device)
        self.load(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), num_decodes=0)

    def load(self, slots: np.ndarray, num_query: np.ndarray, *, num_decodes: int) -> None:
        """Bring in the rows of a step, of which the first ones are decodes."""
        shape, packed = self.shape, np.zeros(self._packed.shape, dtype=np.int64)
        num_chunks = len(slots) - num_decodes
        chunks = slice(shape.num_decodes, shape.num_decodes + num_chunks)
        all_slots, all_query, ends = packed
        all_slots[:] = self.spare
        all_slots[:num_decodes], all_slots[chunks] = slots[:num_decodes], slots[num_decodes:]
        all_query[: shape.num_decodes] = 1
        all_query[chunks] = num_query[num_decodes:]
        all_query[shape.num_rows - 1] = shape.num_tokens - all_query.sum()
        np.cumsum(all_query[: shape.num_rows], out=ends[1 : shape.num_rows + 1])
        self._packed.copy_(upload(packed, self.device))
        self.tiles.fill(num_query[num_decodes:].tolist())

    def view(self) -> StepRows:
        """The rows, for a forward that samples nothing."""
        num_rows = self.shape.num_rows
        slots, num_query, ends = self._packed
        nothing = torch.zeros(num_rows + 1, dtype=torch.int64, device=self.device)
        return StepRows(
            counts=Bounds.of(self.shape, self.spare),
            slots=slots[:num_rows],
            num_query=num_query[:num_rows],
            num_drafts=nothing[:num_rows],
            num_sampled=nothing[:num_rows],
            cu_query=ends[: num_rows + 1],
            cu_logits=nothing,
            logits_index=nothing[:0],
            score_index=nothing[:0],
            score_slots=nothing[:0],
        )


@dataclass(frozen=True, slots=True)
class ChunkRecording:
    """A forward of one shape."""

    static: StaticChunks
    replay: Callable[[], Outputs]


class ChunkForward(Forward):
    """A Forward that replays where there is a recording."""

    def __init__(self, forward: Forward, *, weight_bytes: int, max_tokens: int, max_rows: int) -> None:
        super().__init__(forward.model, forward.backend, forward.inputs)
        longest = min(self.slots.max_len, max_tokens, int(WORTH_RECORDING / weight_bytes))
        self.shapes = chunk_shapes(longest, max_rows)
        self._recordings: dict[ChunkShape, ChunkRecording] = {}

    def __call__(self, rows: StepRows) -> Begun:
        found = self.find(rows.counts)
        if found is None:
            return super().__call__(rows)
        recording, num_decodes = found
        counts, shape = rows.counts, recording.static.shape
        step = self.gather(rows)
        recording.static.load(counts.slots, counts.num_query, num_decodes=num_decodes)
        hidden, taps = recording.replay()

        def without_padding(x: Tensor) -> Tensor:
            chunked = x[shape.num_decodes :][: counts.num_tokens - num_decodes]
            return torch.cat((x[:num_decodes], chunked))

        step.fwd.taps.update({name: without_padding(tap) for name, tap in taps.items()})
        return step, without_padding(hidden)

    def find(self, counts: StepCounts) -> tuple[ChunkRecording, int] | None:
        """The smallest recording with room for the step, and the step's decodes; None: there is none."""
        if not self._recordings or counts.uniform_query is not None:
            return None
        is_longer = (counts.num_query > 1) | (counts.num_drafts > 0)
        num_decodes = int(is_longer.argmax()) if is_longer.any() else counts.num_rows
        num_chunks, num_chunked = counts.num_rows - num_decodes, counts.num_tokens - num_decodes

        def has_room(shape: ChunkShape) -> bool:
            rows = shape.num_decodes >= num_decodes and shape.num_chunks >= num_chunks
            return rows and shape.num_chunked >= num_chunked

        shape = min(filter(has_room, self._recordings), default=None)
        return None if shape is None else (self._recordings[shape], num_decodes)

    def capture(self, record: Recorder, *, only_largest: bool = False) -> None:
        for shape in self.shapes[:1] if only_largest else self.shapes:
            static = StaticChunks(shape, self.slots.spare, self.slots.device)
            self._recordings[shape] = ChunkRecording(static, record(lambda static=static: self._run(static)))

    def forget(self) -> None:
        """Give the recordings up."""
        self._recordings.clear()

    def _run(self, static: StaticChunks) -> Outputs:
        step = self.gather(static.view(), static.tiles)
        return self.model(step.fwd), step.fwd.taps
