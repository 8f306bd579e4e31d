"""Who is told which blocks can be found here: a router elsewhere, over ZMQ, in the words of vLLM.

A message is three frames: topic, sequence number (8 bytes, big-endian), and a batch in msgpack,
`[time, events, engine]`, an event a map with its `type`.  The engine's thread notes what has happened; one
thread beside it makes batches of that, sends them, keeps the last ones, and sends these again to who asks.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
from numpy.typing import NDArray

from pellucid.connectors.config import KVEventsConfig
from pellucid.features.base import HostFeature
from pellucid.kv.hashes import Prefix, Tokens
from pellucid.kv.kinds import Kind, Window
from pellucid.kv.manager import PrefixHit
from pellucid.kv.pool import Pages
from pellucid.lora.request import AdapterRef
from pellucid.resolve import Resolved
from pellucid.schedule.sequence import Sequence as Seq

if TYPE_CHECKING:
    from pellucid.executor.base import Capacity
    from pellucid.schedule.scheduler import Scheduler

logger = logging.getLogger(__name__)
MEDIUM = "GPU"  # of the KV cache, whatever the device: routers know no other name for it
END = (-1).to_bytes(8, "big", signed=True)  # the sequence number behind the last message that is sent again
FAREWELL = 1.0  # seconds in which what was noted last is sent


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks that follow each other, and can be found from now on."""

    block_hashes: list[int]
    parent_block_hash: int | None  # of the block before the first of them
    token_ids: list[int]  # of these blocks
    block_size: int  # tokens
    lora_id: None
    medium: str
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None]  # of each: what its hash has beside tokens
    group_idx: int  # of its kind of KV
    kv_cache_spec_kind: str
    kv_cache_spec_sliding_window: int | None = None  # tokens


class BlockRemoved(msgspec.Struct, tag=True):
    """Blocks that cannot be found any more."""

    block_hashes: list[int]
    medium: str
    group_idx: int


class AllBlocksCleared(msgspec.Struct, tag=True):
    """None can."""


class Stored(NamedTuple):
    """What the engine's thread notes of blocks that follow each other."""

    kind: int
    digests: list[bytes]
    parent: bytes | None
    tokens: NDArray[np.int32]
    key: tuple[str | None, str | None]  # adapter's name, and salt


class Removed(NamedTuple):
    kind: int
    digest: bytes


CLEARED = "cleared"
Noted = Stored | Removed | str


class KVEvents(HostFeature):
    """Notes what becomes of published blocks."""

    def __init__(self, resolved: Resolved) -> None:
        config = resolved.kv_events
        assert config is not None, "a feature that nobody has asked for"
        self._config, self._replica = config, resolved.replica
        self._keys: WeakKeyDictionary[Prefix, tuple[str | None, str | None]] = WeakKeyDictionary()
        self._publisher: Publisher | None = None

    def bind(self, scheduler: Scheduler, capacity: Capacity) -> None:
        pool = scheduler.kv.pool
        self._size = scheduler.kv.block_size
        self._publisher = Publisher(self._config, scheduler.kv.kinds, self._replica)
        self._note = self._publisher.note
        pool.observers.append(self._stored)
        pool.evicted = self._evicted

    def holds(self, seq: Seq, hit: PrefixHit) -> bool:
        """It keeps nobody; what a prefix belongs to beside its tokens is known here alone."""
        request = seq.request
        if request.lora is not None or request.cache_salt is not None:
            name = None if request.lora is None else AdapterRef.decode(request.lora).name
            self._keys[seq.prefix] = name, request.cache_salt
        return False

    def _stored(self, kind: int, digests: list[bytes], blocks: Pages, origin: object) -> None:
        prefix, tokens, place = cast(tuple[Prefix, Tokens, int], origin)
        size, names = self._size, prefix.digests
        places = [place := names.index(digest, place) for digest in digests]
        for first, end in runs(places):
            self._note(
                Stored(
                    kind,
                    names[first:end],
                    names[first - 1] if first else None,
                    np.array(tokens[first * size : end * size], dtype=np.int32),
                    self._keys.get(prefix, (None, None)),
                )
            )

    def _evicted(self, kind: int, digest: bytes) -> None:
        self._note(Removed(kind, digest))

    def forget(self) -> None:
        self._note(CLEARED)

    def shutdown(self) -> None:
        if self._publisher is not None:
            self._publisher.close()


