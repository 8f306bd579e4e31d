"""What two engines say to each other of pages: frames of msgpack behind their length.

The one that wants pages speaks first, and each word of it has one answer.  Sockets, not lines: a thread on
either side waits, with a time-out.
"""

from __future__ import annotations

import socket
import struct

import msgspec

LENGTH = struct.Struct("<I")
MOST = 1 << 24  # bytes of a frame
VERSION = 3

Facts = dict[str, str]  # in which both engines must agree: names and values
Key = tuple[bytes, int]  # of a page: its block's digest, and its place in the block


class Hello(msgspec.Struct, tag=True, array_like=True):
    """Who wants pages: one rank of an engine."""

    engine_id: str  # whom it means to reach
    rank: int
    facts: Facts


class Welcome(msgspec.Struct, tag=True, array_like=True):
    """The answer; with it comes the memory's descriptor, to a socket that carries such."""

    error: str | None
    stride: int = 0  # bytes from one page to the next
    way: str | None = None  # how the memory is reached, if not by the descriptor or over the connection
    address: bytes = b""  # by that way


class Offer(msgspec.Struct, tag=True, array_like=True):
    """A rank of the lender's own engine says where its memory is."""

    engine_id: str
    rank: int
    address: bytes


class Read(msgspec.Struct, tag=True, array_like=True):
    """These pages are wanted, and stay where they are until `Done`, or the end of the connection."""

    keys: list[Key]
    num_bytes: int  # of each page that are to follow the answer; 0: none, it reads them itself


class Found(msgspec.Struct, tag=True, array_like=True):
    """Where they lie, in that order."""

    error: str | None
    places: list[int] = []


class Done(msgspec.Struct, tag=True, array_like=True):
    """It has read them."""

    request_id: str
    is_whole: bool  # and nobody of this rank will want them again


class Good(msgspec.Struct, tag=True, array_like=True):
    """The answer: they lay there all the time."""


Word = Hello | Welcome | Offer | Read | Found | Done | Good
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Word).decode


def send(connection: socket.socket, word: Word, descriptors: list[int] | None = None) -> None:
    """Raises OSError, also when it takes longer than the socket's time-out."""
    frame = _encode(word)
    whole = LENGTH.pack(len(frame)) + frame
    if descriptors:
        sent = socket.send_fds(connection, [whole], descriptors)
        whole = whole[sent:]
    connection.sendall(whole)


def receive(connection: socket.socket) -> Word:
    """Raises OSError, EOFError, or msgspec.MsgspecError for what is none of ours."""
    return _rest(connection, take(connection, LENGTH.size))


def receive_with_descriptor(connection: socket.socket) -> tuple[Word, int | None]:
    """The same, and a descriptor that came along."""
    head, descriptors, _, _ = socket.recv_fds(connection, LENGTH.size, 1)
    head += take(connection, LENGTH.size - len(head)) if head else b""
    if len(head) < LENGTH.size:
        raise EOFError("the other side has gone")
    return _rest(connection, head), descriptors[0] if descriptors else None


def _rest(connection: socket.socket, head: bytes | bytearray) -> Word:
    """What follows the length."""
    (size,) = LENGTH.unpack(head)
    if size > MOST:
        raise EOFError(f"a frame of {size:,} bytes is none of ours")
    return _decode(take(connection, size))


def take(connection: socket.socket, num_bytes: int) -> bytearray:
    """Exactly so many bytes."""
    taken = bytearray(num_bytes)
    take_into(connection, memoryview(taken))
    return taken


def take_into(connection: socket.socket, view: memoryview) -> None:
    """As many bytes as fit there."""
    while view:
        num = connection.recv_into(view)
        if not num:
            raise EOFError("the other side has gone")
        view = view[num:]


def local_address(engine_id: str) -> str:
    """Of a socket in the node's abstract name space (Linux), which ends with its process."""
    return f"\0pellucid-kv-{engine_id}"


def peer_user(connection: socket.socket) -> int:
    """Whose process is on the other side of a local socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1]
