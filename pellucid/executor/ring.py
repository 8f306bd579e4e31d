"""A ring in shared memory: one process writes messages, several read all of them, in the same order.

A message fills one slot or several.  Every reader has a pipe for a bell, with a byte in it for each slot that
was written: a reader without messages sleeps in the system, and learns there that the writer has gone.

The memory has no name: multiprocessing unlinks its file before it hands it out (and puts it elsewhere if
/dev/shm is too small), so two rings never meet and none is left behind, however a process ends.

Python cannot ask for an order of memory.  It comes from the bell, whose two ends take the same lock in the
kernel: what was written before a byte went in is seen once it is out.  In the other direction, a reader gives
a slot back only after the bell for the next one, when its last look at the slot is long over.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from ctypes import Array, c_char, c_int64
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext

NUM_SLOTS = 64  # many times the plans that are ever under way
SLOT_BYTES = 1 << 16  # a steady plan of 256 rows takes 3 KB, a prompt of 100,000 tokens 0.5 MB


@dataclass(frozen=True, slots=True, kw_only=True)
class RingMemory:
    """What all processes of a ring share."""

    taken: Array[c_int64]  # per reader: the slots that it has given back, ever
    lengths: Array[c_int64]  # per slot: bytes of its message from here on
    data: Array[c_char]  # the slots, side by side

    @property
    def num_slots(self) -> int:
        return len(self.lengths)

    @property
    def slot_bytes(self) -> int:
        return len(self.data) // len(self.lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderEnd:
    """A reader's end of a ring, to hand to its process."""

    memory: RingMemory
    index: int
    bell: Connection


class RingWriter:
    """The writing end.  `ends` are for the readers."""

    def __init__(
        self,
        context: SpawnContext,
        num_readers: int,
        *,
        num_slots: int = NUM_SLOTS,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        assert num_slots >= 2, "a reader holds on to a slot until the next one is written"
        self._memory = RingMemory(
            taken=context.RawArray(c_int64, num_readers),
            lengths=context.RawArray(c_int64, num_slots),
            data=context.RawArray(c_char, num_slots * slot_bytes),
        )
        pipes = [context.Pipe(duplex=False) for _ in range(num_readers)]
        self._bells = [theirs for _, theirs in pipes]
        self.ends = [ReaderEnd(memory=self._memory, index=i, bell=bell) for i, (bell, _) in enumerate(pipes)]
        self._taken, self._lengths, self._data = _views(self._memory)
        self._num_written = 0  # slots, ever

    @property
    def is_full(self) -> bool:
        """Does some reader still hold the slot that is next?"""
        return self._num_written - min(self._taken) >= self._memory.num_slots

    def write(self, message: bytes, wait_for_room: Callable[[], None]) -> None:
        """Hand a message to all readers.

        wait_for_room: called for as long as the ring is full; what it raises ends the ring, for the readers
        have then seen a part of the message.
        """
        num_slots, slot_bytes = self._memory.num_slots, self._memory.slot_bytes
        for start in range(0, len(message), slot_bytes):
            while self.is_full:
                wait_for_room()
            slot = self._num_written % num_slots
            piece = message[start : start + slot_bytes]
            self._data[slot * slot_bytes : slot * slot_bytes + len(piece)] = piece
            self._lengths[slot] = len(message) - start
            self._num_written += 1
            self._ring_bells()

    def _ring_bells(self) -> None:
        for bell in self._bells:
            try:
                os.write(bell.fileno(), b"\0")  # never waits: a pipe holds more bytes than the ring has slots
            except BrokenPipeError:
                continue  # a reader that has died is found by whoever watches its process


class RingReader:
    """A reading end, in its own process."""

    def __init__(self, end: ReaderEnd) -> None:
        self._memory, self._index, self._bell = end.memory, end.index, end.bell
        self._taken, self._lengths, self._data = _views(end.memory)
        self._num_read = 0  # slots, ever

    def read(self) -> bytes:
        """Wait for the next message.  Raises EOFError if the writer has gone."""
        slot_bytes, pieces = self._memory.slot_bytes, list[bytes]()
        while True:
            if not os.read(self._bell.fileno(), 1):
                raise EOFError("the ring's writer has gone")
            self._taken[self._index] = self._num_read
            slot = self._num_read % self._memory.num_slots
            left = self._lengths[slot]
            first = slot * slot_bytes
            pieces.append(bytes(self._data[first : first + min(left, slot_bytes)]))
            self._num_read += 1
            if left <= slot_bytes:
                return b"".join(pieces)


def _views(memory: RingMemory) -> tuple[memoryview[int], memoryview[int], memoryview[int]]:
    """Native 8-byte integers, which are written at once, for the counters; bytes for the slots."""
    taken, lengths = (memoryview(numbers).cast("B").cast("q") for numbers in (memory.taken, memory.lengths))
    return taken, lengths, memoryview(memory.data).cast("B")
