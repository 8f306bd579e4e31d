"""The websocket /xray: what the engines do, for the page; they are not looked at while nobody watches.

Each message is one frame of one engine.  Frames tell what has changed, so none can be left out; for a watcher
who reads too slowly those that wait become one, which is no larger than the engine's whole state.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import msgspec
from fastapi import APIRouter, WebSocket, WebSocketDisconnect

from pellucid.async_llm import AsyncLLM
from pellucid.lora.request import AdapterRef
from pellucid.observe.statistics import EngineStats
from pellucid.observe.xray import MOST_ROWS, Flat, Frame, StepView
from pellucid.server.context import server_of
from pellucid.types import FinishReason, Request, SeqUpdate

router = APIRouter()
PROTOCOL = "pellucid.xray"  # beside which browsers may bring a key
MOST_WATCHERS = 16
MOST_WAITS = 1000  # in a message
SIZE = 4  # numbers of a PageView and of a RowView
POLICY_VIOLATION, INTERNAL_ERROR, TRY_AGAIN = 1008, 1011, 1013  # why a websocket is closed
MOST_REASON = 123  # bytes that say so in words

encode = msgspec.json.Encoder().encode


class Wait(NamedTuple):
    """For a request's first token, in seconds."""

    in_queue: float  # before its first step
    whole: float


class Gaps(msgspec.Struct):
    """Times between two steps' tokens of an answer, in seconds.  Of streams: the others' are not known."""

    num: int = 0
    sum: float = 0.0
    longest: float = 0.0

    def note(self, num_steps: int, seconds: float) -> None:
        """So many steps have followed a token, in so many seconds all together."""
        self.num += num_steps
        self.sum += seconds
        self.longest = max(self.longest, seconds / num_steps)

    def plus(self, newer: Gaps) -> Gaps:
        return Gaps(self.num + newer.num, self.sum + newer.sum, max(self.longest, newer.longest))


class AdapterView(NamedTuple):
    """An adapter that requests may name, or that some still run with."""

    name: str
    num_under_way: int  # requests, waiting or running
    num_ended: int  # since the server began


class Requests(msgspec.Struct):
    """What has become of the requests of all engines."""

    num_failed: int = 0  # since the server began
    # Since the message before, of those that began while somebody watched:
    waits: list[Wait] = []
    gaps: Gaps = msgspec.field(default_factory=Gaps)
    adapters: list[AdapterView] = []  # now

    def plus(self, newer: Requests) -> Requests:
        waits = (self.waits + newer.waits)[-MOST_WAITS:]
        return Requests(newer.num_failed, waits, self.gaps.plus(newer.gaps), newer.adapters)


class Sight(msgspec.Struct):
    """A message."""

    engine: int
    num_engines: int
    stats: EngineStats
    requests: Requests
    frame: Frame


class Unsent:
    """What a watcher has not been sent of one engine: a message, or several as one."""

    def __init__(self, sight: Sight, message: bytes) -> None:
        self._sight = sight
        self._message: bytes | None = message  # None: to be written
        self._pages: dict[int, Flat] | None = None  # of several messages: by page

    def add(self, sight: Sight) -> None:
        """The next message; costs what it tells, not what is there."""
        before, frame = self._sight.frame, sight.frame
        if frame.is_first:  # all before is void
            self._pages = None
        else:
            if self._pages is None:
                self._pages = _by_page(before.pages)
            self._pages.update(_by_page(frame.pages))
            frame = replace(frame, is_first=before.is_first, steps=_newest(before.steps + frame.steps))
        requests = self._sight.requests.plus(sight.requests)
        self._sight = Sight(sight.engine, sight.num_engines, sight.stats, requests, frame)
        self._message = None

    def message(self) -> bytes:
        if self._message is not None:
            return self._message
        sight = self._sight
        if self._pages is not None:
            flat = [number for view in self._pages.values() for number in view]
            sight.frame = replace(sight.frame, pages=flat)
        return encode(sight)


