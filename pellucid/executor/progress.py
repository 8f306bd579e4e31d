"""How far a worker has come, in memory that its owner shares: legible when the worker is stuck, or dead."""

from __future__ import annotations

import mmap
import tempfile
from typing import IO, Self

NUMBERS, NAME = 4 * 8, 32  # bytes


class Progress:
    """Four numbers and the name of a collective, in a file without a name."""

    def __init__(self, descriptor: int) -> None:
        memory = memoryview(mmap.mmap(descriptor, NUMBERS + NAME))
        # Last plan finished, whether it waits for another stage, last plan begun, collectives entered since.
        self._numbers = memory[:NUMBERS].cast("q")
        self._name = memory[NUMBERS:]

    @classmethod
    def shared(cls) -> tuple[Self, IO[bytes]]:
        """That of a worker to be started, and the file to hand to it."""
        file = tempfile.TemporaryFile()  # noqa: SIM115 (which is its user's to close)
        file.truncate(NUMBERS + NAME)
        progress = cls(file.fileno())
        progress._numbers[0] = progress._numbers[2] = -1
        return progress, file

    @property
    def value(self) -> tuple[int, ...]:
        """Whoever is behind has less; with as many plans finished, one that waits is not behind."""
        return tuple(self._numbers)

    def __str__(self) -> str:
        _, _, plan, collectives = self._numbers
        said = f"its last plan was {plan}" if plan >= 0 else "before its first plan"
        if not collectives:
            return said
        name = bytes(self._name).rstrip(b"\0").decode()
        return f"{said}, its last collective there number {collectives}, {name}"

    def begin(self, plan_id: int) -> None:
        self._numbers[2], self._numbers[3] = plan_id, 0

    def end(self) -> None:
        """The plan is finished, or on a GPU all of it launched."""
        self._numbers[0] = self._numbers[2]

    def wait(self, begins: bool) -> None:
        """It begins, or ceases, to wait for another pipeline stage."""
        self._numbers[1] = begins

    def enter(self, collective: str) -> None:
        """Note a collective by its name, before it begins.  (A CUDA graph's are not seen.)"""
        self._name[:] = collective.encode()[:NAME].ljust(NAME, b"\0")
        self._numbers[3] += 1
