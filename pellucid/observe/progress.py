"""How far a worker has come, in memory that its owner can read: legible when the worker is stuck, or dead."""

from __future__ import annotations

from collections.abc import Callable

NUMBERS, NAME = 4 * 8, 32  # bytes


class Progress:
    """Four numbers and the name of a collective, as the worker writes them."""

    def __init__(self, notes: memoryview) -> None:
        """notes: zeros at first."""
        # One more than the last plan finished, whether it waits for another stage, one more than the last
        # plan begun, collectives entered since.
        self._numbers = notes[:NUMBERS].cast("q")
        self._name = notes[NUMBERS : NUMBERS + NAME]

    def begin(self, plan_id: int) -> None:
        self._numbers[2], self._numbers[3] = plan_id + 1, 0

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


class Standing:
    """The same, as the owner reads it."""

    def __init__(self, read: Callable[[], bytes]) -> None:
        """read: the worker's notes as they are, empty if they cannot be had."""
        self._read = read

    @property
    def value(self) -> tuple[int, ...]:
        """Whoever is behind has less; with as many plans finished, one that waits is not behind."""
        return tuple(memoryview(self._read().ljust(NUMBERS, b"\0")[:NUMBERS]).cast("q"))

    def __str__(self) -> str:
        _, _, plan, collectives = self.value
        if not self._read():
            return ""
        said = f"its last plan was {plan - 1}" if plan > 0 else "before its first plan"
        if not collectives:
            return said
        name = self._read()[NUMBERS:].rstrip(b"\0").decode()
        return f"{said}, its last collective there number {collectives}, {name}"
