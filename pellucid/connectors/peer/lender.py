"""The side that has pages: memory that workers of other engines read, and threads that tell them where.

On this node a reader is handed the memory itself; elsewhere its bytes follow the answer.  Either way what it
reads stays until it has said that it is done.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import threading
import time
from contextlib import suppress

import msgspec

from pellucid.connectors.peer.shelf import Shelf
from pellucid.connectors.peer.trust import PURPOSE
from pellucid.connectors.peer.wire import (
    Done,
    Facts,
    Found,
    Good,
    Hello,
    Offer,
    Read,
    Welcome,
    local_address,
    peer_user,
    receive,
    send,
)
from pellucid.nodes.connection import admit

logger = logging.getLogger(__name__)
WAIT_SECONDS = 10.0  # that a reader waits for a page which is being written
SEND_SECONDS = 60.0  # in which a reader takes something of what it is sent
MOST_READERS = 512  # connections at once, whoever they are
RETRY_SECONDS = 0.5  # between two tries to take up a connection


class Lender:
    """Memory for each rank, and who reads there."""

    def __init__(
        self, engine_id: str, facts: Facts, shelf: Shelf, *, num_ranks: int, stride: int,
        at: tuple[str, int] | None = None, secret: bytes | None = None, way: str | None = None,
    ) -> None:  # fmt: skip
        """stride: bytes of a place.  at: where other nodes ask, who prove `secret`; without, none do.

        way: how readers reach memory that workers have taken; None: it is taken here.

        Raises ValueError for a port that is taken.
        """
        self.engine_id, self.shelf, self.stride = engine_id, shelf, stride
        self._facts, self._secret, self._way = facts, secret, way
        self._addresses: dict[int, bytes] = {}  # of workers' memory, by rank
        self._offered = threading.Condition()
        self._memories = [os.memfd_create(f"kv of rank {rank}") for rank in range(num_ranks)]
        for memory in self._memories:
            os.truncate(memory, max(1, 0 if way else shelf.num_places) * stride)
        self._maps: dict[int, mmap.mmap] = {}
        self._listeners: list[socket.socket] = []
        self._accepting: list[threading.Thread] = []
        self._is_closed = False
        self._connections: set[socket.socket] = set()
        self._listen(socket.socket(socket.AF_UNIX), local_address(engine_id))
        if at is not None:
            assert secret is not None, "nobody without the secret is served from another node"
            family = socket.AF_INET6 if ":" in at[0] else socket.AF_INET
            self._listen(socket.socket(family), at)

    def _listen(self, listener: socket.socket, address: str | tuple[str, int]) -> None:
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()
        except OSError as error:
            listener.close()
            self.close()
            where = (
                f"engine_id {self.engine_id!r}" if isinstance(address, str) else f"{address[0]}:{address[1]}"
            )
            raise ValueError(
                f"other engines cannot ask for KV at {where}: {error.strerror}; give another kv_port, kv_ip "
                "or engine_id in kv_transfer_config"
            ) from error
        self._listeners.append(listener)
        accepts = threading.Thread(target=self._accept, args=(listener,), name="kv lender", daemon=True)
        self._accepting.append(accepts)
        accepts.start()

    def _accept(self, listener: socket.socket) -> None:
        while not self._is_closed:
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if not self._is_closed:  # too many open files, say, or who asked has gone
                    logger.warning("an engine that asks for KV is not served: %s", error)
                    time.sleep(RETRY_SECONDS)
                continue
            if len(self._connections) >= MOST_READERS:
                connection.close()
                continue
            self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="kv reader", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        held: list[int] = []  # places that it reads
        try:
            self._prove(connection)
            connection.settimeout(WAIT_SECONDS)
            rank = self._welcome(connection)
            while rank is not None:
                connection.settimeout(SEND_SECONDS if held else None)  # it asks when it wants
                word = receive(connection)
                connection.settimeout(SEND_SECONDS)
                self.shelf.release(held)
                held = []
                if isinstance(word, Read):
                    held = self._find(connection, rank, word)
                elif isinstance(word, Done):
                    if word.is_whole:
                        self.shelf.has_read(word.request_id, rank)
                    send(connection, Good())
                else:
                    raise EOFError(f"{word} is no question")
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            logger.debug("a reader of KV has gone: %s", error)
        finally:
            self.shelf.release(held)
            self._connections.discard(connection)
            connection.close()

    def _prove(self, connection: socket.socket) -> None:
        """Nothing for whoever does not know the secret, or is another user's here.

        Raises OSError or EOFError for them.
        """
        try:
            if connection.family != socket.AF_UNIX:
                assert self._secret is not None
                admit(connection, self._secret, purpose=PURPOSE)
            elif peer_user(connection) != os.getuid():
                raise ConnectionRefusedError("another user's processes are not served")
        except (OSError, EOFError) as error:
            logger.warning("an engine that asks for KV is refused: %s", error)
            raise

    def _welcome(self, connection: socket.socket) -> int | None:
        """The rank that asks; None if it is to have nothing."""
        hello = receive(connection)
        is_local = connection.family == socket.AF_UNIX
        if isinstance(hello, Offer) and is_local:
            return self._note(connection, hello)
        if not isinstance(hello, Hello):
            raise EOFError(f"{hello} is no greeting")
        error = self._refuse(hello, is_local=is_local)
        if error is not None:
            logger.warning("an engine that asks for KV is refused: %s", error)
            send(connection, Welcome(error))
            return None
        address = self._addresses.get(hello.rank, b"")
        welcome = Welcome(None, self.stride, self._way, address)
        has_descriptor = is_local and self._way is None
        send(connection, welcome, [self._memories[hello.rank]] if has_descriptor else None)
        return hello.rank

    def _note(self, connection: socket.socket, offer: Offer) -> None:
        """Where a rank of this engine has its memory."""
        if self._way is None or offer.engine_id != self.engine_id:
            raise EOFError("no memory is wanted")
        with self._offered:
            self._addresses[offer.rank] = offer.address
            self._offered.notify_all()
        send(connection, Good())

    def _refuse(self, hello: Hello, *, is_local: bool) -> str | None:
        if hello.engine_id != self.engine_id:
            return f"it means engine {hello.engine_id}, this is {self.engine_id}"
        for name in {**self._facts, **hello.facts}:
            ours, theirs = self._facts.get(name), hello.facts.get(name)
            if ours != theirs:
                return f"{name} is {ours} at the engine that has the KV, {theirs} at the one that asks for it"
        if not 0 <= hello.rank < len(self._memories):
            return f"there is no rank {hello.rank}"
        if self._way == "cuda" and not is_local:
            return "its KV lies in a GPU's memory, for engines of its machine (kv_buffer_device is 'cuda')"
        with self._offered:
            if self._way and not self._offered.wait_for(lambda: hello.rank in self._addresses, WAIT_SECONDS):
                return "its workers have no memory to lend from; see their log"
        return None

    def _find(self, connection: socket.socket, rank: int, read: Read) -> list[int]:
        if not 0 <= read.num_bytes <= (0 if self._way else self.stride):
            raise EOFError(f"pages of {read.num_bytes:,} bytes are none of ours")
        places = self.shelf.find(read.keys, WAIT_SECONDS)
        if places is None:
            send(connection, Found("some of it is not there any more"))
            return []
        try:
            send(connection, Found(None, places))
            if read.num_bytes:
                view = memoryview(self._map(rank))
                for place in places:
                    start = place * self.stride
                    connection.sendall(view[start : start + read.num_bytes])
        except BaseException:
            self.shelf.release(places)
            raise
        return places

    def _map(self, rank: int) -> mmap.mmap:
        if rank not in self._maps:
            self._maps[rank] = mmap.mmap(self._memories[rank], 0, prot=mmap.PROT_READ)
        return self._maps[rank]

    def close(self) -> None:
        """Nobody is served any more; who has mapped the memory may go on reading."""
        self._is_closed = True
        for open_socket in (*self._listeners, *self._connections):
            with suppress(OSError):
                open_socket.shutdown(socket.SHUT_RDWR)
            open_socket.close()
        self._listeners.clear()
        for thread in self._accepting:  # an address is free when nobody waits there
            thread.join(WAIT_SECONDS)
        for memory in self._memories:
            os.close(memory)
        self._memories.clear()
