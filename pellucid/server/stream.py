"""Server-sent events, and what happens when a client has gone."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response
from starlette.types import Message, Receive, Scope, Send

from pellucid.server.errors import CLIENT_GONE, ApiError, encode_error

T = TypeVar("T")
logger = logging.getLogger(__name__)
encode = msgspec.json.Encoder().encode
FLOW = "pellucid.flow"  # the extension of ASGI that has a connection's `flow`, and its own `send`
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies pass on what they get


def event(value: object) -> bytes:
    """One event that carries `value` as JSON."""
    return b"data: %b\n\n" % encode(value)


class Envelope:
    """An event of which only a text changes, and perhaps an object in it: all around is encoded once.

    make: the event's value, for any text.  part: the object, as `make` puts it there.
    """

    def __init__(self, make: Callable[[str], object], part: object = None) -> None:
        mark = uuid.uuid4().hex
        self._around = event(make(mark)).split(encode(mark))
        self._part = encode(part)
        assert len(self._around) > 1, "the text is nowhere in it"

    def of(self, text: str, part: object = None) -> bytes:
        with_text = encode(text).join(self._around)
        # No text looks like an object: its quotes are escaped.
        return with_text if part is None else with_text.replace(self._part, encode(part))


@dataclass(frozen=True, slots=True)
class Ending:
    """How a stream ends: with an event of its own for an error, and with what every stream has last.

    last: goes out together with the end of the response.
    """

    failure: Callable[[ApiError], bytes]
    last: bytes

    async def mended(self, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The same events, but for an error one that tells of it."""
        try:
            async for chunk in events:
                yield chunk
        except ApiError as error:
            yield self.failure(error)
        except Exception:
            logger.exception("a stream has failed")
            yield self.failure(ApiError(500, "internal error; the server's log has it"))


OPENAI_ENDING = Ending(lambda error: b"data: %b\n\n" % encode_error(error), b"data: [DONE]\n\n")


@asynccontextmanager
async def closing(receive: Receive, close: Callable[[], None]) -> AsyncGenerator[None, None]:
    """Call `close` when the client goes away, and in any case at the end."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        close()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        close()


async def while_there(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What comes of it, unless the client goes away, which cancels it.  Raises a 499 then."""
    task, is_gone = asyncio.create_task(work), False

    def leave() -> None:
        nonlocal is_gone
        if not task.done():
            is_gone = task.cancel()

    try:
        async with closing(request.receive, leave):
            return await task
    except asyncio.CancelledError:
        if is_gone:
            raise ApiError(CLIENT_GONE, "the client has gone") from None
        raise


class Script(Protocol):
    """What a stream says."""

    def chunks(self) -> AsyncIterator[bytes]:
        """All of it, as it comes."""
        ...

    def pass_on(self, write: Callable[[bytes], None], can_write: Callable[[], bool]) -> None:
        """While `chunks` would have to wait, give what comes to `write`, if it can."""
        ...

    def close(self) -> None:
        """Nobody listens any more."""
        ...


class EventStream(Response):
    """Sends events as they come; a slow reader holds up nobody else.

    Where the connection tells whether it takes more (`FLOW`), most are written without waking this task, and
    past the middleware, which looks at how an answer starts alone.
    """

    media_type = "text/event-stream"

    def __init__(self, script: Script, ending: Ending) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._script, self._ending = script, ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = scope.get("extensions", {}).get(FLOW, {})
        flow: Flow | None = connection.get("flow")
        direct: Send = connection.get("send", send)

        def write(chunk: bytes) -> None:
            if chunk:
                send_at_once(direct, {"type": "http.response.body", "body": chunk, "more_body": True})

        async with closing(receive, self._script.close):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if flow is not None:
                self._script.pass_on(write, lambda: not flow.write_paused)
            async for chunk in self._ending.mended(self._script.chunks()):
                if chunk:
                    await direct({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": self._ending.last})


class Flow(Protocol):
    """A connection's, as uvicorn keeps it."""

    @property
    def write_paused(self) -> bool:
        """Does `send` wait for the reader?"""
        ...


def send_at_once(send: Send, message: Message) -> None:
    """`await send(message)`, by whoever cannot wait, on a connection that would not."""
    for _ in send(message).__await__():
        raise RuntimeError("a connection that took more has made its writer wait")
