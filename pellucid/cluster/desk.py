"""A member's own end of its line: what its owner says, and what it says, from any of its threads."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from pellucid.cluster.line import HasFileno, Line, wait
from pellucid.cluster.messages import Failed, Meet, Message, Ready, decode, encode

logger = logging.getLogger(__name__)
ECHO = "PeerError"  # the name of errors that another member's end causes


def nothing() -> None:
    """Nobody else speaks."""


class OwnerGone(Exception):
    """There is nobody to hear or to speak to."""


class Desk:
    """One thread hears; any may speak."""

    def __init__(self, line: Line, name: str, notes: memoryview) -> None:
        """notes: memory that the owner can read at any time."""
        self.name, self.notes = name, notes
        self.standing: object = ""  # what says how far this member has come
        self._line = line
        self._lock = threading.Lock()
        self._inbox: deque[bytes] = deque()
        self._is_ready = False

    def fileno(self) -> int:
        """Readable when there is something to hear."""
        return self._line.fileno()

    def hear(self, seconds: float, others: Sequence[HasFileno] = ()) -> list[Message]:
        """All that has come; wait for the first word up to `seconds`.  Raises OwnerGone.

        others: what is said on these ends the waiting, too.
        """
        if seconds > 0 and not self._inbox:
            wait([self._line, *others], seconds)
        if self._line.has_unsent:
            self._flush()
        self._receive()
        messages = [decode(frame) for frame in self._inbox]
        self._inbox.clear()
        return messages

    def next(self, others: Sequence[HasFileno] = (), attend: Callable[[], None] = nothing) -> Message:
        """Wait for the next message.  Raises OwnerGone.

        others: when something is said on these meanwhile, `attend` sees to it.
        """
        while not self._inbox:
            self._receive()
            if not self._inbox:
                wait([self._line, *others], None)
                attend()
        return decode(self._inbox.popleft())

    def meet(self, port: int | None) -> int:
        """The port at which ranks meet: rank 0 says it, the others are told it."""
        if port is not None:
            self.send(Meet(port))
            return port
        message = self.next()
        assert isinstance(message, Meet), message
        return message.port

    def post(self, message: Message) -> None:
        """Speak without waiting: what the owner does not read yet goes with later words, or in `hear`."""
        frame = encode(message)
        with self._lock:
            self._line.send(frame)

    def send(self, message: Message) -> None:
        """Speak, and wait until all of it is on its way."""
        self._is_ready = self._is_ready or isinstance(message, Ready)
        self.post(message)
        while self._line.has_unsent:
            self._line.wait_for_room()
            self._flush()

    def fail(self, error: Exception) -> None:
        """Say what went wrong; this process ends with it.  The traceback is written here, the cause sent."""
        name, standing = type(error).__name__, str(self.standing)
        is_echo, is_users = name == ECHO, isinstance(error, ValueError) and not self._is_ready
        logger.log(logging.DEBUG if is_echo or is_users else logging.ERROR, "%s", error, exc_info=error)
        said = f"{self.name} has failed{standing and ', '}{standing}: {name}: {' '.join(str(error).split())}"
        self.send(Failed(str(error) if is_users else said, is_echo=is_echo, is_users=is_users))

    def _receive(self) -> None:
        try:
            self._inbox += self._line.receive()
        except EOFError:
            raise OwnerGone from None

    def _flush(self) -> None:
        with self._lock:
            self._line.flush()
