"""A line between two processes: frames of bytes, each one whole and in order.

It is a pipe in each direction, or between machines a connection.  (Within one, sockets take ten to thirty
microseconds longer to wake whoever waits.)  Nothing here blocks but what is called `wait`.  What the other
side does not read yet waits on this side, however much it is, so neither side ever stands still because the
other one does.  Knows nothing of what frames say.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from io import FileIO
from typing import Protocol, Self

LENGTH = struct.Struct("<Q")  # in front of each frame
PIECE = 1 << 16  # bytes that are received at a time
BUFFER = 1 << 20  # bytes that the system is asked to hold of what the other side has not read
HUNG_UP = getattr(select, "POLLRDHUP", 0)  # what a connection's end is, where a pipe's tells by itself


class Line:
    """One end.  One thread receives; sends are one thread's, too, or under a lock."""

    def __init__(self, reads: int, writes: int) -> None:
        """reads, writes: descriptors, which are this line's from now on."""
        for descriptor in (reads, writes):
            os.set_blocking(descriptor, False)
        with suppress(AttributeError, OSError):  # another system's, or so much that it wants to hold no more
            fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, BUFFER)
        self._in, self._out = FileIO(reads, "r"), FileIO(writes, "w")
        self._unsent = bytearray()
        self._unread = bytearray()  # the beginning of a frame
        self._has_ended = False

    @classmethod
    def pair(cls) -> tuple[Self, tuple[int, int]]:
        """An end, and the descriptors that the other one reads and writes, to hand to a process."""
        (their_in, our_out), (our_in, their_out) = os.pipe(), os.pipe()
        return cls(our_in, our_out), (their_in, their_out)

    @classmethod
    def over(cls, connection: socket.socket) -> Self:
        """An end that is a connection, which is this line's from now on."""
        reads = connection.detach()
        return cls(reads, os.dup(reads))

    def fileno(self) -> int:
        """Readable when there is something to receive, also the end; level-triggered."""
        return self._in.fileno()

    def out_fileno(self) -> int:
        """Writable when there is room for more."""
        return self._out.fileno()

    @property
    def is_closed(self) -> bool:
        return self._in.closed

    @property
    def has_unsent(self) -> bool:
        """Does anything wait here for the other side to read?  `flush` when there is room."""
        return bool(self._unsent)

    def send(self, frame: bytes) -> None:
        """Send, or keep what does not fit until `flush`.  To a side that has gone nothing is sent."""
        whole = LENGTH.pack(len(frame)) + frame
        num_sent = 0 if self._unsent else self._write(whole)
        if num_sent < len(whole):
            self._unsent += whole[num_sent:]
            self.flush()

    def flush(self) -> None:
        """Send what has waited, as far as there is room."""
        while self._unsent and (num_sent := self._write(self._unsent)):
            del self._unsent[:num_sent]

    def _write(self, data: bytes | bytearray) -> int:
        """The number of bytes that need no more sending."""
        try:
            return self._out.write(data) or 0
        except OSError:
            return len(data)  # whoever receives learns of the end

    def receive(self) -> list[bytes]:
        """The frames that have come.  Raises EOFError when the other side has gone, and all has been told."""
        while not self._has_ended and (piece := self._read()) is not None:
            self._has_ended = not piece
            self._unread += piece
            if len(piece) < PIECE:
                break  # that was all, most likely; if not, the line is still readable
        frames = self._take_frames()
        if self._has_ended and not frames:
            raise EOFError("the other side has gone")
        return frames

    def _read(self) -> bytes | None:
        """What there is, nothing of it at the end; None is nothing yet."""
        try:
            return self._in.read(PIECE)
        except OSError:  # the other side's machine, or the way to it, has gone
            return b""

    def _take_frames(self) -> list[bytes]:
        frames: list[bytes] = []
        start, size = 0, len(self._unread)
        while size - start >= LENGTH.size:
            first = start + LENGTH.size
            end = first + LENGTH.unpack_from(self._unread, start)[0]
            if end > size:
                break
            frames.append(bytes(self._unread[first:end]))
            start = end
        del self._unread[:start]
        return frames

    def wait_for_room(self) -> None:
        """Until something can be sent, or the other side has gone."""
        poll = select.poll()
        poll.register(self._out, select.POLLOUT)
        poll.poll()

    def wait_for_end(self, seconds: float) -> bool:
        """Whether the other side goes within so many seconds, whatever it has said before."""
        poll = select.poll()
        poll.register(self._in, HUNG_UP)
        return bool(poll.poll(1000 * seconds))

    def close(self) -> None:
        self._in.close()
        self._out.close()


class HasFileno(Protocol):
    def fileno(self) -> int: ...


def wait(lines: Iterable[HasFileno], seconds: float | None) -> None:
    """Until there is something to receive on one of the lines, or room for what one could not send.

    seconds: at most so many; None is for ever.
    """
    poll = select.poll()
    for line in lines:
        poll.register(line.fileno(), select.POLLIN)
        if isinstance(line, Line) and line.has_unsent:
            poll.register(line.out_fileno(), select.POLLOUT)
    poll.poll(None if seconds is None else 1000 * seconds)
