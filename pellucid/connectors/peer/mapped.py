"""Another engine's memory in this process, pinned where there is a GPU, as long as somebody needs it here."""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

logger = logging.getLogger(__name__)
PORTABLE = 1  # cudaHostRegisterPortable


class Mapped:
    """tensor: bytes [places, stride].  identity: of the memory; an engine that starts again has another."""

    def __init__(self, identity: object, memory: mmap.mmap, stride: int, *, is_gpu: bool) -> None:
        self.identity = identity
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8).view(-1, stride)
        self.is_pinned = is_gpu and self._pin()
        self._num_users, self._is_retired = 0, False
        self._lock = threading.Lock()

    def _pin(self) -> bool:
        error = int(runtime().cudaHostRegister(self.tensor.data_ptr(), self.tensor.numel(), PORTABLE))
        if error:
            logger.warning("memory between engines cannot be pinned (CUDA error %d): copies are slow", error)
        return not error

    @contextmanager
    def used(self) -> Iterator[torch.Tensor]:
        """It stays where it is meanwhile.  Raises LookupError if it is retired."""
        with self._lock:
            if self._is_retired:
                raise LookupError("the engine that had it has gone")
            self._num_users += 1
        try:
            yield self.tensor
        finally:
            with self._lock:
                self._num_users -= 1
                self._unpin_if_unused()

    def retire(self) -> None:
        """Nobody begins to use it any more; it is unpinned behind its last user."""
        with self._lock:
            self._is_retired = True
            self._unpin_if_unused()

    def _unpin_if_unused(self) -> None:
        if self._is_retired and not self._num_users and self.is_pinned:
            runtime().cudaHostUnregister(self.tensor.data_ptr())
            self.is_pinned = False


def runtime() -> Any:
    """CUDA's own functions."""
    return torch.cuda.cudart()
