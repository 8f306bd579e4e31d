"""Memory that pages lie in for other engines, as one process has it, as long as somebody needs it there."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

logger = logging.getLogger(__name__)
PORTABLE = 1  # cudaHostRegisterPortable


class Memory(Protocol):
    """Places for pages.  Copies are begun on the current stream; who asks for them waits for that."""

    def read(self, places: Sequence[int], pages: Tensor, rows: Sequence[int]) -> None:
        """From these places into these rows of pages [num_pages, page_bytes]."""
        ...

    def write(self, places: Sequence[int], pages: Tensor, rows: Sequence[int]) -> None:
        """From these rows to these places."""
        ...

    def close(self) -> None:
        """Nobody uses it here any more."""
        ...


class Way(Protocol):
    """How ranks share memory that is not the lender's process's; made of the tensor of all pages."""

    def take(self, num_places: int, stride: int) -> tuple[Memory, bytes]:
        """Memory to lend from, and its address for readers.  stride: bytes of a place.

        Raises OSError if there is not as much.
        """
        ...

    def open(self, address: bytes) -> Memory:
        """Another rank's.  Raises OSError if it cannot be reached from here."""
        ...

    def close(self) -> None:
        """Behind all memory of this way."""
        ...


# By name: made of a worker's pages.
WAYS = {
    "cuda": "pellucid.connectors.peer.device:CudaHandles",
    "nixl": "pellucid.connectors.peer.nixl:Nixl",
}


class TensorMemory:
    """A tensor of bytes [places, stride]; one of the host is pinned if asked for.  at_end: see `close`."""

    def __init__(
        self, tensor: Tensor, *, pins: bool = False, at_end: Callable[[], None] = lambda: None
    ) -> None:
        self.tensor, self._at_end = tensor, at_end
        self.is_pinned = pins and self._pin()

    def read(self, places: Sequence[int], pages: Tensor, rows: Sequence[int]) -> None:
        size = pages.shape[1]
        for place, row in zip(places, rows, strict=True):
            pages[row].copy_(self.tensor[place, :size], non_blocking=True)

    def write(self, places: Sequence[int], pages: Tensor, rows: Sequence[int]) -> None:
        size = pages.shape[1]
        for place, row in zip(places, rows, strict=True):
            self.tensor[place, :size].copy_(pages[row], non_blocking=True)

    def close(self) -> None:
        if self.is_pinned:
            runtime().cudaHostUnregister(self.tensor.data_ptr())
            self.is_pinned = False
        self._at_end()

    def _pin(self) -> bool:
        error = int(runtime().cudaHostRegister(self.tensor.data_ptr(), self.tensor.numel(), PORTABLE))
        if error:
            logger.warning("memory between engines cannot be pinned (CUDA error %d): copies are slow", error)
        return not error


class Mapped:
    """identity: of the memory; an engine that starts again has another."""

    def __init__(self, identity: object, memory: Memory) -> None:
        self.identity, self._memory = identity, memory
        self._num_users, self._is_retired, self._is_closed = 0, False, False
        self._lock = threading.Lock()

    @contextmanager
    def used(self) -> Iterator[Memory]:
        """It stays where it is meanwhile.  Raises LookupError if it is retired."""
        with self._lock:
            if self._is_retired:
                raise LookupError("the engine that had it has gone")
            self._num_users += 1
        try:
            yield self._memory
        finally:
            with self._lock:
                self._num_users -= 1
                self._close_if_unused()

    def retire(self) -> None:
        """Nobody begins to use it any more; it is closed behind its last user."""
        with self._lock:
            self._is_retired = True
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._is_retired and not self._num_users and not self._is_closed:
            self._is_closed = True
            self._memory.close()


def runtime() -> Any:
    """CUDA's own functions."""
    return torch.cuda.cudart()
