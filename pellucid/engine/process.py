"""An engine in a process of its own: orders come in, the one loop runs, updates go out.

What goes over the socket is defined here, for both sides, as msgpack: orders come in lists, what a turn of
the loop has changed goes out as one `Turn`, and to who watches a `View` beside it.
"""

from __future__ import annotations

import atexit
import gc
import logging
import math
import multiprocessing
import os
import pickle
import shutil
import signal
import threading
import traceback
from collections.abc import Iterable
from multiprocessing.connection import wait
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec
import zmq

from pellucid.config import EngineConfig
from pellucid.engine.build import start_engine
from pellucid.engine.core import POLL_SECONDS, Engine
from pellucid.engine.statistics import EngineStats
from pellucid.engine.xray import Frame, LiveXRay, NullXRay
from pellucid.executor.process import leave
from pellucid.types import FinishReason, Request, SeqUpdate, TokenLogprobs

if TYPE_CHECKING:
    Socket = zmq.Socket[bytes]

LINGER = 5.0  # seconds for last words
IDLE_SECONDS = 1.0  # between two looks at the workers of an engine that has nothing to do
COLLECT_EVERY = (20_000, 5, 10)  # new objects, such collections, larger ones

# A SeqUpdate without the names of its fields: updates are most of the traffic.
Packed = tuple[
    str,
    list[int],
    list[TokenLogprobs] | None,
    list[TokenLogprobs] | None,
    FinishReason | None,
    int | str | None,
    int,
    float,
    str | None,
    int,
]


class Add(msgspec.Struct, tag=True):
    """To an engine: a request, encoded by itself, so that one which cannot be read harms no other."""

    request_id: str
    request: msgspec.Raw


class Abort(msgspec.Struct, tag=True):
    """To an engine: end this request early."""

    request_id: str


class ClearPrefixCache(msgspec.Struct, tag=True):
    """To an engine: forget all cached prefixes."""


class Watch(msgspec.Struct, tag=True):
    """To an engine: send views of what it does, from the beginning, or no more."""

    is_on: bool


class Stop(msgspec.Struct, tag=True):
    """To an engine: leave."""


class Ready(msgspec.Struct, tag=True):
    """From an engine that has started: (Resolved, Capacity, EngineStats), pickled, for it is sent once."""

    pickled: bytes


class Turn(msgspec.Struct, tag=True):
    """From an engine: where it stands after a turn of its loop."""

    updates: list[Packed]
    stats: EngineStats
    num_heard: int  # messages that it has read
    has_work: bool
    error: str | None  # why it answers every request with an error


class View(msgspec.Struct, tag=True):
    """From an engine that is watched."""

    frame: Frame


class Failed(msgspec.Struct, tag=True):
    """From an engine's last breath."""

    message: str
    is_users: bool = False  # a ValueError: the user can mend it


Order = Add | Abort | ClearPrefixCache | Watch | Stop
Message = Ready | Turn | View | Failed


def _plain(value: object) -> object:
    """Other libraries' numbers (numpy's) as Python's, and what can be iterated as a list."""
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Iterable):
        return list(cast(Iterable[object], value))
    raise TypeError(f"{value!r} cannot be sent to another process")


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
decode_orders = msgspec.msgpack.Decoder(list[Order]).decode
decode_request = msgspec.msgpack.Decoder(Request, strict=False).decode  # 1 may stand for True
decode_message = msgspec.msgpack.Decoder(Message).decode


def pack(update: SeqUpdate) -> Packed:
    """What `SeqUpdate(*packed)` undoes."""
    return (
        update.request_id,
        update.new_token_ids,
        update.logprobs,
        update.prompt_logprobs,
        update.finish_reason,
        update.stop_reason,
        update.num_cached_tokens,
        update.first_scheduled,
        update.error,
        update.num_steps,
    )


