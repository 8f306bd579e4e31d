"""The process that reads large requests: bodies in, what their routes make of them out.

What needs the interpreter for long (to parse, check and render megabytes) happens here, so that no stream of
the server's waits for it.  It leaves when its owner has gone.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import resource
import signal
import struct
import sys
import threading
from array import array
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Protocol, Self, cast, runtime_checkable

from pellucid import collector
from pellucid.server.errors import ApiError
from pellucid.server.parse import parse
from pellucid.server.renderer import ModelFacts, Renderer
from pellucid.server.route import Route
from pellucid.text.prompts import TokenPrompt
from pellucid.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
MODULE = "pellucid.server.reader"
HEAD = struct.Struct("<QQ")  # a message's number, the request's, and its length
MAX_AT_ONCE = 4  # requests that are read; more are not sent here
NICENESS = 5  # streams go before large requests
MAX_BYTES = 8 << 30  # of memory
TOO_MUCH = "the request takes too much memory to read"


@dataclass(frozen=True, slots=True)
class Work:
    """What a route has made of a body."""

    value: object


@dataclass(frozen=True, slots=True)
class Refusal:
    """An `ApiError`."""

    status: int
    message: str
    param: str | None = None


@runtime_checkable
class Slimmable(Protocol):
    """Work that can do without what only its prompts were made of."""

    def slim(self) -> Self: ...


def main() -> None:
    """The process's life."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # its owner's to answer; this process ends with it
    os.nice(NICENESS)
    _limit_memory()
    own_stdout = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print does not go between the answers
    from pellucid.server.app import ROUTES  # whose modules import this one

    _, packed = cast("tuple[int, bytes]", _receive(sys.stdin.buffer))
    facts: ModelFacts = pickle.loads(packed)
    tokenizer = None if facts.tokenizer_path is None else Tokenizer.load(facts.tokenizer_path)
    serve(ROUTES, Renderer(facts, tokenizer), sys.stdin.buffer, own_stdout)


def serve(routes: Mapping[str, Route], renderer: Renderer, questions: IO[bytes], answers: IO[bytes]) -> None:
    """Read requests, some at a time, until there are no more."""
    lock = threading.Lock()

    def answer(number: int, question: bytes) -> None:
        path, _, body = question.partition(b"\n")
        packed = read(routes[path.decode()], renderer, body)
        with lock, suppress(BrokenPipeError):
            answers.write(HEAD.pack(number, len(packed)))
            answers.write(packed)
            answers.flush()
        del packed
        collector.trim()

    pool = ThreadPoolExecutor(MAX_AT_ONCE)
    while (received := _receive(questions)) is not None:
        pool.submit(answer, *received)
    os._exit(0)  # whatever is being read, nobody waits for it


def read(route: Route, renderer: Renderer, body: bytes) -> bytes:
    """What comes of a body: `Work`, or a `Refusal`, pickled."""
    try:
        work = route.prepare(parse(route.body, body), renderer)
        return packed(Work(work.slim() if isinstance(work, Slimmable) else work))
    except ApiError as error:
        return pickle.dumps(Refusal(error.status, error.message, error.param))
    except MemoryError:
        return pickle.dumps(Refusal(413, TOO_MUCH))
    except Exception:
        logger.exception("a large request has failed")
        return pickle.dumps(Refusal(500, "internal error; the server's log has it"))


def packed(value: object) -> bytes:
    """Pickled, so that it is read again in steps that are short."""
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Token ids travel as an array: a million numbers take milliseconds."""

    def reducer_override(self, obj: object) -> object:
        if isinstance(obj, TokenPrompt):
            ids = array("q", obj.token_ids).tobytes()
            return _token_prompt, (ids, obj.text, obj.cache_salt)
        return NotImplemented


def _token_prompt(ids: bytes, text: str | None, cache_salt: str | None) -> TokenPrompt:
    return TokenPrompt(array("q", ids).tolist(), text, cache_salt)


def _receive(pipe: IO[bytes]) -> tuple[int, bytes] | None:
    """A message and its number; None when the other side has gone."""
    head = pipe.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    number, length = HEAD.unpack(head)
    message = pipe.read(length)
    return (number, message) if len(message) == length else None


def _limit_memory() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, hard))


if __name__ == "__main__":
    from pellucid.server.reader import main as life  # under the name by which others know these classes

    life()
