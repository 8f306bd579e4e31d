"""What engines agree on before each step: how large it is for all of them.

Every engine has a line to every other one.  Who has work sends the others what its step needs, and waits
until each of them has sent its own; who has none hears that, and sends that it needs nothing.  So all take
part in every step, and when nobody has work, nobody says anything.  One word a step and line, in order.
"""

from __future__ import annotations

import secrets
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from pellucid.cluster.line import Line, wait
from pellucid.dist.collectives import LOOPBACK, Links, PeerError
from pellucid.executor.base import NoPace
from pellucid.nodes.connection import admit, dial, listen, receive

NUMBER = 4  # bytes of an engine's, which dials
WORD = struct.Struct("<q4q")  # a step's number, and a need


class Need(NamedTuple):
    """What a step takes room for.  The needs of several engines are each number's largest."""

    num_tokens: int = 0
    num_rows: int = 0
    max_query: int = 0  # of a row; two, if drafts are to follow a row of one
    is_eager: int = 0  # 1: it cannot be replayed


NOTHING = Need()  # of an engine without work


class Store(Protocol):
    """Where engines leave their addresses; `get` waits."""

    def set(self, key: str, value: str) -> object: ...

    def get(self, key: str) -> bytes: ...


class Pace(NoPace):
    """Engines in step, as one of them sees it; before `begin` there are no others."""

    def __init__(self) -> None:
        self._tick = 0  # steps begun
        self.follow: Callable[[], None] = self._unfollowed  # takes part in a step, without work of one's own
        self.open({}, 0.0)

    def begin(self, links: Links, address: str | None, patience: float) -> None:
        """Meet the other engines, if there are any.  address: of this machine, if there are several."""
        if links.dp.size > 1:
            assert links.store is not None
            name = f"pace of ranks {links.mesh.ranks('dp')}"
            there = address or LOOPBACK
            self.open(meet(links.store, name, links.dp.rank, links.dp.size, address=there), patience)

    def open(self, lines: dict[int, Line], patience: float) -> None:
        """lines: to each other engine.  patience: seconds that one is waited for."""
        self._lines, self._patience = lines, patience
        self.lines = tuple(lines.values())
        self._heard: dict[int, deque[bytes]] = {engine: deque() for engine in lines}

    def attend(self) -> None:
        """Take part in every step that others have begun."""
        while self.is_awaited:
            self.follow()

    def _unfollowed(self) -> None:
        raise AssertionError("nothing launches steps")

    @property
    def is_kept(self) -> bool:
        return bool(self._lines)

    @property
    def is_awaited(self) -> bool:
        """Has another engine begun a step that this one has not?  Raises PeerError if one has gone."""
        self._hear()
        return any(self._heard.values())

    def agree(self, need: Need) -> Need:
        """Begin a step, and wait until all have; what it needs.  Raises PeerError for who does not come."""
        for line in self._lines.values():
            line.send(WORD.pack(self._tick, *need))
        until = time.monotonic() + self._patience
        while late := [engine for engine, heard in self._heard.items() if not heard]:
            left = until - time.monotonic()
            if left <= 0:
                raise PeerError(
                    f"engine {late[0]} has not begun step {self._tick} for {self._patience:g} s; "
                    "raise --worker-timeout if steps may take as long"
                )
            wait([self._lines[engine] for engine in late], left)
            self._hear()
        needs = [need]
        for engine, heard in self._heard.items():
            tick, *numbers = WORD.unpack(heard.popleft())
            assert tick == self._tick, f"engine {engine} is at step {tick}, this one at {self._tick}"
            needs.append(Need(*numbers))
        self._tick += 1
        return Need(*map(max, zip(*needs, strict=True)))

    def _hear(self) -> None:
        for engine, line in self._lines.items():
            line.flush()
            try:
                self._heard[engine] += line.receive()
            except EOFError:
                if not self._heard[engine]:
                    raise PeerError(f"engine {engine} has ended, with which this one is in step") from None

    def close(self) -> None:
        for line in self._lines.values():
            line.close()


def meet(store: Store, name: str, engine: int, num_engines: int, *, address: str) -> dict[int, Line]:
    """Open a line to every other engine: each dials those before it.

    name: of those that meet.  address: of this machine.
    """
    if engine == 0:
        store.set(f"{name} secret", secrets.token_hex(16))
    secret = store.get(f"{name} secret")
    lines: dict[int, Line] = {}
    with listen(address) as listener:
        host, port = listener.getsockname()[:2]
        store.set(f"{name} {engine}", f"{host} {port}")
        for other in range(engine):
            host, port = store.get(f"{name} {other}").decode().split()
            connection = dial(host, int(port), secret)
            connection.sendall(engine.to_bytes(NUMBER))
            lines[other] = _line(connection)
        while len(lines) < num_engines - 1:
            connection = admit(listener.accept()[0], secret)
            other = int.from_bytes(receive(connection, NUMBER))
            lines[other] = _line(connection)
    return dict(sorted(lines.items()))


def _line(connection: socket.socket) -> Line:
    connection.settimeout(None)
    return Line.over(connection)
