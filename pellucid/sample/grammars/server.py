"""The grammar server: a process that forks one for each language, and shares out who may compile when.

It has imported the library once, so a language's process begins within some milliseconds, and costs no more
memory than what it compiles.  What strangers wrote may hang, fill the memory or crash: there it does so to
nobody else.  A language is compiled once; whoever asks for it again is told at once, or led to its process.

A compile that takes longer than `QUICK_SECONDS` goes on in turns with others of that kind, and the client
with the fewest compiles begins the next one: there is room for everybody's next question, and none waits
for good.
"""

from __future__ import annotations

import gc
import os
import pickle
import selectors
import shutil
import signal
import socket
import sys
import time
import traceback
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import NoReturn, cast

from pellucid.sample.grammars.base import BACKEND, GRAMMARS, GrammarBackend, Spelling
from pellucid.sample.grammars.language import QUICK_SECONDS, run_language
from pellucid.sample.grammars.wire import (
    LENGTH,
    Attach,
    Compile,
    Left,
    Verdict,
    decode_news,
    decode_question,
    frame,
    read_frame,
)

TURN_SECONDS = 0.5  # of a slow compile, while others wait for theirs
PATIENCE = 8  # times the seconds of a compile, on a machine that is busy with other things
MOST_COMPILING = 64  # languages of which processes are under way, most of them stopped
MOST_BYTES = 4 << 30  # of memory, beyond which languages are let go of that nobody is attached to
MOST_TEXT = 512 << 20  # letters of languages that are known, so that they can be compiled again
TICK = 0.02  # seconds between two looks at the clock, while there is anything to share out
PIECE = 1 << 20  # bytes that are read at once


@dataclass(eq=False)
class Visitor:
    """Who has connected, and asks or waits."""

    connection: socket.socket
    said: bytearray = field(default_factory=bytearray)
    language: Language | None = None  # that it waits for
    attaches: bool = False


@dataclass(eq=False)
class Language:
    """What is known of a language.  Its process, if there is one, compiles it or holds it."""

    question: Compile
    waiting: list[Visitor] = field(default_factory=list)
    pid: int = 0
    control: socket.socket | None = None
    num_attached: int = 0
    turn_began: float = 0.0  # of a compile; seconds of time.monotonic
    seconds: float = 0.0  # of the turns before
    num_bytes: int = 0  # of its process, once it is compiled

    @property
    def is_wanted(self) -> bool:
        """Does an engine wait for it?"""
        return any(visitor.attaches for visitor in self.waiting)

    def seconds_at(self, now: float) -> float:
        return self.seconds + now - self.turn_began


