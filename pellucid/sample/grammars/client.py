"""The grammar server as its owner sees it: is this a language that can be used?

Asked before a request goes to the engine, which then only reads.  What has been found is remembered, under a
lock of its own that nobody holds for longer than it takes to look it up.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pellucid.sample.grammars.base import BACKEND, GrammarSpec, Spelling
from pellucid.sample.grammars.wire import LENGTH, Compile, Verdict, decode_verdict, frame, read_frame

logger = logging.getLogger(__name__)
MOST_VERDICTS = 4096
MOST_HELD = 256
MOST_WAITING = 4096  # connections that the server has not accepted yet
SHORTEST_LIFE, MOST_SHORT_LIVES = 30.0, 5  # seconds; a server that ends sooner so often in a row is given up
MOST_STOPPED, LOOKS = 10.0, 20  # seconds that a signal may stop it, and how often in these it is looked at
PIECE = 1 << 16  # bytes that are sent at once, so that an event loop does other things in between
GONE = Verdict("cannot be compiled: the process that compiles has ended; send it again", is_final=False)


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of the grammar server, ready to be sent."""

    digest: str
    frame: bytes = field(repr=False)


class GrammarClient:
    """Owns a grammar server, which starts when it is first needed.  Any thread may ask."""

    def __init__(self, make_spelling: Callable[[], Spelling], *, most_held: int = MOST_HELD) -> None:
        """most_held: languages that are kept in their compiled form, each in some MiB."""
        self._make_spelling, self._most_held = make_spelling, most_held
        self._start_lock = threading.Lock()
        self._process: Supervised | None = None
        self._verdict_lock = threading.Lock()  # held to look something up, and for nothing else
        self._verdicts: OrderedDict[str, Verdict] = OrderedDict()

    @property
    def address(self) -> str:
        """Where the server is, or will be; starts it."""
        with self._start_lock:
            if self._process is None:
                self._process = Supervised(self._make_spelling(), self._most_held)
                weakref.finalize(self, self._process.end)
            return self._process.address

    def warm_up(self) -> None:
        """Have the server running before it is asked."""
        if importlib.util.find_spec(BACKEND) is not None:
            self.address  # noqa: B018

    def question(self, spec: GrammarSpec, seconds: float, client: str = "") -> Question:
        """Write down what to ask.  Takes some milliseconds for each megabyte.

        seconds: most that a compile may take of a processor's time.  client: who asks, of those who share it.
        """
        if importlib.util.find_spec(BACKEND) is None:
            raise ValueError(f"needs {BACKEND}; pip install 'pellucid[serve]'")
        try:
            digest = hashlib.sha256(f"{spec.kind} {spec.text}".encode()).hexdigest()
        except UnicodeEncodeError as error:
            raise ValueError(f"cannot be compiled: {error}") from error
        return Question(digest, frame(Compile(digest, spec.kind, spec.text, seconds, client)))

    def known(self, question: Question) -> Verdict | None:
        """What has been found before."""
        with self._verdict_lock:
            verdict = self._verdicts.get(question.digest)
            if verdict is not None:
                self._verdicts.move_to_end(question.digest)
            return verdict

    def ask(self, question: Question) -> Verdict:
        """Wait for what is found."""
        verdict = self.known(question)
        if verdict is None:
            try:
                with socket.socket(socket.AF_UNIX) as connection:
                    connection.connect(self.address)
                    connection.sendall(question.frame)
                    verdict = decode_verdict(read_frame(connection))
            except (EOFError, OSError):
                verdict = GONE
            self._note(question, verdict)
        return verdict

    async def ask_async(self, question: Question, address: str) -> Verdict:
        """The same, for an event loop; cancelled, it ends the compile.

        address: `self.address`, which may take long to ask for.
        """
        verdict = self.known(question)
        if verdict is None:
            try:
                verdict = await converse(address, question.frame)
            except (EOFError, OSError):
                verdict = GONE
            self._note(question, verdict)
        return verdict

    def shutdown(self) -> None:
        """End the server; languages that an engine reads end with its requests."""
        with self._start_lock:
            if self._process is not None:
                self._process.end()

    def _note(self, question: Question, verdict: Verdict) -> None:
        if not verdict.is_final:
            return
        with self._verdict_lock:
            self._verdicts[question.digest] = verdict
            if len(self._verdicts) > MOST_VERDICTS:
                self._verdicts.popitem(last=False)


