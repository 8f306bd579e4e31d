"""Server-sent events, and what happens when their reader has gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from pellucid.server.errors import ApiError, encode_error

logger = logging.getLogger(__name__)
encode = msgspec.json.Encoder().encode
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies pass on what they get


def event(value: object) -> bytes:
    """One event that carries `value` as JSON."""
    return b"data: %b\n\n" % encode(value)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a stream ends: with an event of its own for an error, and with what every stream has last."""

    failure: Callable[[ApiError], bytes]
    last: bytes

    async def after(self, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        try:
            async for chunk in events:
                yield chunk
        except ApiError as error:
            yield self.failure(error)
        except Exception:
            logger.exception("a stream has failed")
            yield self.failure(ApiError(500, "internal error; the server's log has it"))
        if self.last:
            yield self.last


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


class EventStream(Response):
    """Sends events as they come; a slow reader holds up nobody else."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._events, self._close = events, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with closing(receive, self._close):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for chunk in self._events:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