def run_engine(config: EngineConfig, replica: int, folder: str, log_level: int) -> None:
    """The process's life.  folder: where `address` is, the owner's."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # its owner's to answer; this process ends with it
    logging.basicConfig(level=log_level, format=f"%(levelname)s engine {replica}: %(message)s")
    threading.Thread(target=_leave_with_owner, args=(folder,), daemon=True).start()
    is_done = False
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        set_up(socket, linger=LINGER)
        socket.connect(address(folder, replica))
        started = None
        try:
            started = start_engine(config, replica=replica)
            facts = started.resolved, started.capacity, started.engine.stats()
            socket.send(encode(Ready(pickle.dumps(facts))))
            spare_collector()  # while its owner gets ready to listen
            started.engine.warm_up()
            serve(started.engine, socket)
            started.engine.shutdown()
            is_done = True
        except Exception as error:
            if started is None and isinstance(error, ValueError):
                socket.send(encode(Failed(str(error), is_users=True)))
                return
            said = f"engine {replica} has failed: {type(error).__name__}: {error}\n{traceback.format_exc()}"
            socket.send(encode(Failed(said)))
    if is_done:
        leave()


def spare_collector() -> None:
    """Have the garbage collector never again look at what is there already, in a process that lasts.

    All that a server has imported and built takes it longer than many steps.  And it looks for what has come
    since when that is some hundred requests, not some.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # else extension modules report at the end what was never given back
    gc.set_threshold(*COLLECT_EVERY)


def address(folder: str, replica: int) -> str:
    """Where an engine and its owner meet."""
    return f"ipc://{folder}/engine-{replica}"


def set_up(socket: Socket, *, linger: float) -> None:
    """No bound on what waits to be read: neither side ever stands still because the other one does.

    linger: seconds in which a closed socket still sends.
    """
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, int(1000 * linger))


def serve(engine: Engine, socket: Socket) -> None:
    """Turn the loop until told to stop.  After each turn that changed anything, say so."""
    num_heard, said = 0, None
    while True:
        updates: list[SeqUpdate] = []
        while socket.poll(0 if updates else _patience(engine)):
            num_heard += 1
            for order in decode_orders(socket.recv()):
                match order:
                    case Add():
                        updates += _add(engine, order)
                    case Abort():
                        engine.abort(order.request_id)
                    case ClearPrefixCache():
                        engine.clear_prefix_cache()
                    case Watch():
                        engine.xray = LiveXRay(engine.scheduler) if order.is_on else NullXRay()
                    case Stop():
                        return
        updates += engine.step()
        turn = Turn([pack(u) for u in updates], engine.stats(), num_heard, engine.has_work, engine.error)
        is_news = turn != said
        if is_news:
            socket.send(encode(turn))
            said = turn
        frame = engine.xray.frame(is_stale=is_news)
        if frame is not None:
            socket.send(encode(View(frame)))


def _patience(engine: Engine) -> int:
    """Milliseconds that there is nothing to do but to wait for orders."""
    if not engine.has_work:
        seconds = engine.xray.patience
        return math.ceil(1000 * (IDLE_SECONDS if seconds is None else min(seconds, IDLE_SECONDS)))
    return int(1000 * POLL_SECONDS) if engine.idle else 0


def _add(engine: Engine, order: Add) -> list[SeqUpdate]:
    """Hand a request in, or answer it at once if it cannot be read."""
    try:
        engine.add(decode_request(order.request))
    except msgspec.ValidationError as error:
        message = f"the request cannot be read: {error}"
        return [SeqUpdate(order.request_id, finish_reason=FinishReason.ERROR, error=message)]
    return []


def _leave_with_owner(folder: str) -> None:
    """End this process, whatever it is doing, when its owner has died; workers notice that by their pipes."""
    owner = multiprocessing.parent_process()
    assert owner is not None, "an engine's process has an owner"
    wait([owner.sentinel])
    shutil.rmtree(Path(folder), ignore_errors=True)
    os._exit(1)
