"""The process of one language: compiles it, holds it, and masks the texts of whoever is attached.

Forked by the grammar server, which kills it when nobody waits for it any more.  A timer bounds its time: its
signal ends the process, whatever the library is doing.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import threading
from contextlib import suppress

import numpy as np

from pellucid.sample.grammars.base import CompiledGrammar, GrammarBackend, GrammarSpec, Spelling
from pellucid.sample.grammars.reading import Readings
from pellucid.sample.grammars.wire import (
    Compile,
    Force,
    Forget,
    Left,
    Verdict,
    decode_order,
    frame,
    map_masks,
    read_frame,
)

QUICK_SECONDS = 0.25  # after which a compile is a slow one
NICE_QUICK, NICE_SLOW = 5, 10  # how much less than others a compile gets of a processor
MAX_BYTES = 2 << 30  # of memory, for the process
PROCESS_BYTES = 8 << 20  # of memory, besides what is compiled
# Of a processor's time, for the masks of one step, for which all others wait; then the process ends itself.
STEP_SECONDS, SECONDS_A_STEPS_MASK = 0.25, 0.005


def run_language(
    control: socket.socket, question: Compile, backend: GrammarBackend, spelling: Spelling
) -> None:
    """The process's life.  control: the grammar server's side of it."""
    _limit_memory()
    _end_after(question.seconds)
    compiled = _compile_behind_others(backend, GrammarSpec(question.kind, question.text))
    if not isinstance(compiled, str) and not _can_begin(compiled, spelling):
        compiled = "describes no text at all"
    _end_after(0)
    if isinstance(compiled, str):
        control.sendall(frame(Verdict(compiled)))
    else:
        control.sendall(frame(Verdict(num_bytes=PROCESS_BYTES + compiled.num_bytes)))
        Host(control, compiled, spelling).run()


def _compile_behind_others(backend: GrammarBackend, spec: GrammarSpec) -> CompiledGrammar | str:
    """The compiled language, or what is wrong with it.

    In a thread of a lower priority: this one gets masks later, for which others wait, and who has given
    priority up cannot take it back.
    """
    found: list[CompiledGrammar | str] = []

    def compile_it() -> None:
        _be_nice(threading.get_native_id(), NICE_QUICK)
        try:
            found.append(backend.compile(spec))
        except ValueError as error:
            found.append(f"cannot be compiled: {error}")
        except MemoryError:
            found.append("cannot be compiled: it takes too much memory")
        except Exception as error:
            found.append(f"cannot be compiled: {type(error).__name__}: {error}")

    thread = threading.Thread(target=compile_it, daemon=True)
    thread.start()
    thread.join(QUICK_SECONDS)
    if thread.is_alive() and thread.native_id is not None:
        _be_nice(thread.native_id, NICE_SLOW - NICE_QUICK)
    thread.join()
    return found[0]


def _can_begin(compiled: CompiledGrammar, spelling: Spelling) -> bool:
    """Is there a token that a text may begin with?"""
    masks = np.zeros((1, spelling.num_words), dtype=np.int32)
    compiled.start().fill(masks, 0)
    return bool(masks.any())


class Host:
    """Answers those who are attached, one after another, until there can be no more of them."""

    def __init__(self, control: socket.socket, compiled: CompiledGrammar, spelling: Spelling) -> None:
        self._control, self._compiled, self._spelling = control, compiled, spelling
        self._attached: dict[socket.socket, Readings] = {}
        self._masks: dict[socket.socket, np.ndarray] = {}  # the memory that each of them shares
        self._is_held = True  # by the grammar server
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)

    def run(self) -> None:
        while self._is_held or self._attached:
            for key, _ in self._selector.select():
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if connection is self._control:
                    self._adopt()
                else:
                    self._serve(connection)

    def _adopt(self) -> None:
        """Take over a connection that the grammar server has accepted."""
        said, files, _, _ = socket.recv_fds(self._control, 1, 1)
        if not said:
            self._is_held = False
            self._selector.unregister(self._control)
            return
        connection = socket.socket(fileno=files[0])
        connection.setblocking(True)
        self._attached[connection] = Readings(self._compiled, self._spelling)
        self._selector.register(connection, selectors.EVENT_READ)

    def _serve(self, connection: socket.socket) -> None:
        readings = self._attached[connection]
        try:
            if connection not in self._masks:
                self._share(connection)
                return
            order = decode_order(read_frame(connection))
            if isinstance(order, Forget):
                readings.forget(order.request_id)
                return
            most_drafts = order.most if isinstance(order, Force) else 0
            num_masks = sum(1 + max(len(row.drafts), most_drafts) for row in order.rows)
            _end_after(STEP_SECONDS + SECONDS_A_STEPS_MASK * num_masks)
            if isinstance(order, Force):
                answer = readings.force(order.rows, order.most)
            else:
                answer = readings.fill(order.rows, self._masks[connection][order.place :])
            _end_after(0)
            connection.sendall(frame(answer))
        except (EOFError, OSError):
            self._let_go(connection)

    def _share(self, connection: socket.socket) -> None:
        """What comes first from who is attached."""
        said, files, _, _ = socket.recv_fds(connection, 1, 1)
        if not said or not files:
            raise EOFError
        self._masks[connection] = map_masks(files[0], self._spelling.num_words)
        os.close(files[0])

    def _let_go(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()
        del self._attached[connection]
        self._masks.pop(connection, None)
        with suppress(OSError):
            self._control.sendall(frame(Left()))


def _end_after(seconds: float) -> None:
    """Have a signal end this process when it has used a processor for so long; 0: never."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _be_nice(thread: int, more: int) -> None:
    """Lower a thread's priority, where threads have one."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + more)


def _limit_memory() -> None:
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, hard))
