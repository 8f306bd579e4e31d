"""TCP between machines: both sides prove that they know the secret; one that vanishes is missed in seconds.

What is said afterwards is neither encrypted nor signed: networks between nodes are to be private.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
from typing import TypeVar

import msgspec

from pellucid.cluster.line import LENGTH

SECRET = "PELLUCID_SECRET"  # the environment variable
SHORTEST = 8  # bytes of it
NONCE = 32  # bytes
PATIENCE = 5.0  # seconds in which the other side proves itself, or answers
KEEPALIVE = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}  # seconds, and probes: 7 s
USER_TIMEOUT = 7000  # milliseconds in which what is sent must be acknowledged
LONGEST = 1 << 20  # bytes of a message here

M = TypeVar("M")


class Refused(ConnectionError):
    """The other side does not know the secret, or is something else."""


def read_secret() -> bytes:
    """What all nodes know.  Raises ValueError if it is not set."""
    secret = os.environ.get(SECRET, "").encode()
    if len(secret) < SHORTEST:
        raise ValueError(
            f"{SECRET} has {len(secret)} characters, must have at least {SHORTEST}: whoever knows it can "
            "start processes on every node and read KV there; set the same one on all nodes, as "
            "`openssl rand -hex 16` makes"
        )
    return secret


def listen(host: str, port: int = 0) -> socket.socket:
    """At one address, never at all of them.  Raises ValueError if that cannot be."""
    try:
        return socket.create_server((host, port), family=_family(host), backlog=128)
    except OSError as error:
        raise ValueError(
            f"cannot listen at {host}:{port} ({error.strerror or error}); it must be an address of this "
            "machine, and the port free"
        ) from None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def dial(
    host: str, port: int, secret: bytes, *,
    source: str | None = None, patience: float = PATIENCE, purpose: bytes = b"",
) -> socket.socket:  # fmt: skip
    """Connect, and prove both sides.  source: this side's address.  Raises OSError.

    purpose: what the connection is for; a proof for one is none for another.
    """
    where = (source, 0) if source else None
    connection = socket.create_connection((host, port), timeout=patience, source_address=where)
    try:
        theirs = receive(connection, NONCE)
        ours = secrets.token_bytes(NONCE)
        connection.sendall(ours + _proof(secret, purpose + b"dials", theirs, ours))
        answer = _proof(secret, purpose + b"answers", ours, theirs)
        if not hmac.compare_digest(receive(connection, NONCE), answer):
            raise Refused("the other side does not know the secret")
    except EOFError:
        connection.close()
        raise Refused(f"{host}:{port} refuses: is {SECRET} the same there?") from None
    except BaseException:
        connection.close()
        raise
    return tuned(connection)


def admit(connection: socket.socket, secret: bytes, *, purpose: bytes = b"") -> socket.socket:
    """The other half of `dial`.  Raises OSError or EOFError for who does not prove itself."""
    connection.settimeout(PATIENCE)
    ours = secrets.token_bytes(NONCE)
    connection.sendall(ours)
    said = receive(connection, 2 * NONCE)
    theirs, proof = said[:NONCE], said[NONCE:]
    if not hmac.compare_digest(proof, _proof(secret, purpose + b"dials", ours, theirs)):
        raise Refused("somebody dials who does not know the secret")
    connection.sendall(_proof(secret, purpose + b"answers", theirs, ours))
    return tuned(connection)


def _proof(secret: bytes, role: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(secret, role + b"".join(nonces), hashlib.sha256)


def tuned(connection: socket.socket) -> socket.socket:
    """Small frames go at once, and a peer whose machine has gone is missed within ten seconds."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {**KEEPALIVE, "TCP_USER_TIMEOUT": USER_TIMEOUT}.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def say(connection: socket.socket, message: object) -> None:
    """Send a msgspec type, whole."""
    frame = msgspec.msgpack.encode(message)
    connection.sendall(LENGTH.pack(len(frame)) + frame)


def hear(connection: socket.socket, kind: type[M]) -> M:
    """Wait for a message of this type.  Raises EOFError or OSError."""
    (length,) = LENGTH.unpack(receive(connection, LENGTH.size))
    if length > LONGEST:
        raise OSError(f"a message of {length:,} bytes, at most {LONGEST:,}")
    return msgspec.msgpack.decode(receive(connection, length), type=kind)


def receive(connection: socket.socket, num_bytes: int) -> bytes:
    """Exactly so many bytes, and none that come behind them."""
    data = bytearray()
    while len(data) < num_bytes:
        piece = connection.recv(num_bytes - len(data))
        if not piece:
            raise EOFError("the other side has gone")
        data += piece
    return bytes(data)
