"""Steps with prompt chunks, replayed: small ones take less time than launching their kernels.

A recording has room for some decodes, one token each and first, and for some chunks of any length behind
them.  What a step leaves of it is padding, so that it always has the same number of tokens: of the spare
slot, and written to block 0 alone.  It is replayed in two halves.  The forward serves every step that finds
room.  What follows it, sampling and drafts included, samples as many logits as there are rows, and serves
steps whose rows ask for nothing but a temperature; those of others see the step as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from pellucid.forward import MakeTiles
from pellucid.transfer import refill
from pellucid.worker.device_step import Begun, Forward
from pellucid.worker.inputs import StepCounts, StepRows, side_by_side, trailing
from pellucid.worker.results import Packed

# Tokens of a step, by how many of them may be decodes.  A few decodes are as often as not streams, for which
# prompts are cut into chunks of middle size, so that products have whole tiles (schedule/prefill_budget.py).
MIDDLE = (384, 512, 640, 768, 896, 1024, 1152, 1280, 1408, 1536, 1792, 2048, 2560)
ROOMS = {
    0: (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096),
    32: (96, 128, 192, 256, *MIDDLE),
    64: (128, 192, 256, *MIDDLE),
    256: (512, 768, 1024, 1280, 1792, 2304, 3328, 4352),
}
CHUNKS = 32  # of a recording, at most
# Tokens times bytes of weights beyond which the device takes longer than launching does.
WORTH_RECORDING = 35e12

T = TypeVar("T")
Finish = Callable[[StepRows, Begun], Packed]  # a step's second half


class Recorder(Protocol):
    """graphs.py."""

    def __call__(self, run: Callable[[], T]) -> Callable[[], T]: ...


class ChunkShape(NamedTuple):
    """What a recording has room for."""

    num_tokens: int
    num_decodes: int
    num_drafts: int = 0  # of a chunk that is a verification, and wanted of each row

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

    @property
    def num_logits(self) -> int:
        return self.num_rows * (1 + self.num_drafts)

    def num_tiles(self, tile_queries: int, *, all_wanted: bool) -> int:
        """Most tiles of so many queries that hold all queries of chunks, or those that are sampled."""
        whole = -(-self.num_chunked // tile_queries) + self.num_chunks + 1
        if all_wanted:
            return whole
        return min(whole, self.num_chunks * -(-(1 + self.num_drafts) // tile_queries))


def chunk_shapes(max_tokens: int, max_rows: int, num_drafts: int = 0) -> list[ChunkShape]:
    """What is worth recording, the largest first.

    max_tokens: of a step's chunks.  num_drafts: of a verification; where there are drafts no row decodes.
    """
    rooms = {0: ROOMS[0]} if num_drafts else ROOMS
    shapes = {
        ChunkShape(num_tokens, num_decodes, num_drafts)
        for most_decodes, sizes in rooms.items()
        for num_decodes in [min(most_decodes, max_rows)]
        for num_tokens in sizes
        if num_tokens - num_decodes <= max_tokens
    }
    return sorted(shapes, reverse=True)


class Bounds(StepCounts):
    """What the host knows of a recording: each chunk may have all tokens that are not decodes'."""

    @classmethod
    def of(cls, shape: ChunkShape, spare: int) -> Bounds:
        num_query = np.full(shape.num_rows, shape.num_chunked)
        num_query[: shape.num_decodes] = 1
        return cls(
            slots=np.full_like(num_query, spare),
            num_query=num_query,
            num_drafts=np.full_like(num_query, shape.num_drafts),
            num_sampled=np.full_like(num_query, 1 + shape.num_drafts),
            num_scores=np.zeros_like(num_query),
            num_propose=shape.num_drafts,
        )

    @property
    def num_tokens(self) -> int:
        num_decodes = int((self.num_query == 1).sum())
        return num_decodes + int(self.num_query[-1])


