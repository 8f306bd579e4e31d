"""HTTP/1.1 for a client that must cost far less than the server: one protocol object a connection.

Knows requests as bytes and responses as bytes with the moment of their arrival; nothing of what they say.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import urlsplit

END_OF_HEAD = b"\r\n\r\n"
MOST_HEAD = 1 << 16  # bytes


class Sink(Protocol):
    """Takes a response's body as it comes."""

    def take(self, status: int, data: bytes, now: float) -> None:
        """now: seconds of the monotonic clock."""
        ...


class BrokenResponseError(Exception):
    """What came back is no response, or not all of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a server is."""

    host: str
    port: int
    path: str  # before /v1, without a slash at its end
    is_tls: bool
    api_key: str | None

    @classmethod
    def parse(cls, url: str, api_key: str | None) -> Target:
        """Parse --base-url, with or without /v1.  Raises ValueError for anything but http and https."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--base-url {url!r} is no address; write it as http://127.0.0.1:8000")
        is_tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        port = parts.port or (443 if is_tls else 80)
        return cls(host=parts.hostname, port=port, path=path, is_tls=is_tls, api_key=api_key)

    def url(self, route: str) -> str:
        """Of a route such as /v1/models."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_tls else 'http'}://{host}:{self.port}{self.path}{route}"

    def post(self, route: str, body: bytes) -> bytes:
        """A whole request with a JSON body."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"POST {self.path}{route} HTTP/1.1",
            f"Host: {host}:{self.port}",
            "Accept: text/event-stream",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        ]
        if self.api_key is not None:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, "", ""]).encode() + body


class ResponseReader:
    """Takes one response apart, however its bytes are cut."""

    def __init__(self) -> None:
        self.status = 0  # until the head has come
        self.keeps_alive = True
        self.is_complete = False
        self._rest = b""  # what is not understood yet
        self._is_chunked = False
        self._left: int | None = None  # bytes of the body; None where the connection's end is its end

    def feed(self, data: bytes) -> bytes:
        """What `data` adds to the body.  Raises BrokenResponseError."""
        if not self.status:
            data = self._head(data)
            if not self.status:
                return b""
        if self._is_chunked:
            return self._chunks(data)
        if self._left is not None:
            data = data[: self._left]
            self._left -= len(data)
            self.is_complete = not self._left
        return data

    def close(self) -> None:
        """The connection has ended.  Raises BrokenResponseError if the response has not."""
        if not self.status or self._is_chunked or self._left is not None:
            raise BrokenResponseError("the server closed the connection")
        self.is_complete = True

    def _head(self, data: bytes) -> bytes:
        """Read the head, if all of it is there; what follows it."""
        head, found, body = (self._rest + data).partition(END_OF_HEAD)
        if not found:
            self._rest = head
            if len(head) > MOST_HEAD:
                raise BrokenResponseError("the response's head does not end")
            return b""
        self._rest = b""
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, status = first.partition(" ")
        if not version.startswith("HTTP/1.") or not status[:3].isdigit():
            raise BrokenResponseError(f"{first[:80]!r} is no HTTP/1.1")
        if status[0] == "1":
            return self._head(body)  # an interim response
        fields = {name.strip().lower(): value.strip().lower() for name, _, value in map(_split, lines)}
        self.status = int(status[:3])
        self.keeps_alive = version != "HTTP/1.0" and fields.get("connection") != "close"
        self._is_chunked = "chunked" in fields.get("transfer-encoding", "")
        if "content-length" in fields:
            self._left = int(fields["content-length"])
        self.is_complete = not self._is_chunked and self._left == 0
        return body

    def _chunks(self, data: bytes) -> bytes:
        """The content of all whole chunks."""
        buffer = self._rest + data if self._rest else data
        begin, parts = 0, list[bytes]()
        while (line_end := buffer.find(b"\r\n", begin)) >= 0:
            try:
                size = int(buffer[begin:line_end].partition(b";")[0], 16)
            except ValueError:
                raise BrokenResponseError("a chunk has no size") from None
            content = line_end + 2
            if len(buffer) < content + size + 2:
                break
            begin = content + size + 2
            if not size:
                self.is_complete = True
                break
            parts.append(buffer[content : begin - 2])
        self._rest = buffer[begin:]
        return parts[0] if len(parts) == 1 else b"".join(parts)


def _split(line: str) -> tuple[str, str, str]:
    return line.partition(":")


class Connection(asyncio.Protocol):
    """Carries one request at a time."""

    def __init__(self) -> None:
        self.is_open = False
        self.has_answered = False  # has anything come back for the present request?
        self._transport: asyncio.Transport | None = None
        self._reader = ResponseReader()
        self._sink: Sink | None = None
        self._done: asyncio.Future[None] | None = None

    async def exchange(self, request: bytes, sink: Sink) -> None:
        """Send a request and hand its response to `sink`.  Raises BrokenResponseError."""
        assert self._transport is not None and self._done is None, "one request at a time"
        self._reader, self._sink, self.has_answered = ResponseReader(), sink, False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._done
        except asyncio.CancelledError:
            self.abort()
            raise
        finally:
            self._done = self._sink = None
        if not self._reader.keeps_alive:
            self.abort()

    def abort(self) -> None:
        """Hang up."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # What the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.is_open = cast(asyncio.Transport, transport), True

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        if self._sink is None or self._done is None:
            return
        self.has_answered = True
        try:
            body = self._reader.feed(data)
        except BrokenResponseError as error:
            self._fail(error)
            self.abort()
            return
        if body:
            self._sink.take(self._reader.status, body, now)
        if self._reader.is_complete and not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._done is None or self._done.done():
            return
        try:
            self._reader.close()
        except BrokenResponseError as error:
            self._fail(error)
        else:
            self._done.set_result(None)

    def _fail(self, error: BrokenResponseError) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


class ConnectionPool:
    """Connections to one server; idle ones are used again, the last one first."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._idle: list[Connection] = []

    async def exchange(self, request: bytes, sink: Sink) -> None:
        """Send a request over some connection.  Raises OSError and BrokenResponseError."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_open:
                continue
            try:
                await self._exchange(connection, request, sink)
                return
            except BrokenResponseError:
                if connection.has_answered:
                    raise  # else the server had given it up before it saw the request
        await self._exchange(await self._connect(), request, sink)

    def close(self) -> None:
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    async def _exchange(self, connection: Connection, request: bytes, sink: Sink) -> None:
        await connection.exchange(request, sink)
        if connection.is_open:
            self._idle.append(connection)

    async def _connect(self) -> Connection:
        loop, target = asyncio.get_running_loop(), self._target
        _, connection = await loop.create_connection(
            Connection, target.host, target.port, ssl=target.is_tls or None
        )
        return connection