def _by_page(flat: Flat) -> dict[int, Flat]:
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


@dataclass(slots=True)
class _Life:
    """A request under way.  Seconds of time.monotonic."""

    arrival: float
    is_quiet: bool  # after its first token all others come at once
    last_token: float | None = None


class AdapterCounts:
    """How many requests each adapter has had.  served: names that requests may use, as they are now."""

    def __init__(self, served: Collection[str]) -> None:
        self._served = served
        self._names: dict[str, str] = {}  # by request id: those under way
        self._num_under_way, self._num_ended = Counter[str](), Counter[str]()

    def begins(self, request: Request) -> None:
        if request.lora is not None:
            name = self._names[request.id] = AdapterRef.decode(request.lora).name
            self._num_under_way[name] += 1

    def ends(self, request_id: str) -> None:
        name = self._names.pop(request_id, None)
        if name is not None:
            self._num_under_way[name] -= 1
            self._num_ended[name] += 1

    def views(self) -> list[AdapterView]:
        names = dict.fromkeys([*self._served, *(+self._num_under_way)])
        return [AdapterView(name, self._num_under_way[name], self._num_ended[name]) for name in names]


class Viewers:
    """Everybody who watches.  As an observer of the engine it learns when tokens come."""

    def __init__(self, llm: AsyncLLM, adapters: Collection[str] = ()) -> None:
        """adapters: their names, as they are now."""
        self._llm = llm
        self._adapters = AdapterCounts(adapters)
        self._watchers: set[Watcher] = set()
        self._lives: dict[str, _Life] = {}  # by request id: those that began while somebody watched
        self._news = Requests()
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
                self._lives.clear()

    async def until_death(self) -> str:
        """Why nothing will be seen any more, as soon as that is so."""
        return await self._llm.died()

    def show(self, engine: int, frame: Frame) -> None:
        """Send a frame to everybody."""
        stats = self._llm.stats_per_engine
        news, self._news = self._news, Requests(self._news.num_failed)
        news.adapters = self._adapters.views()
        sight = Sight(engine, len(stats), stats[engine], news, frame)
        message = encode(sight)
        for watcher in self._watchers:
            watcher.put(sight, message)

    def begins(self, request: Request) -> None:
        self._adapters.begins(request)
        if self._watchers:
            self._lives[request.id] = _Life(request.arrival, request.is_quiet)

    def advances(self, update: SeqUpdate, finish_reason: FinishReason | None) -> None:
        self._news.num_failed += finish_reason is FinishReason.ERROR
        if finish_reason is not None:
            self._adapters.ends(update.request_id)
        life = self._lives.get(update.request_id)
        if life is None:
            return
        if update.new_token_ids:
            self._note_tokens(life, update)
        if finish_reason is not None:
            del self._lives[update.request_id]

    def _note_tokens(self, life: _Life, update: SeqUpdate) -> None:
        now = time.monotonic()
        if life.last_token is None:
            self._news.waits.append(Wait(update.first_scheduled - life.arrival, now - life.arrival))
        elif not life.is_quiet:
            self._news.gaps.note(update.num_steps, now - life.last_token)
        life.last_token = now


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
        await _show(socket, viewers, watcher)


async def _show(socket: WebSocket, viewers: Viewers, watcher: Watcher) -> None:
    """Send what the watcher gets, until he leaves or the engine dies."""
    death = asyncio.create_task(viewers.until_death())
    tasks = [death, asyncio.create_task(_send(socket, watcher)), asyncio.create_task(_until_left(socket))]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if done == {death}:
            reason = death.result().encode()[:MOST_REASON].decode(errors="ignore")
            await socket.close(INTERNAL_ERROR, reason)
    finally:
        for task in tasks:
            task.cancel()


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
        pass  # the watcher has left


async def _until_left(socket: WebSocket) -> None:
    while (await socket.receive())["type"] != "websocket.disconnect":
        pass
