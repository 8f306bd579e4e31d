"""An engine as a member of the front: orders come in, the one loop runs, updates go out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import msgspec

from pellucid import collector
from pellucid.cluster.desk import Desk
from pellucid.cluster.messages import (
    Abort,
    Add,
    ClearPrefixCache,
    Order,
    Orders,
    Pause,
    Ready,
    Sleep,
    Stop,
    Turn,
    View,
    WakeUp,
    Watch,
    decode_request,
    pack,
    tagged,
)
from pellucid.config import EngineConfig
from pellucid.engine.build import start_engine
from pellucid.engine.core import Engine
from pellucid.executor.base import Capacity
from pellucid.nodes.place import Node
from pellucid.observe.statistics import EngineStats
from pellucid.observe.xray import LiveXRay, NullXRay
from pellucid.resolve import Resolved
from pellucid.schedule.plan import ints
from pellucid.types import FinishReason, SeqUpdate

IDLE_SECONDS = 1.0  # between two looks at the workers of an engine that has nothing to do


class Work(msgspec.Struct, frozen=True):
    """What makes an engine."""

    config: EngineConfig
    replica: int
    nodes: tuple[Node, ...] = ()


class Facts(msgspec.Struct, frozen=True):
    """What an engine tells when it is ready."""

    resolved: Resolved
    capacity: Capacity
    stats: EngineStats


def live(desk: Desk, work: Work) -> None:
    """Load, and serve until told to stop."""
    with collector.paused():
        started = start_engine(work.config, replica=work.replica, nodes=work.nodes, meet=desk.meet)
    desk.send(Ready(tagged(Facts(started.resolved, started.capacity, started.engine.stats()))))
    collector.spare()  # while its owner gets ready to listen
    serve(started.engine, desk)
    started.engine.shutdown()


def serve(engine: Engine, desk: Desk) -> None:
    """Turn the loop until told to stop.  After each turn that changed anything, say so."""
    num_heard, said = 0, None
    engine.ears.append(desk)
    while True:
        updates: list[SeqUpdate] = []
        for message in desk.hear(_patience(engine), engine.executor.lines):
            match message:
                case Orders(orders):
                    num_heard += 1
                    updates += _follow(engine, orders)
                case Stop():
                    return
                case _:
                    raise AssertionError(f"{message} is not for engines")
        changed, going = engine.turn()
        turn = Turn(
            [pack(update) for update in chain(updates, changed)],
            engine.stats(),
            num_heard,
            engine.has_work,
            engine.error,
            going.request_ids.tolist(),
            ints(going.num_new.tobytes()),
            ints(going.tokens.tobytes()),
            engine.is_lost,
        )
        is_news = turn != said
        if is_news:
            desk.post(turn)
            said = turn
        frame = engine.xray.frame(is_stale=is_news)
        if frame is not None:
            desk.post(View(frame))


def _patience(engine: Engine) -> float:
    """Seconds that there is nothing to do but to wait for orders."""
    if engine.has_work:
        return 0.0  # it waits itself if it must, and hears orders while it does
    seconds = engine.xray.patience
    return IDLE_SECONDS if seconds is None else min(seconds, IDLE_SECONDS)


def _follow(engine: Engine, orders: Sequence[Order]) -> list[SeqUpdate]:
    """Do as told; answers to requests that cannot be read."""
    updates: list[SeqUpdate] = []
    for order in orders:
        match order:
            case Add():
                updates += _add(engine, order)
            case Abort():
                engine.abort(order.request_id)
            case ClearPrefixCache():
                engine.clear_prefix_cache()
            case Pause(is_on):
                engine.rest.pause(is_on=is_on)
            case Sleep(level):
                engine.rest.sleep(level)
            case WakeUp(tags):
                engine.rest.wake_up(tags)
            case Watch():
                engine.xray = LiveXRay(engine.scheduler) if order.is_on else NullXRay()
    return updates


def _add(engine: Engine, order: Add) -> list[SeqUpdate]:
    """Hand a request in, or answer it at once if it cannot be read."""
    try:
        engine.add(decode_request(order.request))
    except msgspec.ValidationError as error:
        message = f"the request cannot be read: {error}"
        return [SeqUpdate(order.request_id, finish_reason=FinishReason.ERROR, error=message)]
    return []
