"""Where requests are made ready: short ones at once, others in a thread, large ones in another process.

To read, check and render megabytes keeps the interpreter to itself, for up to seconds, and so would stop
every stream.  That process (`reader.py`) starts once the server is ready, and again when it is needed and has
died, or was ended because a signal had stopped it.  It is sent a large request only when it can begin with
it; those that wait do so here, where they can still be dropped.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import sys
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TypeVar, cast

import psutil
from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel

from pellucid.server.errors import SHUTTING_DOWN, ApiError, overloaded
from pellucid.server.reader import HEAD, MAX_AT_ONCE, MODULE, Refusal, Work
from pellucid.server.renderer import Renderer
from pellucid.server.route import Route

logger = logging.getLogger(__name__)
T = TypeVar("T")
U = TypeVar("U")
SHORT = 4096  # bytes of a body; it takes less time than finding a thread
LARGE = 2**16  # bytes of a body, from which on another process reads it
NUM_THREADS = 4  # that make requests ready; tokenizers work without the interpreter's lock
MAX_LARGE_BYTES = 2**28  # of all large bodies that wait to be read or are being read
PIPE_BYTES = 2**20  # that may wait to be read
MOST_STOPPED, LOOKS = 10.0, 20  # seconds that a signal may stop the reader, and how often it is looked at
DIED = "the process that reads large requests has died, perhaps for want of memory; try again"


class Preprocessor:
    """Makes requests ready for their answers.

    max_large_bytes: of all large bodies together; one alone may have more.
    """

    def __init__(self, renderer: Renderer, max_large_bytes: int = MAX_LARGE_BYTES) -> None:
        self._renderer = renderer
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="preprocess")
        self._reader: _Reader | None = None
        self._starting = asyncio.Lock()
        self._is_shut = False
        self._turns = asyncio.Semaphore(MAX_AT_ONCE)
        self._num_large_bytes, self._max_large_bytes = 0, max_large_bytes

    async def prepare(self, route: Route, body: BaseModel, num_bytes: int) -> object:
        """What `route.answer` wants.  Raises ApiError."""
        if num_bytes <= SHORT:
            return route.prepare(body, self._renderer)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, route.prepare, body, self._renderer)

    async def in_thread(self, prepare: Callable[[T, Renderer], U], work: T) -> U:
        """What `prepare` makes of work that is known here alone."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, prepare, work, self._renderer)

    async def take(self, route: Route, body: BaseModel, request: Request) -> Response:
        """Answer a request that somebody else has parsed."""
        work = await self.prepare(route, body, len(await request.body()))
        return await route.answer(work, request)

    async def read(self, path: str, body: bytes) -> object:
        """The same as `prepare`, of a body that nobody has parsed yet.  path: of the route.

        Cancelling drops a body that has not been sent to the reader.  Raises a 503 beyond `max_large_bytes`.
        """
        with self._counted(len(body)):
            await self._turns.acquire()
            # What has been sent is read to its end, and keeps its turn until then, even if this is cancelled.
            asking = asyncio.create_task(self._ask(path, body))
            asking.add_done_callback(lambda _: self._turns.release())
            packed = await asyncio.shield(asking)
            loop = asyncio.get_running_loop()
            answer = await loop.run_in_executor(self._threads, pickle.loads, packed)
        if isinstance(answer, Refusal):
            raise ApiError(answer.status, answer.message, param=answer.param)
        return cast(Work, answer).value

    async def warm_up(self) -> None:
        """Have the process running before it is needed."""
        await self._running_reader()

    @contextmanager
    def _counted(self, num_bytes: int) -> Generator[None, None, None]:
        held, most = self._num_large_bytes, self._max_large_bytes
        if held and held + num_bytes > most:
            raise overloaded(
                f"large requests of {held:,} bytes are read or wait for it, this one has {num_bytes:,}, "
                f"at most {most:,} are taken; try again later"
            )
        self._num_large_bytes += num_bytes
        try:
            yield
        finally:
            self._num_large_bytes -= num_bytes

    async def _ask(self, path: str, body: bytes) -> bytes:
        reader = await self._running_reader()
        return await reader.ask(path, body)

    async def _running_reader(self) -> _Reader:
        async with self._starting:
            if self._is_shut:
                raise overloaded(SHUTTING_DOWN)
            if self._reader is None or self._reader.is_gone:
                self._reader = await _Reader.start(self._renderer)
            return self._reader

    async def shutdown(self) -> None:
        self._is_shut = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._reader is not None:
            await self._reader.end()


class _Reader:
    """The process that reads large requests, several at a time; this end of its pipes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process, self._out, self._in = process, process.stdin, process.stdout
        self._answers: dict[int, asyncio.Future[bytes]] = {}  # by number
        self._num_asked = 0
        self.is_gone = False
        self._listener = asyncio.create_task(self._listen())
        self._watch: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, renderer: Renderer) -> _Reader:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", MODULE),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=PIPE_BYTES,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        reader = cls(process)
        await reader._send(0, pickle.dumps(renderer.facts))
        return reader

    async def ask(self, path: str, body: bytes) -> bytes:
        """A pickled `Work` or `Refusal`.  Raises a 503 if the process dies."""
        if self.is_gone:
            raise overloaded(DIED)
        self._num_asked += 1
        number = self._num_asked
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._end_if_stopped())
        try:
            await self._send(number, path.encode() + b"\n" + body)
            return await answer
        finally:
            self._answers.pop(number, None)

    async def end(self) -> None:
        """It leaves when nobody speaks to it any more, but perhaps not at once."""
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._listener

    async def _send(self, number: int, packed: bytes) -> None:
        self._out.write(HEAD.pack(number, len(packed)))
        self._out.write(packed)
        with suppress(ConnectionError):  # `_listen` tells those who wait
            await self._out.drain()

    async def _end_if_stopped(self) -> None:
        """As long as somebody waits for it: else they would for ever, and all who come later."""
        num_stopped = 0
        while self._answers and num_stopped < LOOKS:
            await asyncio.sleep(MOST_STOPPED / LOOKS)
            is_stopped = False
            with suppress(psutil.NoSuchProcess):
                is_stopped = psutil.Process(self._process.pid).status() == psutil.STATUS_STOPPED
            num_stopped = num_stopped + 1 if is_stopped else 0
        if num_stopped == LOOKS:
            logger.error("the process that reads large requests was stopped by a signal, and is ended")
            with suppress(ProcessLookupError):
                self._process.kill()

    async def _listen(self) -> None:
        try:
            while True:
                number, length = HEAD.unpack(await self._in.readexactly(HEAD.size))
                packed = await self._in.readexactly(length)
                answer = self._answers.get(number)
                if answer is not None and not answer.done():
                    answer.set_result(packed)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self.is_gone = True
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(overloaded(DIED))
        await self._process.wait()
