"""Per-slot tables of what only some requests bring: token lists of any length, biases over the vocabulary.

Both start empty and grow when a request needs more, so an engine that never sees them pays nothing.  They
hold data; what it means for the logits is in edits.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from pellucid.transfer import upload


class SlotTable:
    """Token ids per slot, padded with -1: `data` is [num_slots, *inner] int32; inner grows by doubling."""

    def __init__(self, num_slots: int, ndim: int, device: torch.device) -> None:
        self.data = torch.full((num_slots, *[1] * ndim), -1, dtype=torch.int32, device=device)

    def write(self, slot: int, values: np.ndarray) -> None:
        """Replace the slot's row by `values`, int32 with `ndim` dimensions, padded with -1 where ragged."""
        self._grow(values.shape)
        row = self.data[slot]
        row.fill_(-1)
        row[tuple(slice(n) for n in values.shape)] = upload(values.astype(np.int32), self.data.device)

    def _grow(self, shape: tuple[int, ...]) -> None:
        old = self.data
        inner = [max(have, _power_of_two(need)) for have, need in zip(old.shape[1:], shape, strict=True)]
        if inner == list(old.shape[1:]):
            return
        self.data = torch.full((old.shape[0], *inner), -1, dtype=torch.int32, device=old.device)
        self.data[tuple(slice(n) for n in old.shape)] = old


class BiasPool:
    """Dense biases: one row of [V] float32 for each slot that wants one, -inf where a token is forbidden.

    `data` is [capacity, V] and doubles; a row goes back to the pool when its slot is admitted without a bias.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.data = torch.empty((0, vocab_size), dtype=torch.float32, device=device)
        self._row_of_slot: dict[int, int] = {}
        self._free: list[int] = []

    def write(self, slot: int, bias: Mapping[int, float], allowed: Sequence[int] | None) -> int:
        """Give `slot` a row: `bias` of some tokens, -inf of all that are not `allowed`.  Return its index."""
        if slot not in self._row_of_slot:
            self._row_of_slot[slot] = self._take_row()
        index = self._row_of_slot[slot]
        row, device = self.data[index], self.data.device
        if allowed is None:
            row.zero_()
        else:
            row.fill_(-float("inf"))
            row.index_fill_(0, upload(np.array(allowed, np.int64), device), 0.0)
        if bias:
            ids = upload(np.fromiter(bias.keys(), np.int64), device)
            row.index_add_(0, ids, upload(np.fromiter(bias.values(), np.float32), device))
        return index

    def release(self, slot: int) -> None:
        """Take the slot's row back, if it has one."""
        row = self._row_of_slot.pop(slot, None)
        if row is not None:
            self._free.append(row)

    def _take_row(self) -> int:
        if not self._free:
            capacity, vocab_size = self.data.shape
            more = max(1, capacity)
            self.data = torch.cat([self.data, self.data.new_empty((more, vocab_size))])
            self._free = list(range(capacity + more - 1, capacity - 1, -1))
        return self._free.pop()


def pad(rows: Sequence[Sequence[int]]) -> np.ndarray:
    """[len(rows), longest] int32 of ragged rows, -1 where a row has ended."""
    table = np.full((len(rows), max(map(len, rows), default=0)), -1, np.int32)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    return table


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
