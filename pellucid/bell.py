"""Wakes an engine that waits: any thread rings, and so do lines on which there is something to hear."""

from __future__ import annotations

import os
import select
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol


class HasFileno(Protocol):
    def fileno(self) -> int: ...


class Bell:
    """One thread waits; nothing is written while it does not."""

    def __init__(self) -> None:
        self._reads, self._writes = os.pipe()
        for descriptor in (self._reads, self._writes):
            os.set_blocking(descriptor, False)
            weakref.finalize(self, os.close, descriptor)
        self._is_heard = False

    def ring(self) -> None:
        """Say that there is something to do, behind putting it where it will be looked for."""
        if self._is_heard:
            with suppress(BlockingIOError):  # it has been rung often enough
                os.write(self._writes, b"!")

    def wait(self, lines: Iterable[HasFileno], seconds: float, is_still: Callable[[], bool]) -> None:
        """Until somebody rings or one of the lines can be read; not at all if it is not still.

        is_still: asked when every ring is heard: is there nothing to do?
        """
        self._is_heard = True
        try:
            if is_still():
                poll = select.poll()
                for descriptor in (self._reads, *(line.fileno() for line in lines)):
                    poll.register(descriptor, select.POLLIN)
                poll.poll(1000 * seconds)
        finally:
            self._is_heard = False
            with suppress(BlockingIOError):
                os.read(self._reads, 1 << 16)