class GrammarServer:
    """One thread, one loop; nothing in it takes long, and forks take some milliseconds."""

    def __init__(
        self, listener: socket.socket, backend: GrammarBackend, spelling: Spelling, *, most_held: int
    ) -> None:
        """most_held: languages whose processes are kept, besides those that are compiled."""
        self._most_held = most_held
        self._listener, self._backend, self._spelling = listener, backend, spelling
        self._selector = selectors.DefaultSelector()
        self._visitors: set[Visitor] = set()
        # By digest, the last asked for last: all that are known, and of these the compiled ones.
        self._languages: OrderedDict[str, Language] = OrderedDict()
        self._held: OrderedDict[str, Language] = OrderedDict()
        self._num_letters = 0  # of their texts
        # Compiles: not begun, begun just now, in their turn, and stopped until it is theirs again.
        self._queued: deque[Language] = deque()
        self._quick: list[Language] = []
        self._slow: list[Language] = []
        self._stopped: deque[Language] = deque()
        self._dying: dict[int, Language | None] = {}  # by process id, with whose end somebody waits for
        self._num_lanes = max(1, min(4, (os.cpu_count() or 1) // 4))  # compiles of each kind at a time

    def run(self, owner: int) -> None:
        """owner: a file descriptor that ends with the process to serve."""
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(owner, selectors.EVENT_READ, None)
        while True:
            is_idle = not self._is_sharing_out and not self._dying
            for key, _ in self._selector.select(None if is_idle else TICK):
                if key.data is None:
                    self._end()
                    return
                cast("Callable[[], None]", key.data)()
            self._bury()
            self._share_out(time.monotonic())

    # Visitors

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has gone; or no file is left, until some visitors have left
            time.sleep(TICK)
            return
        connection.setblocking(False)
        visitor = Visitor(connection)
        self._visitors.add(visitor)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear(visitor))

    def _hear(self, visitor: Visitor) -> None:
        if visitor not in self._visitors:
            return  # it was answered since
        try:
            piece = visitor.connection.recv(PIECE)
        except BlockingIOError:
            return
        except ConnectionError:
            piece = b""
        if not piece:
            self._leave(visitor)
            return
        visitor.said += piece
        if len(visitor.said) < LENGTH.size:
            return
        (length,) = LENGTH.unpack_from(visitor.said)
        if len(visitor.said) == LENGTH.size + length and visitor.language is None:
            question = decode_question(memoryview(visitor.said)[LENGTH.size :])
            visitor.said = bytearray()
            self._ask(visitor, question)

    def _ask(self, visitor: Visitor, question: Compile | Attach) -> None:
        language = self._languages.get(question.digest)
        visitor.attaches = isinstance(question, Attach)
        if language is None:
            if isinstance(question, Attach):
                error = "is not known any more, so many others have come since; send the request again"
                self._answer(visitor, Verdict(error, is_final=False))
                return
            language = self._note(question)
        self._languages.move_to_end(question.digest)
        visitor.language = language
        language.waiting.append(visitor)
        if question.digest in self._held:
            self._held.move_to_end(question.digest)
            self._answer_all(language, Verdict())
        elif not language.pid and language not in (*self._queued, *self._dying.values()):
            self._queued.append(language)

    def _note(self, question: Compile) -> Language:
        """Remember a language, and forget those of which nothing is wanted, from the oldest on."""
        language = self._languages[question.digest] = Language(question)
        self._num_letters += len(question.text)
        for other in list(self._languages.values()):
            if self._num_letters <= MOST_TEXT:
                break
            if not other.pid and not other.waiting and other is not language:
                self._forget(other)
        return language

    def _forget(self, language: Language) -> None:
        if self._languages.get(language.question.digest) is language:
            del self._languages[language.question.digest]
            self._num_letters -= len(language.question.text)

    def _leave(self, visitor: Visitor) -> None:
        """A visitor has gone: what nobody waits for any more is compiled no further."""
        self._dismiss(visitor)
        language = visitor.language
        if language is None or visitor not in language.waiting:
            return
        language.waiting.remove(visitor)
        if not language.waiting and language.question.digest not in self._held:
            self._give_up(language)

    def _answer(self, visitor: Visitor, verdict: Verdict) -> None:
        """Answer, and lead on to the language's process who wants to."""
        language, is_good = visitor.language, verdict.error is None
        with suppress(OSError):  # it has gone
            visitor.connection.send(frame(verdict))  # some bytes, the first on this connection
            if visitor.attaches and is_good and language is not None and language.control is not None:
                socket.send_fds(language.control, [b"+"], [visitor.connection.fileno()])
                language.num_attached += 1
        self._dismiss(visitor)

    def _answer_all(self, language: Language, verdict: Verdict) -> None:
        waiting, language.waiting = language.waiting, []
        for visitor in waiting:
            self._answer(visitor, verdict)

    def _dismiss(self, visitor: Visitor) -> None:
        if visitor in self._visitors:
            self._visitors.remove(visitor)
            self._selector.unregister(visitor.connection)
            visitor.connection.close()

    # Processes

    def _begin(self, language: Language) -> None:
        """Have it compiled.  Raises OSError if the system gives no further process, or no file."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                language.pid = os.fork()
            except OSError:
                ours.close()
                raise
            if not language.pid:
                self._be(language, ours, theirs)
        language.control, language.seconds, language.turn_began = ours, 0.0, time.monotonic()
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._hear_of(language))

    def _be(self, language: Language, ours: socket.socket, theirs: socket.socket) -> NoReturn:
        """The life of a language's process."""
        try:
            self._close_files()
            ours.close()
            run_language(theirs, language.question, self._backend, self._spelling)
        except Exception:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    def _close_files(self) -> None:
        """In a language's process: others' connections end when we end them, and not when it does."""
        self._selector.close()
        self._listener.close()
        for visitor in self._visitors:
            visitor.connection.close()
        for language in (*self._held.values(), *self._compiling()):
            if language.control is not None:
                language.control.close()

    def _hear_of(self, language: Language) -> None:
        if language.control is None:
            return  # it was killed since
        try:
            news = decode_news(read_frame(language.control))
        except (EOFError, OSError):
            self._died(language)
            return
        if isinstance(news, Left):
            language.num_attached -= 1
            self._let_go_of_idle()
            return
        self._take_out(language)
        os.kill(language.pid, signal.SIGCONT)  # it may have been stopped when it had just said this
        if news.error is None:
            language.num_bytes = news.num_bytes
            self._held[language.question.digest] = language
        self._answer_all(language, news)
        if news.error is not None:
            self._kill(language)
            self._forget(language)
        self._let_go_of_idle()

    def _died(self, language: Language) -> None:
        """A language's process has ended by itself, or is about to."""
        is_held, pid = language.question.digest in self._held, language.pid
        self._take_out(language)
        self._kill(language)
        if not is_held:  # else those who were attached have noticed; the next who asks has it compiled again
            self._dying[pid] = language

    def _bury(self) -> None:
        """Processes that have ended by now: to wait for one, which has memory to give back, may take long."""
        for pid in list(self._dying):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                language = self._dying.pop(pid)
                if language is not None:
                    self._tell_death(language, status)

    def _tell_death(self, language: Language, status: int) -> None:
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
            verdict = too_long(language, is_final=True)
        else:
            was_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
            words = "cannot be compiled: it takes too much memory, or is nested too deeply"
            verdict = Verdict(words, is_final=not was_killed)  # a system short of memory kills anyone
        self._answer_all(language, verdict)
        self._forget(language)

    def _kill(self, language: Language) -> None:
        """End a language's process, if it has not ended."""
        if language.control is not None:
            self._selector.unregister(language.control)
            language.control.close()
        os.kill(language.pid, signal.SIGKILL)  # a process that has ended is there until it is waited for
        self._dying[language.pid] = None
        language.pid, language.control, language.num_attached = 0, None, 0
        self._held.pop(language.question.digest, None)

    def _give_up(self, language: Language) -> None:
        self._take_out(language)
        if language.pid:
            self._kill(language)
        self._forget(language)

    def _let_go_of_idle(self) -> None:
        """End processes that nobody is attached to, from the one not asked for the longest on."""
        for language in list(self._held.values()):
            num_bytes = sum(other.num_bytes for other in self._held.values())
            if len(self._held) <= self._most_held and num_bytes <= MOST_BYTES:
                break
            if not language.num_attached:
                self._kill(language)

    # Turns

    @property
    def _is_sharing_out(self) -> bool:
        return bool(self._queued) or any(True for _ in self._compiling())

    def _compiling(self) -> Iterator[Language]:
        """Those whose processes compile."""
        return chain(self._quick, self._slow, self._stopped)

    def _share_out(self, now: float) -> None:
        """Whose turn is it?"""
        if not self._is_sharing_out:
            return
        for language in list(self._quick):
            if language.seconds_at(now) > QUICK_SECONDS:
                self._quick.remove(language)
                self._stop(language, now)
        for language in list(self._slow):
            if language.seconds_at(now) > PATIENCE * language.question.seconds:
                self._answer_all(language, too_long(language, is_final=False))
                self._give_up(language)
            elif self._stopped and now - language.turn_began > TURN_SECONDS:
                self._slow.remove(language)
                self._stop(language, now)
        while self._stopped and len(self._slow) < self._num_lanes:
            self._go_on(self._stopped.popleft(), now)
        while len(self._quick) < self._num_lanes and (language := self._next()) is not None:
            try:
                self._begin(language)
            except OSError as error:
                words = f"cannot be compiled now ({error.strerror}); send it again"
                self._answer_all(language, Verdict(words, is_final=False))
                self._forget(language)
            else:
                self._quick.append(language)

    def _next(self) -> Language | None:
        """The next to be compiled, if there is room for one: what an engine waits for, and then one of the
        client with the fewest compiles under way.  If all room is taken, the client with the most makes some.
        """
        num_in_use = sum(language.num_attached > 0 for language in self._held.values())
        # Who would attach waits until others leave; who only asks leaves a process that can be ended.
        ready = [
            language
            for language in self._queued
            if num_in_use < self._most_held or not all(visitor.attaches for visitor in language.waiting)
        ]
        if not ready:
            return None
        nums = Counter(language.question.client for language in self._compiling())
        language = min(ready, key=lambda each: (not each.is_wanted, nums[each.question.client]))
        if nums.total() >= MOST_COMPILING:
            client, most = nums.most_common(1)[0]
            if nums[language.question.client] + 1 >= most and not language.is_wanted:
                return None
            self._end_longest_of(client)
        self._queued.remove(language)
        return language

    def _end_longest_of(self, client: str) -> None:
        """End the compile of a client that has taken the longest."""
        theirs = [language for language in self._compiling() if language.question.client == client]
        longest = max(theirs, key=lambda language: language.seconds)
        self._answer_all(longest, Verdict("is one of too many at once; send it again", is_final=False))
        self._give_up(longest)

    def _stop(self, language: Language, now: float) -> None:
        os.kill(language.pid, signal.SIGSTOP)
        language.seconds = language.seconds_at(now)
        self._stopped.append(language)

    def _go_on(self, language: Language, now: float) -> None:
        language.turn_began = now
        os.kill(language.pid, signal.SIGCONT)
        self._slow.append(language)

    def _take_out(self, language: Language) -> None:
        """It is compiled no further."""
        for lane in (self._queued, self._quick, self._slow, self._stopped):
            if language in lane:
                lane.remove(language)

    def _end(self) -> None:
        """What is compiled has nobody to wait for it; what is held ends with those who are attached."""
        for language in self._compiling():
            os.kill(language.pid, signal.SIGKILL)


def too_long(language: Language, *, is_final: bool) -> Verdict:
    error = f"takes more than {language.question.seconds:g} s to compile; make it simpler"
    return Verdict(error, is_final=is_final)


def allow_many_files() -> None:
    """One for each who waits, one for each language."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main(folder: Path, file: int, most_held: int) -> None:
    """folder: where the spelling is.  file: the listening socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is its owner's to answer
    allow_many_files()
    spelling = cast(Spelling, pickle.loads((folder / "spelling").read_bytes()))
    backend = GRAMMARS.load(BACKEND)(spelling)
    gc.collect()
    gc.freeze()  # else forks copy what the collector has looked at
    GrammarServer(socket.socket(fileno=file), backend, spelling, most_held=most_held).run(owner=0)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
