"""The websocket /xray: what the engines do, for the page; they are not looked at while nobody watches.

Each message is one frame of one engine.  Frames tell what has changed, so none can be left out; for a watcher
who reads too slowly those that wait become one, which is no larger than the engine's whole state.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import cast
from urllib.parse import urlsplit

import msgspec
from fastapi import APIRouter, WebSocket, WebSocketDisconnect

from pellucid.async_llm import AsyncLLM
from pellucid.engine.statistics import EngineStats
from pellucid.engine.xray import MOST_ROWS, Flat, Frame, StepView
from pellucid.server.context import server_of
from pellucid.types import FinishReason, Request, SeqUpdate

router = APIRouter()
PROTOCOL = "pellucid.xray"  # beside which browsers may bring a key
MOST_WATCHERS = 16
MOST_WAITS = 1000  # of requests for their first tokens, in a message
SIZE = 4  # numbers of a BlockView and of a RowView
POLICY_VIOLATION, TRY_AGAIN = 1008, 1013  # why a websocket is closed

encode = msgspec.json.Encoder().encode


class Sight(msgspec.Struct):
    """A message."""

    engine: int
    num_engines: int
    stats: EngineStats
    first_tokens: list[float]  # seconds that requests have waited for theirs, since the message before
    frame: Frame


class Unsent:
    """What a watcher has not been sent of one engine: a message, or several as one."""

    def __init__(self, sight: Sight, message: bytes) -> None:
        self._sight = sight
        self._message: bytes | None = message  # None: to be written
        self._blocks: list[dict[int, Flat]] | None = None  # of several messages, per KV group: by block

    def add(self, sight: Sight) -> None:
        """The next message; costs what it tells, not what is there."""
        before, frame = self._sight.frame, sight.frame
        if frame.is_first:  # all before is void
            self._blocks = None
        else:
            if self._blocks is None:
                self._blocks = [_by_block(flat) for flat in before.blocks]
            for blocks, flat in zip(self._blocks, frame.blocks, strict=True):
                blocks.update(_by_block(flat))
            frame = replace(frame, is_first=before.is_first, steps=_newest(before.steps + frame.steps))
        waits = (self._sight.first_tokens + sight.first_tokens)[-MOST_WAITS:]
        self._sight = Sight(sight.engine, sight.num_engines, sight.stats, waits, frame)
        self._message = None

    def message(self) -> bytes:
        if self._message is not None:
            return self._message
        sight = self._sight
        if self._blocks is not None:
            flats = [[number for view in blocks.values() for number in view] for blocks in self._blocks]
            sight.frame = replace(sight.frame, blocks=flats)
        return encode(sight)


def _by_block(flat: Flat) -> dict[int, Flat]:
    return {flat[i]: flat[i : i + SIZE] for i in range(0, len(flat), SIZE)}


def _newest(steps: list[StepView]) -> list[StepView]:
    """The last ones, with no more rows than a frame has."""
    num, num_rows = 0, 0
    for step in reversed(steps):
        num_rows += len(step.rows) // SIZE
        if num and num_rows > MOST_ROWS:
            break
        num += 1
    return steps[len(steps) - num :]


class Watcher:
    """Somebody who watches."""

    def __init__(self) -> None:
        self._unsent: dict[int, Unsent] = {}  # by engine
        self._has_news = asyncio.Event()

    def put(self, sight: Sight, message: bytes) -> None:
        """message: the sight, written."""
        unsent = self._unsent.get(sight.engine)
        if unsent is None:
            self._unsent[sight.engine] = Unsent(sight, message)
        else:
            unsent.add(sight)
        self._has_news.set()

    async def get(self) -> bytes:
        """The next message, when there is one."""
        await self._has_news.wait()
        message = self._unsent.pop(next(iter(self._unsent))).message()
        if not self._unsent:
            self._has_news.clear()
        return message


class Viewers:
    """Everybody who watches.  As an observer of the engine it learns when first tokens come."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._watchers: set[Watcher] = set()
        self._unanswered: dict[str, float] = {}  # request ids: arrival
        self._first_tokens: list[float] = []
        llm.watch(self)

    @property
    def is_full(self) -> bool:
        return len(self._watchers) >= MOST_WATCHERS

    @contextmanager
    def watching(self) -> Generator[Watcher, None, None]:
        """Within, the watcher gets every message, beginning anew for all who watch."""
        watcher = Watcher()
        self._watchers.add(watcher)
        self._llm.view(self.show)
        try:
            yield watcher
        finally:
            self._watchers.remove(watcher)
            if not self._watchers:
                self._llm.view(None)
                self._unanswered.clear()

    def show(self, engine: int, frame: Frame) -> None:
        """Send a frame to everybody."""
        stats = self._llm.stats_per_engine
        waits, self._first_tokens = self._first_tokens, []
        sight = Sight(engine, len(stats), stats[engine], waits, frame)
        message = encode(sight)
        for watcher in self._watchers:
            watcher.put(sight, message)

    def begins(self, request: Request) -> None:
        if self._watchers:
            self._unanswered[request.id] = request.arrival

    def advances(self, update: SeqUpdate, finish_reason: FinishReason | None) -> None:
        if not self._unanswered:
            return
        is_first = bool(update.new_token_ids)
        if is_first or finish_reason is not None:
            arrival = self._unanswered.pop(update.request_id, None)
            if is_first and arrival is not None:
                self._first_tokens.append(time.monotonic() - arrival)


@router.websocket("/xray")
async def xray(socket: WebSocket) -> None:
    """Send frames until the watcher leaves."""
    if not _is_welcome(socket):
        await socket.close(POLICY_VIOLATION, "this page may not look at this server")
        return
    viewers = cast(Viewers, socket.app.state.viewers)
    await socket.accept(PROTOCOL if PROTOCOL in socket.scope["subprotocols"] else None)
    if viewers.is_full:
        await socket.close(TRY_AGAIN, f"{MOST_WATCHERS} watch already")
        return
    with viewers.watching() as watcher:
        sender = asyncio.create_task(_send(socket, watcher))
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


async def _send(socket: WebSocket, watcher: Watcher) -> None:
    try:
        while True:
            await socket.send_text((await watcher.get()).decode())
    except (WebSocketDisconnect, RuntimeError):
        pass  # the watcher has left; `receive` says so, too
