"""The websocket /xray: what the engines do, for the page; they are not looked at while nobody watches.

Each message is one frame of one engine.  Frames tell what has changed, so a watcher who reads too slowly
cannot skip some: it is sent away, may come again, and begins anew.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import cast
from urllib.parse import urlsplit

import msgspec
from fastapi import APIRouter, WebSocket, WebSocketDisconnect

from pellucid.async_llm import AsyncLLM
from pellucid.engine.statistics import EngineStats
from pellucid.engine.xray import Frame
from pellucid.server.context import server_of
from pellucid.types import FinishReason, Request, SeqUpdate

router = APIRouter()
PROTOCOL = "pellucid.xray"  # beside which browsers may bring a key
MOST_UNREAD = 100  # messages: some seconds
POLICY_VIOLATION, TRY_AGAIN = 1008, 1013  # why a websocket is closed

encode = msgspec.json.Encoder().encode
Queue = asyncio.Queue[bytes | None]  # None is the end


class Sight(msgspec.Struct):
    """A message."""

    engine: int
    num_engines: int
    stats: EngineStats
    first_tokens: list[float]  # seconds that requests have waited for theirs, since the message before
    frame: Frame


class Viewers:
    """Everybody who watches.  As an observer of the engine it learns when first tokens come."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._queues: set[Queue] = set()
        self._unanswered: dict[str, float] = {}  # request ids: arrival
        self._first_tokens: list[float] = []
        llm.watch(self)

    @contextmanager
    def watching(self) -> Generator[Queue, None, None]:
        """Within, the queue gets every message, beginning anew for all who watch."""
        queue = Queue(MOST_UNREAD)
        self._queues.add(queue)
        self._llm.view(self.show)
        try:
            yield queue
        finally:
            self._leave(queue)

    def show(self, engine: int, frame: Frame) -> None:
        """Send a frame to everybody."""
        stats = self._llm.stats_per_engine
        waits, self._first_tokens = self._first_tokens, []
        message = encode(Sight(engine, len(stats), stats[engine], waits, frame))
        for queue in list(self._queues):
            if queue.full():
                self._leave(queue)
                queue.get_nowait()
                queue.put_nowait(None)
            else:
                queue.put_nowait(message)

    def begins(self, request: Request) -> None:
        if self._queues:
            self._unanswered[request.id] = request.arrival

    def advances(self, update: SeqUpdate, finish_reason: FinishReason | None) -> None:
        if not self._unanswered:
            return
        is_first = bool(update.new_token_ids)
        if is_first or finish_reason is not None:
            arrival = self._unanswered.pop(update.request_id, None)
            if is_first and arrival is not None:
                self._first_tokens.append(time.monotonic() - arrival)

    def _leave(self, queue: Queue) -> None:
        if queue in self._queues:
            self._queues.remove(queue)
            if not self._queues:
                self._llm.view(None)
                self._unanswered.clear()


@router.websocket("/xray")
async def xray(socket: WebSocket) -> None:
    """Send frames until the watcher leaves."""
    if not _is_welcome(socket):
        await socket.close(POLICY_VIOLATION, "this page may not look at this server")
        return
    await socket.accept(PROTOCOL if PROTOCOL in socket.scope["subprotocols"] else None)
    with cast(Viewers, socket.app.state.viewers).watching() as queue:
        sender = asyncio.create_task(_send(socket, queue))
        try:
            while (await socket.receive())["type"] != "websocket.disconnect":
                pass
        finally:
            sender.cancel()


def _is_welcome(socket: WebSocket) -> bool:
    """Browsers let any page open websockets to any host, and say which page it is."""
    origin = socket.headers.get("origin")
    if origin is None or urlsplit(origin).netloc == socket.headers.get("host"):
        return True
    allowed = server_of(socket).options.allowed_origins
    return origin in allowed or "*" in allowed


async def _send(socket: WebSocket, queue: Queue) -> None:
    try:
        while (message := await queue.get()) is not None:
            await socket.send_text(message.decode())
        await socket.close(TRY_AGAIN, "read faster")
    except (WebSocketDisconnect, RuntimeError):
        pass  # the watcher has left; `receive` says so, too
