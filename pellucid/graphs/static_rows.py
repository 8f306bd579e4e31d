"""A recorded step's rows, in buffers that never move, and that are filled before each replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pellucid.features.worker import NO_RIDERS, Riders
from pellucid.forward import MakeTiles
from pellucid.graphs.shapes import StepShape
from pellucid.rows import StepRows
from pellucid.transfer import refill
from pellucid.worker.inputs import StepCounts, side_by_side, trailing


class RecordedTiles:
    """A recording's maps from tiles of queries to chunks, in buffers that are filled before each replay."""

    def __init__(self, shape: StepShape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        # By queries a tile, and whether all are wanted:
        self._maps: dict[tuple[int, bool], tuple[Tensor, MakeTiles]] = {}

    def get(self, tile_queries: int, make: MakeTiles, *, all_wanted: bool) -> Tensor:
        """The map [num_tiles, 2] for tiles of so many queries; what is over looks at the empty row."""
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


class StaticRows:
    """The rows of one shape."""

    def __init__(self, shape: StepShape, spare: int, device: torch.device) -> None:
        self.shape, self.spare = shape, spare
        self.tiles = RecordedTiles(shape, device) if shape.num_chunks else None
        nobody = self.padded(StepCounts.uniform(np.empty(0, dtype=np.int64), 1))
        self._slots = self._loaded = nobody.slots  # of the decodes that have been loaded; the same unpadded
        packed, places = self._arrange(nobody)
        whole = torch.from_numpy(packed).to(device)
        self._columns = {name: whole[place] for name, place in places.items()}
        # Of decodes only the slots change: each row has a token, padding's too.
        self._packed = self._columns["slots"] if shape.is_plain else whole

    def places(self, counts: StepCounts) -> np.ndarray:
        """Where a step's rows go: those that are short first."""
        places = np.arange(counts.num_rows)
        num_short = self.num_short(counts)
        places[num_short:] += self.shape.num_short - num_short
        return places

    def num_short(self, counts: StepCounts) -> int:
        """How many of the first rows are short and have their places; what is over is chunks."""
        return min(counts.num_leading(self.shape.max_query), self.shape.num_short)

    def load(self, counts: StepCounts) -> None:
        """Bring in the rows of a step."""
        if self.shape.is_plain:
            return self._load_decodes(counts.slots)
        places = self.places(counts)
        refill(self._packed, self._arrange(self.padded(counts, places))[0])
        if self.tiles is not None:
            is_chunk = places >= self.shape.num_short
            self.tiles.fill(counts.num_query[is_chunk].tolist(), counts.num_sampled[is_chunk].tolist())

    def _load_decodes(self, slots: np.ndarray) -> None:
        """If they are others than those of the last step."""
        if slots is self._loaded:
            return
        self._loaded, num_rows = slots, len(slots)
        is_padded = np.count_nonzero(self._slots[num_rows:] != self.spare) == 0
        if is_padded and np.array_equal(self._slots[:num_rows], slots):
            return
        self._slots = np.full(self.shape.num_rows, self.spare)
        self._slots[:num_rows] = slots
        refill(self._packed, self._slots)

    def padded(self, counts: StepCounts, places: np.ndarray | None = None) -> StepCounts:
        """The same with as many rows as the shape, of which padding has no tokens."""
        at = np.arange(counts.num_rows) if places is None else places

        def spread(values: np.ndarray, elsewhere: int = 0) -> np.ndarray:
            column = np.full(self.shape.num_rows, elsewhere, dtype=np.int64)
            column[at] = values
            return column

        return replace(
            counts,
            slots=spread(counts.slots, self.spare),
            num_query=spread(counts.num_query),
            num_drafts=spread(counts.num_drafts),
            num_sampled=spread(counts.num_sampled),
            num_scores=spread(counts.num_scores),
        )

    def _arrange(self, counts: StepCounts) -> tuple[np.ndarray, dict[str, slice]]:
        """All that the device is to know of padded rows."""
        shape = self.shape
        if shape.is_plain:
            counts = StepCounts.uniform(counts.slots, 1)
        ends = np.cumsum(counts.num_query)
        index = np.arange(shape.num_logits)
        if not shape.samples_all:
            wanted = trailing(ends, counts.num_sampled)
            index = np.zeros(shape.num_logits, dtype=np.int64)
            index[: len(wanted)] = wanted
        return side_by_side(
            slots=counts.slots,
            num_query=counts.num_query,
            num_drafts=counts.num_drafts,
            num_sampled=counts.num_sampled,
            cu_query=np.append(0, ends),
            cu_logits=np.append(0, np.cumsum(counts.num_sampled)),
            logits_index=index,
        )

    def view(self, counts: StepCounts | None = None, riders: Riders = NO_RIDERS) -> StepRows:
        """The rows.  counts: of the step that has been loaded; None: all that the host knows are bounds."""
        none = self._columns["slots"][:0]
        return StepRows(
            counts=self._bounds(riders) if counts is None else self.padded(counts),
            num_tokens=self.shape.num_tokens,
            score_index=none,
            score_slots=none,
            **self._columns,
        )

    def _bounds(self, riders: Riders) -> StepCounts:
        shape = self.shape
        most = np.full(shape.num_rows, shape.max_query)
        num_query = most.copy()
        if not shape.samples_all:
            num_query[shape.num_short :] = shape.num_tokens
        return StepCounts(
            slots=np.full_like(most, self.spare),
            num_query=num_query,
            num_drafts=most - 1,
            num_sampled=most,
            num_scores=np.zeros_like(most),
            num_propose=shape.max_query - 1,
            riders=riders,
        )
