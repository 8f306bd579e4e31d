"""One engine or several as members of this process, seen as one.

Nothing waits for an answer but `step`: a front end on asyncio watches `lines` and calls `poll`.  Knows
nothing of text.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, cast

import msgspec
import numpy as np

from pellucid.cluster.desk import ECHO
from pellucid.cluster.line import Line, wait
from pellucid.cluster.messages import (
    Abort,
    Add,
    ClearPrefixCache,
    Failed,
    Meet,
    Message,
    Order,
    Orders,
    Pause,
    Sleep,
    Turn,
    View,
    WakeUp,
    Watch,
    encode,
)
from pellucid.cluster.supervisor import FAREWELL, Member, Supervisor
from pellucid.config import EngineConfig
from pellucid.connectors.peer.params import KVParams
from pellucid.engine.build import RunningEngine
from pellucid.engine.member import Facts, Work
from pellucid.executor.base import Capacity
from pellucid.executor.multiproc import NODES
from pellucid.nodes.local import own_cpus
from pellucid.nodes.place import Node, Place, arrange, named
from pellucid.observe.statistics import EngineStats
from pellucid.observe.xray import Frame
from pellucid.registry import load_object
from pellucid.resolve import Resolved, check_nodes
from pellucid.router.lenders import Lenders
from pellucid.router.router import Move, Router
from pellucid.schedule.news import Going
from pellucid.types import FinishReason, Request, SeqUpdate

logger = logging.getLogger(__name__)
PATIENCE = 0.2  # seconds that `step` waits at most: Ctrl-C is heard in between
ToAll = ClearPrefixCache | Watch | Pause | Sleep | WakeUp
GRACE = 10.0  # seconds in which an engine reports a worker process that hangs, before it counts as hanging


def start_replicas(
    config: EngineConfig, is_wanted: Callable[[], bool] = lambda: True
) -> RunningEngine[Replicas]:
    """Start `data_parallel_size` engines and wait until all have loaded.

    is_wanted: asked meanwhile; if not, they end.  Raises ValueError for what the user can mend, as the engine
    does that found it.
    """
    replicas = Replicas(config)
    capacity = replicas.start(is_wanted)
    return RunningEngine(engine=replicas, resolved=replicas.resolved, capacity=capacity)


class Muster(Protocol):
    """Machines that have come together."""

    nodes: tuple[Node, ...]

    def close(self) -> None: ...


class Replica:
    """An engine elsewhere: what it was sent and what it has said."""

    stats: EngineStats  # as of its last turn; it begins when the engine is ready

    def __init__(self, member: Member, config: EngineConfig) -> None:
        self.error: str | None = None  # why it takes no more requests
        self._member, self._max_silence = member, config.parallel.worker_timeout
        has_workers = config.parallel.shares_model or config.device.executor in ("multiproc", "mp", "ray")
        self._grace = GRACE if has_workers or config.parallel.shares_experts else 0.0
        self._outbox: list[Order] = []
        self._num_sent = 0  # `Orders`
        self._num_long = 0  # orders that take their time: to sleep, and to wake
        self._is_idle = True  # has it said, after the last of them, that it has no work?
        self._heard = time.monotonic()

    @property
    def has_work(self) -> bool:
        return self._member.failure is None and (bool(self._outbox) or not self._is_idle)

    def post(self, order: Order) -> None:
        """To be sent with the next `flush`."""
        self._num_long += isinstance(order, Sleep | WakeUp)
        self._outbox.append(order)

    def flush(self) -> None:
        """Send all that was posted, as one message."""
        if self._outbox:
            self._member.send(encode(Orders(self._outbox)))
            self._outbox = []
            self._num_sent += 1
            self._heard = time.monotonic() if self._is_idle else self._heard
            self._is_idle = False

    def note(self, turn: Turn) -> None:
        """It has spoken."""
        self._heard = time.monotonic()
        self.stats = turn.stats
        self._is_idle = not turn.has_work and turn.num_heard == self._num_sent

    @property
    def silence(self) -> float:
        """Seconds since it spoke last; 0 if it has nothing to say, has ended, or sleeps or wakes just now."""
        return self._silence if self._silence and not self._is_at_long_order else 0.0

    @property
    def _silence(self) -> float:
        return 0.0 if self._is_idle or self._member.failure is not None else time.monotonic() - self._heard

    @property
    def _is_at_long_order(self) -> bool:
        return self.stats.sleep.num_orders < self._num_long

    def describe_silence(self) -> str | None:
        """What is wrong if it has been silent for too long, and has not ended."""
        if (silence := self._silence) <= self._max_silence:
            return None
        is_stopped = self._member.process.is_stopped
        if self._is_at_long_order and not is_stopped:
            return None
        if silence <= self._max_silence + self._grace and not is_stopped:
            return None
        state = " (a signal has stopped it)" if is_stopped else ""
        way_out = f"raise --worker-timeout if steps may take as long{state}"
        return f"{self._member.name} has said nothing for {silence:.0f} s; {way_out}"


class Replicas:
    """An `EngineClient` over engines elsewhere.  The requests of one that is lost go on at others."""

    resolved: Resolved  # from `start` on, as the router
    router: Router

    def __init__(self, config: EngineConfig) -> None:
        self.error: str | None = None  # set when the last engine has gone
        self._config, self._lenders = config, Lenders.of(config)
        self._keeping: dict[str, Request] = {}  # requests whose KV somebody else will ask for
        self._inbox: deque[Request | ToAll | Abort] = deque()
        self._views: list[tuple[int, Frame]] = []
        self._answers: list[SeqUpdate] = []  # to requests that no engine answers
        self._team = Supervisor()
        self._replicas: list[Replica] = []
        self._dismiss: Callable[[], None] = lambda: None  # lets other machines go

    def start(self, is_wanted: Callable[[], bool]) -> Capacity:
        """Start the engines; what each of them can hold."""
        parallel = self._config.parallel
        num_engines, nodes = parallel.num_engines, self._gather(is_wanted)
        homes = {place.dp: place for place in reversed(arrange(parallel))}  # of each one's first rank
        try:
            for index in range(num_engines):
                with own_cpus(index, num_engines):
                    self._start_engine(index, homes[index], nodes)
                self._replicas.append(Replica(self._team.members[index], self._config))
            ready = self._team.await_ready(self._hear_early, is_wanted)
        except BaseException:
            self._team.end()
            self._dismiss()
            raise
        return self._begin(cast("list[Facts]", ready))

    def _start_engine(self, index: int, home: Place, nodes: tuple[Node, ...]) -> None:
        work, name = Work(self._lenders.config(index), index, nodes), named(f"engine {index}", home, nodes)
        self._team.start(name, "pellucid.engine.member:live", work, node=home.node)

    def _gather(self, is_wanted: Callable[[], bool]) -> tuple[Node, ...]:
        """The machines, if there are several: then their agents start what is to run there."""
        parallel = self._config.parallel
        check_nodes(parallel)
        if parallel.num_nodes == 1:
            return ()
        muster: Muster = load_object("pellucid.nodes.muster:gather")(self._config, is_wanted)
        self._dismiss = muster.close
        self._team = Supervisor(load_object(NODES)(muster.nodes, here=0))
        return muster.nodes

    def _hear_early(self, index: int, message: Message) -> None:
        """What an engine says while others load: where their ranks meet, if they do."""
        if isinstance(message, Meet):
            self._team.send(message, to=[*self._team.members[:index], *self._team.members[index + 1 :]])
        else:
            hear_early(index, message)

    def _begin(self, ready: Sequence[Facts]) -> Capacity:
        self.resolved, capacity = ready[0].resolved, least([facts.capacity for facts in ready])
        for replica, facts in zip(self._replicas, ready, strict=True):
            replica.stats = facts.stats
        caches = self.resolved.user.cache.enable_prefix_caching and len(ready) > 1
        pages_a_block = sum(kind.stripes for kind in capacity.kinds)
        num_blocks = capacity.num_pages // pages_a_block if caches else 0
        self.router = Router(
            len(ready),
            block_size=self.resolved.block_size,
            num_blocks=num_blocks,
            num_prefill=self._config.parallel.prefill_engines,
            max_len=capacity.max_model_len,
        )
        return capacity

    # Any thread

    def add(self, request: Request) -> None:
        self._inbox.append(request)

    def abort(self, request_id: str) -> None:
        self._inbox.append(Abort(request_id))

    def clear_prefix_cache(self) -> None:
        self._inbox.append(ClearPrefixCache())

    def pause(self, *, is_on: bool) -> None:
        """Have the engines plan no more steps, or go on."""
        self._inbox.append(Pause(is_on))

    @property
    def rest(self) -> Replicas:
        return self

    def sleep(self, level: int) -> None:
        """Have the engines give their memory away; `stats` tells when they have, or why not."""
        self._inbox.append(Sleep(level))

    def wake_up(self, tags: tuple[str, ...]) -> None:
        """Have them take it back."""
        self._inbox.append(WakeUp(tags))

    def watch(self, *, is_on: bool) -> None:
        """Have the engines send frames, each beginning anew, or have them stop."""
        self._inbox.append(Watch(is_on))

    @property
    def silence(self) -> float:
        """Seconds since one that has something to do has spoken; of several, the least."""
        return min((replica.silence for replica in self._replicas if replica.error is None), default=0.0)

    def stats(self) -> EngineStats:
        """As of each engine's last turn."""
        return EngineStats.total(self.stats_per_engine())

    def stats_per_engine(self) -> list[EngineStats]:
        return [replica.stats for replica in self._replicas]

    # The one thread

    @property
    def has_work(self) -> bool:
        return bool(self._inbox) or any(replica.has_work for replica in self._replicas)

    @property
    def has_orders(self) -> bool:
        """Is there anything that the next `poll` will hand out?"""
        return bool(self._inbox)

    @property
    def lines(self) -> list[Line]:
        """To the engines: `poll` when one is readable, or has room for what it has not sent."""
        return self._team.lines

    def step(self) -> list[SeqUpdate]:
        """Hand out what has come in, and return what has changed; wait for that up to `PATIENCE` seconds."""
        updates = self.poll()
        if not updates and self.has_work:
            wait(self.lines, PATIENCE)
            updates = self.poll()
        return updates

    def poll(self) -> list[SeqUpdate]:
        """`step` that never waits."""
        self.hand_out()
        said = self._team.poll()
        updates, self._answers = self._answers, []
        for index, message in said:
            updates += self._take_in(index, message)
        for index, replica in enumerate(self._replicas):
            if silence := replica.describe_silence():
                updates += self._lose(index, self._find_stopped() or silence)
        self._move_requests()
        return joined(updates) if len(said) > 1 else updates

    def hand_out(self) -> None:
        """Only hand out what has come in."""
        while self._inbox:
            self._hand_out(self._inbox.popleft())
        for replica in self._replicas:
            replica.flush()

    def take_views(self) -> list[tuple[int, Frame]]:
        """What watched engines have sent since the last call, each with the engine's index."""
        views, self._views = self._views, []
        return views

    def shutdown(self) -> None:
        """End the engines; whoever still reads hears that its requests have ended, too."""
        self._team.end(FAREWELL)
        self._dismiss()
        for index, replica in enumerate(self._replicas):
            if replica.error is None:
                replica.error = self.error = "the engine was shut down"
                self._answers += [failure(name, self.error) for name in self.router.close(index)]

    def _hand_out(self, order: Request | ToAll | Abort) -> None:
        """Post an order to the engine that it is for; a request that no engine can take is answered."""
        match order:
            case Request():
                self._hand_out_request(order)
            case Abort():
                index = self.router.abort(order.request_id)
                if index is not None:
                    self._replicas[index].post(order)
            case ClearPrefixCache() | Sleep():
                self.router.forget_prefixes()
                self._post_to_all(order)
            case Watch() | Pause() | WakeUp():
                self._post_to_all(order)

    def _post_to_all(self, order: Order) -> None:
        for replica in self._replicas:
            replica.post(order)

    def _hand_out_request(self, request: Request) -> None:
        if self.error is not None:
            self._answers.append(failure(request.id, self.error))
            return
        try:
            order = Add.of(request)
        except (TypeError, ValueError, OverflowError) as error:
            self._answers.append(failure(request.id, f"the request cannot be sent to an engine: {error}"))
            return
        if KVParams.of(request.kv_transfer).do_remote_decode:
            self._keeping[request.id] = request
        index = self.router.choose(request)
        assert index is not None, "while there is no error, an engine is left"
        part = self.router.part_of(request.id)
        self._replicas[index].post(order if part.kv_transfer == request.kv_transfer else Add.of(part))

    def _move_requests(self) -> None:
        """Hand over whose prompts are computed, and give engines that idle what waits in others' queues."""
        for move in self.router.handovers():
            self._replicas[move.target].post(Add.of(self._with_source(move)))
            self._replicas[move.target].flush()
        for move in self.router.moves([replica.stats.num_waiting for replica in self._replicas]):
            self._replicas[move.source].post(Abort(move.request.id))
            self._replicas[move.target].post(Add.of(move.request))
            for index in (move.source, move.target):
                self._replicas[index].flush()

    def _with_source(self, move: Move) -> Request:
        """The request, with what it takes to find the KV of its prompt."""
        return replace(move.request, kv_transfer=self._lenders.params(move.source, move.request).encode())

    def _take_in(self, index: int, message: Message) -> list[SeqUpdate]:
        """What an engine has done; if it has ended, its requests go to others, or get an answer."""
        match message:
            case Turn():
                return self._take_turn(index, message)
            case View(frame):
                self._views.append((index, frame))
                return []
            case Failed():
                return self._lose(index, message.message)
            case _:
                raise AssertionError(f"{message} is not from engines that serve")

    def _take_turn(self, index: int, turn: Turn) -> list[SeqUpdate]:
        """The updates of a turn.  What one that has failed says later counts no more."""
        replica = self._replicas[index]
        replica.note(turn)
        if replica.error is not None:
            replica.stats = replica.stats.at_rest()
            return []
        news = [SeqUpdate(*packed) for packed in turn.updates]
        if turn.going:
            num_new, tokens = (
                np.frombuffer(column, dtype=np.int32) for column in (turn.num_new, turn.tokens)
            )
            going = Going(np.array(turn.going, dtype=object), num_new, tokens.reshape(len(num_new), -1))
            news += going.one_by_one()
        if self._keeping:
            self._tell_where(index, news)
        if turn.error is None:
            return self.router.note(index, news)
        for update in news:
            if update.error == turn.error:  # it has not ended, but its engine
                update.error = update.finish_reason = None
        updates = [update for update in self.router.note(index, news) if update.says_anything]
        error = f"{self._team.members[index].name}: {turn.error}"
        if self._config.parallel.shares_experts:
            return updates + self._end_together(error)
        return updates + self._hand_on(index, self._close(index, error), error, is_suspect=not turn.is_lost)

    def _tell_where(self, index: int, news: list[SeqUpdate]) -> None:
        """Those that end, and whose KV is kept, say how another engine finds it."""
        for update in news:
            if update.finish_reason is not None and (kept := self._keeping.pop(update.request_id, None)):
                where = msgspec.to_builtins(self._lenders.params(index, kept))
                update.extras = {**(update.extras or {}), "kv_transfer_params": where}

    def _find_stopped(self) -> str | None:
        """Of engines in step, why one that says nothing waits: for one that a signal has stopped."""
        if not self._config.parallel.shares_experts:
            return None
        stopped = (member.name for member in self._team.members if member.process.is_stopped)
        name = next(stopped, None)
        return name and f"{name} has said nothing: a signal has stopped it, and others wait for its step"

    def _end_together(self, error: str) -> list[SeqUpdate]:
        """Engines in step live and die together: answers to all requests, with what was wrong first."""
        until = time.monotonic() + GRACE
        while ECHO in error and not self._team.failures and time.monotonic() < until:
            self._team.poll(PATIENCE)  # who only misses another one says that; its own end tells more
        if ECHO in error and self._team.failures:
            error = min(self._team.failures, key=lambda failure: ECHO in failure.message).message
        self._team.end()
        left = [(index, self._close(index, error)) for index in range(len(self._replicas))]
        return [
            update
            for index, names in left
            for update in self.router.note(index, [self._last(name, error) for name in names])
        ]

    def _last(self, request_id: str, error: str) -> SeqUpdate:
        """The end of a request that nobody goes on with."""
        if self.router.is_aborted(request_id):
            return SeqUpdate(request_id, finish_reason=FinishReason.ABORT)
        return failure(request_id, error)

    def _lose(self, index: int, error: str) -> list[SeqUpdate]:
        """An engine has died, or is to."""
        if self._config.parallel.shares_experts:
            return self._end_together(error)
        self._team.end(members=[self._team.members[index]])
        return self._hand_on(index, self._close(index, error), error)

    def _hand_on(
        self, index: int, request_ids: list[str], error: str, *, is_suspect: bool = False
    ) -> list[SeqUpdate]:
        """Requests of an engine that has ended go on at others; answers to those with which none can."""
        answers: list[SeqUpdate] = []
        for name in request_ids:
            is_over = self.router.is_aborted(name)
            if is_over or (move := self.router.go_on(name, is_suspect=is_suspect)) is None:
                answers.append(self._last(name, error))
            else:
                self._replicas[move.target].post(Add.of(move.request))
        for replica in self._replicas:
            replica.flush()
        if len(answers) < len(request_ids):
            logger.warning("%d of its requests go on at others", len(request_ids) - len(answers))
        return self.router.note(index, answers)

    def _close(self, index: int, error: str) -> list[str]:
        """Hand nothing more to an engine; the ids of the requests that it has not answered."""
        replica = self._replicas[index]
        if replica.error is None:
            replica.error = error
            replica.stats = replica.stats.at_rest()  # if it was killed, its last turn says otherwise
            logger.error("%s", error)
            if all(other.error is not None for other in self._replicas):
                self.error = error
        return self.router.close(index)


def hear_early(index: int, message: Message) -> None:
    """What an engine says that is ready before others are."""
    if isinstance(message, Turn) and message.error is not None:
        raise RuntimeError(f"engine {index} has failed before others began: {message.error}")


def joined(updates: list[SeqUpdate]) -> list[SeqUpdate]:
    """One update a request: an owner that falls behind has the less to do for each token.

    Errors stay by themselves, behind all else: a text may have reached its end, a stop string, before.
    """
    found: dict[str, SeqUpdate] = {}
    for update in updates:
        if update.error is None and (older := found.setdefault(update.request_id, update)) is not update:
            older.extend(update)
    return [*found.values(), *(update for update in updates if update.error is not None)]


def failure(request_id: str, error: str) -> SeqUpdate:
    return SeqUpdate(request_id, finish_reason=FinishReason.ERROR, error=error)


def least(capacities: Sequence[Capacity]) -> Capacity:
    """What each of several engines can hold."""
    return replace(
        capacities[0],
        num_pages=min(capacity.num_pages for capacity in capacities),
        max_model_len=min(capacity.max_model_len for capacity in capacities),
    )
