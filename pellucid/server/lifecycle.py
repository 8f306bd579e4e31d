"""A server's life: it listens, drains on SIGTERM, and ends with its engine."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
import ssl
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import ClassVar

import uvicorn
from httptools import HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pellucid import collector
from pellucid.server.app import make_app
from pellucid.server.context import Server
from pellucid.server.errors import SHUTTING_DOWN, ApiError, error_response, route_path
from pellucid.server.listener import listen
from pellucid.server.statistics_log import log_statistics
from pellucid.server.stream import FLOW

logger = logging.getLogger(__name__)
BACKLOG = 2048  # connections that wait to be accepted
MOST_FILES = 65_536  # that may be open, each connection being one
KEEP_ALIVE = 75  # seconds that an idle connection is kept
MOST_HEAD_BYTES = 2**18  # request line and headers
HEAD_TOO_LARGE = f"the request's head is larger than {MOST_HEAD_BYTES:,} bytes"
LAST_EVENTS = 5.0  # seconds to write what remains, when requests have been ended
LAST_PROBES = 1.0  # seconds in which /health tells that the engine has died, before the server ends


async def serve(server: Server, listener: socket.socket, announce: Callable[[], None]) -> str | None:
    """Serve until told to stop, or until the engine has died: then the reason.

    announce: called when ready.  Raises ValueError if the address was taken meanwhile.
    """
    life = _Life(server, announce)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, life.stop)
    guard = asyncio.create_task(life.mind_engine())
    statistics = asyncio.create_task(log_statistics(server.llm, server.options.log_stats_interval))
    allow_files()
    try:
        listen(listener, server.options, BACKLOG)
        await life.http.serve(sockets=[listener])
    finally:
        guard.cancel()
        statistics.cancel()
        server.llm.shutdown()
        if server.tracer is not None:
            server.tracer.shutdown()
        await server.preprocessor.shutdown()
    return life.cause


def allow_files() -> None:
    """Take as many files as the system lets this process have.

    It begins with 1024, as a rule, and connections beyond that would be cut off without a word.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(MOST_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class _Life:
    def __init__(self, server: Server, announce: Callable[[], None]) -> None:
        self.cause: str | None = None  # why it ends, if it should not
        self._server = server
        self._ending: asyncio.Task[None] | None = None
        self._warm_up: asyncio.Task[None] | None = None
        self.http = _HttpServer(_http_config(server), self._begin)
        self._announce = announce

    def _begin(self) -> None:
        collector.spare()
        self._announce()
        self._server.llm.warm_up()
        self._warm_up = asyncio.create_task(self._server.preprocessor.warm_up())

    def stop(self) -> None:
        """Finish what is under way and take nothing new; the second time, end at once."""
        if self._ending is not None:
            self._server.llm.fail_all(SHUTTING_DOWN)
            self.http.force_exit = True
            return
        self._server.is_draining = True
        self.http.should_exit = True
        self._ending = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        await asyncio.sleep(self._server.options.drain_seconds)
        self._server.llm.fail_all(SHUTTING_DOWN)

    async def mind_engine(self) -> None:
        """Wait for the engine's death; start it anew, once, or end."""
        llm, may_restart = self._server.llm, self._server.options.restart
        while True:
            error = await llm.died()
            if not may_restart:
                break
            may_restart = False
            logger.error("starting the engine anew, for it has died: %s", error)
            try:
                await llm.restart()
                if self._server.is_paused:
                    llm.pause(is_on=True)  # the operator has not told it to go on
                llm.warm_up()
            except Exception as failure:
                error = f"{error}; it cannot start again: {failure}"
                break
        self.cause = error
        await asyncio.sleep(LAST_PROBES)
        self.http.should_exit = True


class _Parser(HttpRequestParser):
    """httptools', which would lose the body of a request that offers HTTP/2, as Java's clients do.

    Such a request is read again, without the offer.
    """

    def __init__(self, connection: _Connection) -> None:
        super().__init__(connection)
        self._connection = connection
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's

    def feed_data(self, data: bytes) -> None:
        try:
            super().feed_data(data)
        except HttpParserUpgrade as offer:
            if not self._connection.declines:
                raise
            (end_of_head,) = offer.args
            self.feed_data(self._connection.plain_head() + data[end_of_head:])


class _Connection(HttpToolsProtocol):
    """uvicorn's; streams may ask whether it takes more.

    A request's head may not grow without end, for nothing has looked at a key by then, and all of a request
    has to come in `most_seconds`.
    """

    most_seconds: ClassVar[float]
    _head_bytes: int | None = None  # that came while a head is not complete
    _size: int = 0  # bytes of a head, as far as it has been read
    _is_http: bool = True  # False: a websocket has taken over
    _deadline: asyncio.TimerHandle | None = None  # of what is to come: a request, or the rest of one

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.parser = _Parser(self)
        super().connection_made(transport)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect()
        self._head_bytes = self._size = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._size += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._size += len(name) + len(value) + len(b": \r\n")

    def on_headers_complete(self) -> None:
        self._head_bytes = None
        if self._size > MOST_HEAD_BYTES:
            raise ValueError(HEAD_TOO_LARGE)  # which ends the parser's work
        if not self.declines:
            super().on_headers_complete()
            if self.cycle is not None and self.cycle.scope is self.scope:  # no websocket's
                connection: dict[object, object] = {"flow": self.flow, "send": self.cycle.send}
                self.scope.setdefault("extensions", {})[FLOW] = connection

    def on_message_complete(self) -> None:
        if not self.declines:
            super().on_message_complete()
            self._expect_nothing()

    @property
    def declines(self) -> bool:
        """Does the head that has come offer a protocol that is not spoken here?"""
        return self.parser.should_upgrade() and self._get_upgrade() is not None and not self._should_upgrade()

    def plain_head(self) -> bytes:
        """The same head without the offer."""
        line = b"%b %b HTTP/%b" % (
            self.parser.get_method(),
            self.url,
            self.parser.get_http_version().encode(),
        )
        fields = [b"%b: %b" % field for field in self.headers if field[0] != b"upgrade"]
        return b"\r\n".join([line, *fields, b"", b""])

    def handle_websocket_upgrade(self) -> None:
        self._is_http = False
        self._expect_nothing()
        super().handle_websocket_upgrade()

    def data_received(self, data: bytes) -> None:
        was_idle = self.timeout_keep_alive_task is not None
        super().data_received(data)
        if was_idle and self._deadline is None and not self._is_answering:  # what came was no request
            self._expect()
        if self._head_bytes is None:
            return
        self._head_bytes += len(data)
        if self._head_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(HEAD_TOO_LARGE)

    def send_400_response(self, msg: str) -> None:
        """uvicorn's, for what is no HTTP, in the form of all errors."""
        if self._size > MOST_HEAD_BYTES:
            msg = HEAD_TOO_LARGE
        self.transport.write(_raw("400 Bad Request", "", ApiError(400, msg)))
        self.transport.close()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expect(self) -> None:
        self._expect_nothing()
        if self._is_http:
            self._deadline = self.loop.call_later(self.most_seconds, self._give_up)

    def _expect_nothing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        """What was to come has not."""
        is_in_head, self._deadline = self._head_bytes is not None, None
        if self.transport.is_closing():
            return
        if self.pipeline or (is_in_head and self._is_answering):
            self._expect()  # the answer to an earlier request is under way
            return
        if is_in_head or (self._is_answering and not self.cycle.response_started):
            self.transport.write(self._too_late())
        self.transport.close()

    def _too_late(self) -> bytes:
        message = (
            f"the request has not come in within {self.most_seconds:g} s, this server's --request-seconds"
        )
        path = "" if self._head_bytes is not None else route_path(self.scope)
        return _raw("408 Request Timeout", path, ApiError(408, message))


def _raw(status: str, path: str, error: ApiError) -> bytes:
    """An error as it goes over the line, where no application is asked."""
    response = error_response(path, error, {"Connection": "close"})
    headers = b"".join([b"%b: %b\r\n" % header for header in response.raw_headers])
    return b"HTTP/1.1 %b\r\n%b\r\n%b" % (status.encode(), headers, bytes(response.body))


class _HttpServer(uvicorn.Server):
    """uvicorn's; signals are left to `_Life`, for it would end the process by the signal, not with 0."""

    def __init__(self, config: uvicorn.Config, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._announce = announce  # when clients can come

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._announce()


def _http_config(server: Server) -> uvicorn.Config:
    options = server.options

    class Connection(_Connection):
        most_seconds = options.request_seconds

    return uvicorn.Config(
        make_app(server),
        http=Connection,
        ws="websockets-sansio",
        lifespan="off",
        log_config=None,
        log_level="info" if options.access_log else "warning",
        access_log=options.access_log,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=int(options.drain_seconds + LAST_EVENTS + 0.5),
        root_path=options.root_path,
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
        ssl_ca_certs=options.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_NONE if options.ssl_ca_certs is None else ssl.CERT_REQUIRED,
    )
