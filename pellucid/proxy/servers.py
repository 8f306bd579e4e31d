"""The servers behind a router: which of them live, how much each has to do, which beginnings it has seen."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from pellucid.cli.load.http import ConnectionPool, Target
from pellucid.router.router import PrefixMemory

logger = logging.getLogger(__name__)
PIECE = 1024  # characters of a prompt that are remembered as one
NUM_PIECES = 100_000  # that are remembered of each server
HEALTH_SECONDS = 2.0  # between two looks at a server, and most that its answer may take
SILENT_SECONDS = 30.0  # without one, behind which what it was asked is asked of another one
SLACK = 8  # servers within 1/8 of the least load are as good as equal


class Gone(Exception):
    """A server has not answered, or not to the end."""


@dataclass(eq=False)
class Answer:
    """A server's response, as it comes.  Also the sink of its connection."""

    status: int = 0
    task: asyncio.Task[None] | None = None  # the exchange
    _pieces: asyncio.Queue[bytes | BaseException | None] = field(default_factory=asyncio.Queue)

    def take(self, status: int, data: bytes, now: float) -> None:
        self.status = status
        self._pieces.put_nowait(data)

    def end(self, task: asyncio.Task[None]) -> None:
        """The exchange is over, well or not."""
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        self._pieces.put_nowait(error)

    def give_up(self, reason: str) -> None:
        """Whoever reads is told that the server is lost."""
        self._pieces.put_nowait(Gone(reason))
        self.cancel()

    def cancel(self) -> None:
        """Nobody reads on: the server is told by the end of the connection."""
        if self.task is not None:
            self.task.cancel()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Raises Gone if it breaks off."""
        while True:
            piece = await self._pieces.get()
            if not isinstance(piece, bytes):
                self._pieces.put_nowait(piece)  # the end stays the end, for whoever asks again
            if piece is None:
                return
            if isinstance(piece, BaseException):
                raise Gone(str(piece) or type(piece).__name__) from piece
            yield piece


class Server:
    """One of them.  load: pieces of prompts that it has been handed and has not computed."""

    def __init__(self, url: str, patience: float = SILENT_SECONDS) -> None:
        """patience: seconds that it may say nothing, not even how it is, as one that a signal has stopped."""
        self._patience, self._heard = patience, time.monotonic()
        self._answers: set[Answer] = set()  # under way
        self.target = Target.parse(url, None)
        self.url, self.load, self.num_running, self.is_up = self.target.url(""), 0, 0, True
        self.known = PrefixMemory(NUM_PIECES)
        self._pool = ConnectionPool(self.target)

    async def ask(
        self, method: str, route: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[Answer, bytes]:
        """Send a request; its answer, and the first bytes of that.  Raises Gone if none come."""
        answer = Answer()
        whole = request_bytes(self.target, method, route, body, headers)
        answer.task = asyncio.create_task(self._pool.exchange(whole, answer))
        answer.task.add_done_callback(answer.end)
        self._answers.add(answer)
        answer.task.add_done_callback(lambda _: self._answers.discard(answer))
        try:
            first = await anext(answer.pieces(), b"")
        except BaseException:
            answer.cancel()
            raise
        return answer, first

    async def whole(
        self, method: str, route: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        """The same, all of it.  Raises Gone."""
        answer, first = await self.ask(method, route, body, headers)
        try:
            return answer.status, b"".join([first, *[piece async for piece in answer.pieces()]])
        except BaseException:
            answer.cancel()
            raise

    async def look(self) -> None:
        """Does it live, and its engine?"""
        is_up, of_engine = False, 0.0
        with suppress(Gone, TimeoutError):
            said = await self._told("/health")
            is_up = not said  # what is wrong is told in words
            self._heard = time.monotonic()
            of_engine = silence_in(await self._told("/load"))
        silence = time.monotonic() - self._heard
        self.note(is_up=is_up and of_engine <= self._patience)
        if max(silence, of_engine) > self._patience:
            who = "its engine" if of_engine > silence else "it"
            for answer in self._answers:
                answer.give_up(f"{who} has said nothing for {max(silence, of_engine):.0f} s")

    async def _told(self, route: str) -> bytes:
        """Raises Gone, or TimeoutError."""
        return (await asyncio.wait_for(self.whole("GET", route, b"", {}), HEALTH_SECONDS))[1]

    def note(self, *, is_up: bool) -> None:
        if is_up != self.is_up:
            logger.warning("%s %s", self.url, "is back" if is_up else "does not answer")
        self.is_up = is_up

    def close(self) -> None:
        self._pool.close()


def silence_in(load: bytes) -> float:
    """Seconds since a server's engine has spoken that has something to do; vLLM's do not say."""
    with suppress(ValueError, AttributeError, TypeError):
        return float(json.loads(load).get("engine_silence", 0.0))
    return 0.0


def request_bytes(target: Target, method: str, route: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    """A whole request."""
    host = f"[{target.host}]" if ":" in target.host else target.host
    lines = [f"{method} {target.path}{route} HTTP/1.1", f"Host: {host}:{target.port}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


@dataclass
class Fleet:
    """All of them.  Those of a role stand in for the other's when none of that is left."""

    prefill: list[Server]
    decode: list[Server]

    @property
    def all(self) -> list[Server]:
        return [*self.prefill, *self.decode]

    def for_prompt(self, digests: Sequence[bytes]) -> list[Server]:
        """Servers that may compute a prompt, the best first: least to do, then most of it known."""
        return ranked([server for server in self.prefill if server.is_up], digests)

    def for_decode(self) -> list[Server]:
        """Servers that may go on, the best first: the least busy."""
        up = [server for server in self.decode if server.is_up]
        return sorted(up, key=lambda s: s.num_running) + ranked([s for s in self.prefill if s.is_up], [])

    async def watch(self) -> None:
        """Look after all of them, for ever."""
        while True:
            await asyncio.gather(*(server.look() for server in self.all))
            await asyncio.sleep(HEALTH_SECONDS)


def ranked(servers: Sequence[Server], digests: Sequence[bytes]) -> list[Server]:
    if not servers:
        return []
    least = min(server.load for server in servers)
    most = least + least // SLACK + len(digests)
    near = [server for server in servers if server.load <= most]
    far = [server for server in servers if server.load > most]
    near.sort(key=lambda server: (-server.known.num_leading(digests), server.load))
    return near + sorted(far, key=lambda server: server.load)


def digests_of(body: Mapping[str, object]) -> list[bytes]:
    """Of a prompt, or the messages of a chat, in pieces, each over all before it."""
    text = json.dumps([body.get("model"), body.get("messages") or body.get("prompt"), body.get("tools")])
    digest, digests = b"", list[bytes]()
    for start in range(0, len(text), PIECE):
        digest = hashlib.sha256(digest + text[start : start + PIECE].encode()).digest()
        digests.append(digest)
    return digests