class TileMaps:
    """A recording's maps from tiles of queries to chunks, in buffers that are filled before each replay."""

    def __init__(self, shape: ChunkShape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        # By queries a tile, and whether all are wanted:
        self._maps: dict[tuple[int, bool], tuple[Tensor, MakeTiles]] = {}

    def get(self, tile_queries: int, make: MakeTiles, *, all_wanted: bool) -> Tensor:
        """The map [num_tiles, 2] for tiles of so many queries; what is over looks at padding."""
        key = tile_queries, all_wanted
        if key not in self._maps:
            self._maps[key] = self._padding(self.shape.num_tiles(tile_queries, all_wanted=all_wanted)), make
        return self._maps[key][0]

    def fill(self, query_lens: Sequence[int], num_sampled: Sequence[int]) -> None:
        """Bring in the chunks of the step that comes."""
        for (tile_queries, all_wanted), (buffer, make) in self._maps.items():
            tiles = make(query_lens, tile_queries, query_lens if all_wanted else num_sampled)
            whole = np.empty(buffer.shape, dtype=np.int32)
            whole[:] = self.shape.num_chunks, 0
            whole[: len(tiles)] = tiles
            refill(buffer, whole)

    def _padding(self, num_tiles: int) -> Tensor:
        row = torch.tensor([self.shape.num_chunks, 0], dtype=torch.int32)
        return row.expand(num_tiles, 2).contiguous().to(self.device)


class StaticChunks:
    """A recording's rows, in buffers that never move."""

    def __init__(self, shape: ChunkShape, spare: int, device: torch.device) -> None:
        assert shape.num_logits != shape.num_tokens, f"{shape}: not every token's logits are sampled"
        self.shape, self.spare = shape, spare
        self.tiles = TileMaps(shape, device)
        none = np.empty(0, dtype=np.int64)
        nobody = StepCounts(slots=none, num_query=none, num_drafts=none, num_sampled=none, num_scores=none)
        packed, places = self._arrange(nobody, none)
        self._packed = torch.from_numpy(packed).to(device)
        self._columns = {name: self._packed[place] for name, place in places.items()}

    def places(self, counts: StepCounts, num_decodes: int) -> np.ndarray:
        """Where a step's rows go, of which so many decode."""
        places = np.arange(counts.num_rows)
        places[num_decodes:] += self.shape.num_decodes - num_decodes
        return places

    def load(self, counts: StepCounts, places: np.ndarray) -> None:
        """Bring in the rows of a step."""
        refill(self._packed, self._arrange(counts, places)[0])
        is_chunk = places >= self.shape.num_decodes
        self.tiles.fill(counts.num_query[is_chunk].tolist(), counts.num_sampled[is_chunk].tolist())

    def _arrange(self, counts: StepCounts, places: np.ndarray) -> tuple[np.ndarray, dict[str, slice]]:
        """The rows among padding, of which the last row has all tokens and logits that nobody else has."""
        shape = self.shape

        def spread(values: np.ndarray, elsewhere: int = 0) -> np.ndarray:
            column = np.full(shape.num_rows, elsewhere, dtype=np.int64)
            column[places] = values
            return column

        num_query, num_sampled = spread(counts.num_query), spread(counts.num_sampled)
        padded, owned = num_query.copy(), num_sampled.copy()
        padded[: shape.num_decodes] = 1
        padded[-1] = shape.num_tokens - padded.sum()
        owned[-1] = shape.num_logits - owned.sum()
        ends = np.cumsum(padded)
        wanted, samples = np.zeros((2, shape.num_logits), dtype=np.int64)
        logit_slots = np.full(shape.num_logits, self.spare, dtype=np.int64)
        num_wanted = int(counts.num_sampled.sum())
        wanted[:num_wanted] = trailing(ends, num_sampled)
        logit_slots[:num_wanted] = np.repeat(counts.slots, counts.num_sampled)
        samples.view(np.bool_)[: shape.num_rows] = num_sampled > 0
        return side_by_side(
            slots=spread(counts.slots, self.spare),
            num_query=num_query,
            num_drafts=spread(counts.num_drafts),
            num_sampled=num_sampled,
            cu_query=np.append(0, ends),
            cu_logits=np.append(0, np.cumsum(owned)),
            logits_index=wanted,
            logit_slots=logit_slots,
            samples=samples,
        )

    def view(self) -> StepRows:
        """The rows; padding has tokens and logits, but its `num_query` says that it does not advance."""
        columns = self._columns
        return StepRows(
            counts=Bounds.of(self.shape, self.spare),
            slots=columns["slots"],
            num_query=columns["num_query"],
            num_drafts=columns["num_drafts"],
            num_sampled=columns["num_sampled"],
            cu_query=columns["cu_query"],
            cu_logits=columns["cu_logits"],
            logits_index=columns["logits_index"],
            score_index=columns["slots"][:0],
            score_slots=columns["slots"][:0],
        )

    @property
    def samples(self) -> Tensor:
        """[B] bool: which rows yield tokens."""
        return self._columns["samples"].view(torch.bool)[: self.shape.num_rows]

    @property
    def logit_slots(self) -> Tensor:
        """[S] int64, of padding the spare one."""
        return self._columns["logit_slots"]


class ChunkRecording:
    """The replays of a step of one shape: its forward, and what follows where that is plain."""

    def __init__(
        self, static: StaticChunks, record: Recorder, begin: Callable[[StaticChunks], Begun], finish: Finish
    ) -> None:
        rows = static.view()
        self.static, self._first = static, record(lambda: begin(static))
        self._begun = self._first()
        self._rest = record(lambda: finish(rows, self._begun))

    def first(self) -> Begun:
        """The forward of the rows that have been loaded."""
        self._begun = self._first()
        return self._begun

    def whole(self) -> Packed:
        """All of it; what it yields has as many rows as the recording."""
        self.first()
        return self._rest()


class ChunkForward(Forward):
    """A Forward that replays where there is a recording, and knows the replays of whole steps."""

    def __init__(
        self, forward: Forward, *, weight_bytes: int, max_tokens: int, max_rows: int, num_drafts: int = 0
    ) -> None:
        super().__init__(forward.model, forward.backend, forward.inputs, needs=forward.needs)
        longest = min(self.slots.max_len, max_tokens, int(WORTH_RECORDING / weight_bytes))
        self.shapes, self.num_drafts = chunk_shapes(longest, max_rows, num_drafts), num_drafts
        self._recordings: dict[ChunkShape, ChunkRecording] = {}

    def __call__(self, rows: StepRows) -> Begun:
        found = self.find(rows.counts)
        if found is None:
            return super().__call__(rows)
        recording, num_decodes = found
        counts, shape = rows.counts, recording.static.shape
        step = self.gather(rows)
        recording.static.load(counts, recording.static.places(counts, num_decodes))
        padded, hidden = recording.first()

        def without_padding(x: Tensor) -> Tensor:
            chunked = x[shape.num_decodes :][: counts.num_tokens - num_decodes]
            return torch.cat((x[:num_decodes], chunked))

        step.fwd.taps.update({name: without_padding(tap) for name, tap in padded.fwd.taps.items()})
        if len(hidden) == shape.num_tokens:  # never the number of logits
            return step, without_padding(hidden)
        return step, hidden[: counts.num_sampled.sum()]  # padding's are the last

    def step(self, counts: StepCounts) -> Packed | None:
        """Replay a step whose rows sample with nothing but a temperature; None: there is no recording."""
        if counts.num_propose != self.num_drafts:
            return None
        if (found := self.find(counts)) is None:
            return None
        recording, num_decodes = found
        places = recording.static.places(counts, num_decodes)
        recording.static.load(counts, places)
        return replace(recording.whole(), places=places)

    def find(self, counts: StepCounts) -> tuple[ChunkRecording, int] | None:
        """The smallest recording with room for the step; None: there is none.

        And how many of the step's decodes have their room; what is over is chunks of a token.
        """
        if not self._recordings or counts.uniform_query is not None or counts.num_scores.any():
            return None
        is_longer = (counts.num_query > 1) | (self.num_drafts > 0)
        num_decodes = int(is_longer.argmax()) if is_longer.any() else counts.num_rows

        def num_held(shape: ChunkShape) -> int:
            return min(num_decodes, shape.num_decodes)

        def has_room(shape: ChunkShape) -> bool:
            num_chunks, num_chunked = counts.num_rows - num_held(shape), counts.num_tokens - num_held(shape)
            return shape.num_chunks >= num_chunks and shape.num_chunked >= num_chunked

        fits = filter(has_room, self._recordings)
        shape = min(fits, key=lambda shape: (shape.num_tokens, -num_held(shape), shape), default=None)
        return None if shape is None else (self._recordings[shape], num_held(shape))

    def capture(self, record: Recorder, finish: Finish, *, only_largest: bool = False) -> None:
        """Record every shape.  finish: what follows the forward."""
        for shape in self.shapes[:1] if only_largest else self.shapes:
            static = StaticChunks(shape, self.slots.spare, self.slots.device)
            self._recordings[shape] = ChunkRecording(static, record, self._begin, finish)

    def kept_bytes(self) -> int:
        """Bytes that all recordings keep from one replay to the next, but for the largest, which is there."""
        if not self.shapes:
            return 0
        largest = self.shapes[0]
        step, hidden = self._recordings[largest].first()
        per_hidden = hidden.nbytes // len(hidden)
        per_token = sum(tap.nbytes // len(tap) for tap in step.fwd.taps.values())
        tables = sum(table.nbytes for table in step.fwd.block_tables)

        def kept(shape: ChunkShape) -> int:
            num_hidden = shape.num_tokens if len(hidden) == largest.num_tokens else shape.num_logits
            return per_hidden * num_hidden + per_token * shape.num_tokens + tables

        return sum(map(kept, self.shapes[1:]))

    def forget(self) -> None:
        """Give the recordings up."""
        self._recordings.clear()

    def _begin(self, static: StaticChunks) -> Begun:
        step = self.gather(static.view(), static.tiles)
        # Of logits that are padding, `gather` leaves whatever was there: slots and tokens must be some.
        step = replace(
            step,
            rows=replace(step.rows, samples=static.samples),
            logit_slots=static.logit_slots,
            logit_inputs=step.fwd.input_ids[step.fwd.logits_index],
        )
        return step, self.model(step.fwd)
