"""The side that wants pages: a connection to one engine's lender, for one rank.  Waits; used in a thread."""

from __future__ import annotations

import mmap
import os
import select
import socket
from collections.abc import Sequence

from pellucid.connectors.peer.trust import PURPOSE
from pellucid.connectors.peer.wire import (
    Done,
    Facts,
    Found,
    Good,
    Hello,
    Key,
    Offer,
    Read,
    Welcome,
    Word,
    local_address,
    peer_user,
    receive,
    receive_with_descriptor,
    send,
    take_into,
)
from pellucid.nodes.connection import PATIENCE, SECRET, dial

SECONDS = 20.0  # that an answer may take: more than a lender waits for a page


class Refused(ValueError):
    """The two engines do not fit together."""


class Reader:
    """memory: the lender's, if it is the host's, on this node: bytes [places, stride]; else None.

    way, address: of memory that is reached otherwise: see `Way`; else None.

    identity: of that memory; an engine that has been started again has another.
    """

    def __init__(
        self,
        engine_id: str,
        address: tuple[str, int] | None,
        rank: int,
        facts: Facts,
        seconds: float = SECONDS,
        secret: bytes | None = None,
    ) -> None:
        """address: on another node, where `secret` is known, too.

        Raises OSError, EOFError, or Refused with both values.
        """
        self.memory: mmap.mmap | None = None
        self.identity: object = None
        self._connection = connect(engine_id, address, seconds, secret)
        try:
            is_local = self._connection.family == socket.AF_UNIX
            if is_local and peer_user(self._connection) != os.getuid():
                raise ConnectionRefusedError(f"engine {engine_id} on this node is another user's")
            send(self._connection, Hello(engine_id, rank, facts))
            if is_local:
                welcome, descriptor = receive_with_descriptor(self._connection)
            else:
                welcome, descriptor = receive(self._connection), None
            assert isinstance(welcome, Welcome), welcome
            if welcome.error is not None:
                raise Refused(welcome.error)
            self.stride, self.way, self.address = welcome.stride, welcome.way, welcome.address
            if self.way is not None:
                self.identity = self.way, self.address
            if descriptor is not None:
                status = os.fstat(descriptor)
                self.identity = status.st_dev, status.st_ino
                self.memory = mmap.mmap(descriptor, 0)
                os.close(descriptor)
        except BaseException:
            self.close()
            raise

    def find(self, keys: Sequence[Key], num_bytes: int) -> list[int]:
        """Places of these pages, which stay until `done`.  Raises LookupError if one is not there.

        num_bytes: of each page, to be had by `take` next; 0 where the memory can be read.
        """
        found = self._ask(Read(list(keys), num_bytes))
        assert isinstance(found, Found), found
        if found.error is not None:
            raise LookupError(found.error)
        return found.places

    def take(self, view: memoryview) -> None:
        """The next bytes."""
        take_into(self._connection, view)

    def done(self, request_id: str, *, is_whole: bool = True) -> None:
        """All is read, and was there until now, or this raises."""
        answer = self._ask(Done(request_id, is_whole))
        assert isinstance(answer, Good), answer

    def _ask(self, word: Word) -> Word:
        send(self._connection, word)
        return receive(self._connection)

    @property
    def has_gone(self) -> bool:
        """Nothing is asked of it at the moment: has it ended the connection?"""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        self._connection.close()


def offer(engine_id: str, rank: int, address: bytes, seconds: float) -> None:
    """Tell the lender of one's own engine where this rank's memory is.  Raises OSError or EOFError."""
    with connect(engine_id, None, seconds, None) as connection:
        send(connection, Offer(engine_id, rank, address))
        receive(connection)


def connect(
    engine_id: str, address: tuple[str, int] | None, seconds: float, secret: bytes | None
) -> socket.socket:
    """On this node if it is there, else at its address."""
    local = socket.socket(socket.AF_UNIX)
    local.settimeout(seconds)
    try:
        local.connect(local_address(engine_id))
        return local
    except (ConnectionRefusedError, FileNotFoundError) as error:
        local.close()
        if address is None:
            raise ConnectionRefusedError(f"engine {engine_id} is not there (any more)") from error
    if secret is None:
        raise ConnectionRefusedError(f"engine {engine_id} is on another node, and {SECRET} is not set here")
    connection = dial(*address, secret, patience=min(seconds, PATIENCE), purpose=PURPOSE)
    connection.settimeout(seconds)
    return connection