def runs(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and end of each run of neighbours in what grows."""
    for _, run in groupby(enumerate(places), lambda each: each[1] - each[0]):
        found = [place for _, place in run]
        yield found[0], found[-1] + 1


class Publisher:
    """Sends what is noted.  Its thread alone uses the sockets."""

    def __init__(self, config: KVEventsConfig, kinds: Sequence[Kind], replica: int) -> None:
        """Raises ValueError if pyzmq is not installed, or an endpoint cannot be had."""
        try:
            self._zmq: Any = import_module("zmq")
        except ImportError:
            raise ValueError("kv_events_config needs pyzmq: pip install 'pellucid[events]'") from None
        self._config, self._kinds, self._replica = config, kinds, replica
        self._noted: deque[Noted] = deque()
        self._is_told, self._is_over = False, False
        self._num_lost = self._num_missed = 0  # events that did not fit, and those of them that were told of
        num_kept = 0 if config.replay_endpoint is None else config.buffer_steps
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=num_kept)
        self._encoder, self._next, self._topic = msgspec.msgpack.Encoder(), 0, config.topic.encode()
        self._bell, self._heard = socket.socketpair()  # the thread has the latter
        self._bell.setblocking(False)
        self._context = self._zmq.Context()
        try:
            self._out = self._open(self._zmq.PUB, config.endpoint, config.hwm)
            self._replay: Any = None
            if config.replay_endpoint is not None:
                # Room for all that is kept, and the end behind it.
                self._replay = self._open(self._zmq.ROUTER, config.replay_endpoint, config.buffer_steps + 1)
        except BaseException:
            self._release()
            self._bell.close()
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def _open(self, kind: int, endpoint: str, most: int) -> Any:
        """A socket that keeps at most so many messages for each reader."""
        endpoint = of_engine(endpoint, self._replica)
        made = self._context.socket(kind)
        made.linger, made.sndhwm = 0, most
        binds = kind == self._zmq.ROUTER or any(sign in endpoint for sign in ("*", "::", "ipc:", "inproc:"))
        try:
            (made.bind if binds else made.connect)(endpoint)
        except self._zmq.ZMQError as error:
            raise ValueError(f"kv_events_config: cannot have {endpoint}: {error}") from None
        if binds:
            logger.warning("whoever reaches %s reads the tokens of all prompts", endpoint)
        return made

    def note(self, event: Noted) -> None:
        """Of the engine's thread; never waits."""
        if self._is_over:
            return
        if len(self._noted) >= self._config.max_queue_size:
            self._num_lost += 1
            return
        self._noted.append(event)
        if not self._is_told:
            self._is_told = True
            self._wake()

    def _wake(self) -> None:
        with suppress(OSError):  # it has been rung already, or nobody is there any more
            self._bell.send(b"!")

    def close(self) -> None:
        """Send what was noted, and give the sockets back; nothing happens the second time."""
        self._is_over = True
        self._wake()
        self._thread.join(FAREWELL)
        self._bell.close()

    # The thread

    def _run(self) -> None:
        poller = self._zmq.Poller()
        poller.register(self._heard.fileno(), self._zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, self._zmq.POLLIN)
        try:
            while not self._is_over or self._noted:
                ready = dict(poller.poll())
                if self._heard.fileno() in ready:
                    self._heard.recv(1 << 10)
                    self._is_told = False  # before what is there is looked at: what comes now rings again
                    self._send()
                if self._replay in ready:
                    self._send_again()
        except Exception:
            logger.exception("events of blocks are sent no more")
        finally:
            self._is_over = True
            self._noted.clear()
            self._release()

    def _send(self) -> None:
        """All that is there, as one message; where events were lost a number is left out behind it."""
        num, num_lost = len(self._noted), self._num_lost
        if not num:
            return
        events = [*self._events([self._noted.popleft() for _ in range(num)])]
        payload = self._encoder.encode((time.time(), events, self._replica))
        self._kept.append((self._next, payload))
        self._out.send_multipart((self._topic, self._next.to_bytes(8, "big"), payload))
        self._next += 1
        if num_lost > self._num_missed:
            logger.warning("%d events of blocks were lost: max_queue_size is too small", num_lost)
            self._num_missed = num_lost
            self._next += 1

    def _events(self, noted: list[Noted]) -> Iterator[BlockStored | BlockRemoved | AllBlocksCleared]:
        for (sort, kind), group in groupby(noted, lambda each: (type(each), getattr(each, "kind", 0))):
            if sort is Removed:
                yield BlockRemoved(
                    [number(each.digest) for each in cast(Iterator[Removed], group)], MEDIUM, kind
                )
            elif sort is Stored:
                yield from map(self._stored, cast(Iterator[Stored], group))
            else:
                yield AllBlocksCleared()

    def _stored(self, noted: Stored) -> BlockStored:
        kind, (adapter, salt) = self._kinds[noted.kind], noted.key
        keys: list[tuple[str, ...] | None] = [(adapter,) if adapter else None] * len(noted.digests)
        if salt and noted.parent is None:
            keys[0] = (adapter, salt) if adapter else (salt,)
        is_window = isinstance(kind, Window)
        return BlockStored(
            block_hashes=[*map(number, noted.digests)],
            parent_block_hash=None if noted.parent is None else number(noted.parent),
            token_ids=noted.tokens.tolist(),
            block_size=kind.block_size,
            lora_id=None,
            medium=MEDIUM,
            lora_name=adapter,
            extra_keys=keys,
            group_idx=noted.kind,
            kv_cache_spec_kind="sliding_window" if is_window else "full_attention",
            kv_cache_spec_sliding_window=kind.window if is_window else None,
        )

    def _send_again(self) -> None:
        """All that is kept from the number on that somebody has asked for, and the end."""
        who, *said = self._replay.recv_multipart()
        if len(said) != 2:
            return
        first = int.from_bytes(said[1], "big")
        again = [(number.to_bytes(8, "big"), payload) for number, payload in self._kept if number >= first]
        for frames in (*again, (END, b"")):
            self._replay.send_multipart((who, b"", *frames))

    def _release(self) -> None:
        self._context.destroy(linger=int(1000 * FAREWELL))
        self._heard.close()


def number(digest: bytes) -> int:
    """By which others know a block: its digest's last 64 bits."""
    return int.from_bytes(digest[-8:], "big")


def of_engine(endpoint: str, replica: int) -> str:
    """Each engine has ports of its own, counted from the one that was said."""
    scheme, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme == "tcp" and port.isdecimal():
        return f"tcp://{host}:{int(port) + replica}"
    return f"{endpoint}_dp{replica}" if replica else endpoint