async def converse(address: str, asked: bytes) -> Verdict:
    """Ask on a connection of its own, which ends with the answer, or with whoever waits for it."""
    reader, writer = await asyncio.open_unix_connection(address)
    try:
        for start in range(0, len(asked), PIECE):
            writer.write(asked[start : start + PIECE])
            await writer.drain()
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        return decode_verdict(await reader.readexactly(length))
    finally:
        writer.close()


class Supervised:
    """The server's process, started anew when it has ended by itself."""

    def __init__(self, spelling: Spelling, most_held: int) -> None:
        self._most_held = most_held
        # What its address is must be known to the system in about a hundred letters.
        self._folder = tempfile.TemporaryDirectory(prefix="pellucid-", dir="/tmp", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        (folder / "spelling").write_bytes(pickle.dumps(spelling))
        self.address = str(folder / "grammars")
        self._listener = socket.socket(socket.AF_UNIX)  # ours, so that who asks waits for the next server
        self._listener.bind(self.address)
        self._listener.listen(MOST_WAITING)
        self._is_over, self._owner = False, os.getpid()
        self._process = self._start()
        threading.Thread(target=self._watch, name="grammar server", daemon=True).start()

    def end(self) -> None:
        """End it and all languages' processes."""
        if not self._is_over and os.getpid() == self._owner:  # a fork of the owner has nothing to end
            self._is_over = True
            self._listener.close()
            self._end_group()
            self._folder.cleanup()

    def _start(self) -> subprocess.Popen[bytes]:
        """Its standard input tells it when we end, and is never written to."""
        file = self._listener.fileno()
        path = os.pathsep.join(filter(None, sys.path))
        return subprocess.Popen(
            [sys.executable, "-m", "pellucid.sample.grammars.server",
             self._folder.name, str(file), str(self._most_held)],
            stdin=subprocess.PIPE, stdout=2, pass_fds=(file,), process_group=0,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip

    def _end_group(self) -> int:
        """Also the languages, of which some may be stopped; the server's exit code."""
        if self._process.returncode is None:  # else its number may be another's by now
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.stdin is not None:
            self._process.stdin.close()
        return self._process.wait()

    def _was_stopped(self) -> bool:
        """Wait until a signal has stopped it and it goes on; False when it does not, or has ended."""
        flags = os.WEXITED | os.WSTOPPED | os.WNOWAIT
        os.waitid(os.P_PID, self._process.pid, flags)
        for _ in range(LOOKS):
            found = os.waitid(os.P_PID, self._process.pid, flags | os.WNOHANG)
            if found is None:
                return True
            if found.si_code != os.CLD_STOPPED or self._is_over:
                return False
            time.sleep(MOST_STOPPED / LOOKS)
        logger.error("the grammar server was stopped by a signal %.0f s ago, and is ended", MOST_STOPPED)
        return False

    def _watch(self) -> None:
        """In a thread: start it anew when it has ended by itself, or has been stopped for too long."""
        num_short = 0
        while True:
            began = time.monotonic()
            with suppress(ChildProcessError):  # `end` has waited for it
                while self._was_stopped():
                    pass
            if self._is_over:
                return
            logger.error("the grammar server has ended, with code %d", self._end_group())
            num_short = num_short + 1 if time.monotonic() - began < SHORTEST_LIFE else 0
            if num_short == MOST_SHORT_LIVES:
                self._listener.close()  # nobody waits for it any more
                return
            self._process = self._start()
