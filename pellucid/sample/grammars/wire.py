"""What is said about grammars between processes, over Unix sockets: a length and msgpack.

An owner or an engine connects to the grammar server (server.py) and sends one question, `Compile` or
`Attach`.  The answer is a `Verdict`.  Behind a good one the connection of an `Attach` leads to the language's
own process (language.py); an engine sends it the memory for masks, and it answers every `Read` with `Filled`
and every `Force` with `Forced`.
"""

from __future__ import annotations

import mmap
import socket
import struct

import msgspec
import numpy as np

LENGTH = struct.Struct("<Q")
SHARED_BYTES = 1 << 30  # of the memory for masks; what nobody writes to is none


class Compile(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Is this a language?  Leaving before the answer ends the compile, if nobody else waits for it."""

    digest: str
    kind: str
    text: str
    seconds: float  # of a processor's time, the most that it may take
    client: str = ""  # who asks; clients have equal shares


class Attach(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Let me read texts of this language, which has been checked."""

    digest: str


class Verdict(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The answer to both."""

    error: str | None = None  # what is wrong, in words
    is_final: bool = True  # will it be the same when asked again?
    num_bytes: int = 0  # of memory that the language's process takes


class Row(msgspec.Struct, array_like=True, frozen=True):
    """A text that is to go on."""

    request_id: str
    new_token_ids: list[int]  # behind the prompt, since the row before
    drafts: list[int]
    may_stop: bool  # may a stop token come, as far as min_tokens goes?
    thinking: tuple[int | None, int] | None = None  # as `GrammarRef` has it


class Read(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To a language: what may come behind these texts?"""

    rows: list[Row]
    place: int  # in the shared memory, of the first row's first mask; the others follow


class Force(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To a language: how must these texts go on, without a choice?  Their drafts say nothing."""

    rows: list[Row]
    most: int  # tokens of a text


class Forget(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To a language: this text has ended.  It is not answered."""

    request_id: str


class Filled(msgspec.Struct, array_like=True, frozen=True):
    """From a language: a mask is written for every row's text, and one for each of its drafts."""

    ended: dict[str, str | None]  # texts that can have no further token, and what is wrong with them


class Forced(msgspec.Struct, array_like=True, frozen=True):
    """From a language: drafts of the only texts that may come, by request; who has none is not named."""

    token_ids: dict[str, list[int]]


class Left(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From a language to the grammar server: one that was attached has gone."""


_encode = msgspec.msgpack.Encoder().encode
decode_question = msgspec.msgpack.Decoder(Compile | Attach).decode
decode_verdict = msgspec.msgpack.Decoder(Verdict).decode
decode_order = msgspec.msgpack.Decoder(Read | Force | Forget).decode
decode_filled = msgspec.msgpack.Decoder(Filled).decode
decode_forced = msgspec.msgpack.Decoder(Forced).decode
decode_news = msgspec.msgpack.Decoder(Verdict | Left).decode


def frame(message: msgspec.Struct) -> bytes:
    """A message as it is sent."""
    packed = _encode(message)
    return LENGTH.pack(len(packed)) + packed


def read_frame(connection: socket.socket) -> bytearray:
    """Wait for the next message.  Raises EOFError if there will be none."""
    (length,) = LENGTH.unpack(_read(connection, LENGTH.size))
    return _read(connection, length)


def map_masks(file: int, num_words: int) -> np.ndarray:
    """The shared memory as masks [n, W] int32.  file: its descriptor."""
    num_masks = SHARED_BYTES // (4 * num_words)
    memory = mmap.mmap(file, SHARED_BYTES)
    return np.frombuffer(memory, dtype=np.int32, count=num_masks * num_words).reshape(-1, num_words)


def _read(connection: socket.socket, num_bytes: int) -> bytearray:
    buffer = bytearray(num_bytes)
    view, num_read = memoryview(buffer), 0
    while num_read < num_bytes:
        num_new = connection.recv_into(view[num_read:])
        if not num_new:
            raise EOFError("the other side has gone")
        num_read += num_new
    return buffer
