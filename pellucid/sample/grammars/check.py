"""Is a grammar one that can be used?  Asked before its request goes to the engine, in a process of its own.

A library that compiles what strangers wrote may hang, fill the memory or crash.  Here it does so to a process
that ends itself when its time is over, and that the next question replaces.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import IO, cast

import numpy as np

from pellucid.sample.grammars.base import BACKEND, GRAMMARS, GrammarSpec, Spelling

MOST_VERDICTS = 4096
MAX_BYTES = 4 << 30  # of memory, for the process
LENGTH = struct.Struct("<Q")


class GrammarChecker:
    """Compiles each language once in another process, and remembers what came of it.  Any thread may ask."""

    def __init__(self, spelling: Callable[[], Spelling]) -> None:
        self._spelling, self._lock = spelling, threading.Lock()
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()
        self._process: subprocess.Popen[bytes] | None = None

    def warm_up(self) -> None:
        """Have the process running before it is asked."""
        if importlib.util.find_spec(BACKEND) is not None:
            with self._lock:
                if self._process is None:
                    self._process = self._start()

    def check(self, spec: GrammarSpec, seconds: float) -> None:
        """Raises ValueError, in words, if a grammar is wrong or takes longer than `seconds` to compile."""
        if importlib.util.find_spec(BACKEND) is None:
            raise ValueError(f"needs {BACKEND}; pip install 'pellucid[serve]'")
        key = hashlib.sha256(spec.language.encode().encode()).digest()
        with self._lock:
            if key not in self._verdicts:
                self._verdicts[key] = self._ask(spec, seconds)
                if len(self._verdicts) > MOST_VERDICTS:
                    self._verdicts.popitem(last=False)
            self._verdicts.move_to_end(key)
            verdict = self._verdicts[key]
        if verdict is not None:
            raise ValueError(verdict)

    def _ask(self, spec: GrammarSpec, seconds: float) -> str | None:
        """What is wrong with a grammar, if anything."""
        if self._process is None or self._process.poll() is not None:
            self._process = self._start()
        try:
            _write(self._process.stdin, (spec, seconds))
            return cast("str | None", _read(self._process.stdout))
        except (EOFError, BrokenPipeError):
            status, self._process = self._process.wait(), None
            if status == -signal.SIGALRM:
                return f"takes more than {seconds:g} s to compile; make it simpler"
            return "cannot be compiled: it takes too much memory, or is nested too deeply"

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )  # fmt: skip
        weakref.finalize(self, _end, process)
        with suppress(BrokenPipeError):  # its death is noticed by whoever asks
            _write(process.stdin, self._spelling())
        return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()


def _write(pipe: IO[bytes] | None, message: object) -> None:
    assert pipe is not None
    packed = pickle.dumps(message)
    pipe.write(LENGTH.pack(len(packed)) + packed)
    pipe.flush()


def _read(pipe: IO[bytes] | None) -> object:
    """Raises EOFError when the other side has gone."""
    assert pipe is not None
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise EOFError
    return pickle.loads(pipe.read(LENGTH.unpack(head)[0]))


def answer(questions: IO[bytes], answers: IO[bytes]) -> None:
    """The process's life."""
    spelling = cast(Spelling, _read(questions))
    backend = GRAMMARS.load(BACKEND)(spelling)
    _limit_memory()
    with suppress(EOFError):
        while True:
            spec, seconds = cast("tuple[GrammarSpec, float]", _read(questions))
            signal.setitimer(signal.ITIMER_REAL, seconds)  # its signal ends this process, whatever it does
            try:
                verdict = None
                masks = np.zeros((1, spelling.num_words), dtype=np.int32)
                backend.compile(spec).start().fill(masks, 0)
                if not masks.any():
                    verdict = "describes no text at all"
            except ValueError as error:
                verdict = f"cannot be compiled: {error}"
            except MemoryError:
                verdict = "cannot be compiled: it takes too much memory"
            signal.setitimer(signal.ITIMER_REAL, 0)
            _write(answers, verdict)


def _limit_memory() -> None:
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, hard))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is its owner's to answer
    own_stdout = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print does not go between the answers
    answer(sys.stdin.buffer, own_stdout)
