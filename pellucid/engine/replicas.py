"""One engine or several in processes of their own, seen as one: the owner's side of process.py.

Nothing waits for an answer but `step`, and that only on file descriptors: a front end on asyncio watches
`files` and calls `poll`.  Knows nothing of text.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import pickle
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

import msgspec
import zmq

from pellucid.config import EngineConfig
from pellucid.engine.build import RunningEngine
from pellucid.engine.process import (
    Abort,
    Add,
    ClearPrefixCache,
    Failed,
    Message,
    Order,
    Ready,
    Stop,
    Turn,
    View,
    Watch,
    address,
    decode_message,
    encode,
    run_engine,
    set_up,
)
from pellucid.engine.router import Router
from pellucid.engine.statistics import EngineStats
from pellucid.engine.xray import Frame
from pellucid.executor.base import Capacity
from pellucid.platform import share_of_cpus
from pellucid.resolve import Resolved
from pellucid.types import FinishReason, Request, SeqUpdate

if TYPE_CHECKING:
    Context = zmq.Context[zmq.Socket[bytes]]

logger = logging.getLogger(__name__)
PATIENCE = 0.2  # seconds that `step` waits at most: Ctrl-C is heard in between
LAST_WORDS = 0.2  # seconds that a dead engine's messages may still be on their way
GRACE = 10.0  # seconds in which an engine reports a worker that hangs, before it counts as hanging itself
FAREWELL = 10.0  # seconds that engines have to leave by themselves


def start_replicas(
    config: EngineConfig, is_wanted: Callable[[], bool] = lambda: True
) -> RunningEngine[Replicas]:
    """Start `data_parallel_size` engines and wait until all have loaded.

    is_wanted: asked meanwhile; if not, they end.  Raises ValueError for what the user can mend, as the engine
    does that found it.
    """
    replicas = Replicas(config, is_wanted)
    return RunningEngine(engine=replicas, resolved=replicas.resolved, capacity=replicas.capacity)


class Replica:
    """An engine in a process of its own."""

    stats: EngineStats  # as of its last turn; it begins when the engine is ready

    def __init__(self, config: EngineConfig, index: int, folder: str, context: Context) -> None:
        parallel = config.parallel
        self.index, self._max_silence = index, parallel.worker_timeout + GRACE
        self.error: str | None = None  # why it takes no more requests
        self.is_gone = False
        self._socket = context.socket(zmq.PAIR)
        set_up(self._socket, linger=0)
        self._socket.bind(address(folder, index))
        self._file = self._socket.FD
        self._outbox: list[Order] = []
        self._num_sent = 0  # messages
        self._is_quiet = True  # has it said, after the last message, that it has no work?
        self._heard = time.monotonic()
        level = logging.getLogger("pellucid").getEffectiveLevel()
        self._process = multiprocessing.get_context("spawn").Process(
            target=run_engine, args=(config, index, folder, level), name=f"pellucid engine {index}"
        )
        with own_cpus(index, parallel.data_parallel_size):
            self._process.start()

    @property
    def files(self) -> list[int]:
        """File descriptors that become readable when it may have spoken or ended."""
        return [] if self.is_gone else [self._file, self._process.sentinel]

    @property
    def has_work(self) -> bool:
        return bool(self._outbox) or not (self._is_quiet or self.is_gone)

    def post(self, order: Order) -> None:
        """To be sent with the next `flush`."""
        if not self.is_gone:
            self._outbox.append(order)

    def flush(self) -> None:
        """Send all that was posted, as one message."""
        if self._outbox:
            # Without a reader a send would wait for ever; it has died then, as `receive` will tell.
            with suppress(zmq.Again):
                self._socket.send(encode(self._outbox), zmq.NOBLOCK)
            self._outbox = []
            self._num_sent += 1
            self._heard = time.monotonic() if self._is_quiet else self._heard
            self._is_quiet = False

    def receive(self) -> list[Message]:
        """All that it has said, without waiting.  Its end is a `Failed`, after everything else."""
        if self.is_gone:
            return []
        is_alive = self._process.is_alive()  # asked first: what it said before its end is heard
        if not is_alive:
            self._socket.poll(int(1000 * LAST_WORDS))
        messages: list[Message] = []
        with suppress(zmq.Again):
            while True:
                messages.append(decode_message(self._socket.recv(zmq.NOBLOCK)))
                self._note(messages[-1])
        silence = 0.0 if self._is_quiet else time.monotonic() - self._heard
        if messages and isinstance(messages[-1], Failed):
            return messages
        if not is_alive:
            messages.append(Failed(f"engine {self.index} has died (exit code {self._process.exitcode})"))
        elif silence > self._max_silence:
            way_out = "raise --worker-timeout if steps may take as long"
            messages.append(Failed(f"engine {self.index} has said nothing for {silence:.0f} s; {way_out}"))
        return messages

    def _note(self, message: Message) -> None:
        self._heard = time.monotonic()
        if isinstance(message, Turn):
            self.stats = message.stats
            self._is_quiet = not message.has_work and message.num_heard == self._num_sent

    def end(self, seconds: float) -> None:
        """Wait for the process to end, and make it end after `seconds`."""
        self._process.join(seconds)
        if self._process.is_alive():
            self._process.kill()  # a stopped process does not hear anything gentler
            self._process.join()
        self._outbox, self.is_gone = [], True
        self._socket.close()


class Replicas:
    """An `EngineClient` over engines elsewhere.  One that dies takes its own requests with it, no others."""

    def __init__(self, config: EngineConfig, is_wanted: Callable[[], bool] = lambda: True) -> None:
        self.error: str | None = None  # set when the last engine has gone
        self._inbox: deque[Request | Abort | ClearPrefixCache | Watch] = deque()
        self._views: list[tuple[int, Frame]] = []
        self._refusals: list[SeqUpdate] = []  # of what no engine could be handed
        self._replicas: list[Replica] = []
        context, folder = zmq.Context(), short_folder()
        self._end = weakref.finalize(self, end_all, self._replicas, context, folder, os.getpid())
        self._end.atexit = False
        atexit.register(self._end)  # runs before multiprocessing's own, which would wait for ever
        try:
            for index in range(config.parallel.data_parallel_size):
                self._replicas.append(Replica(config, index, folder.name, context))
            self.resolved, self.capacity = self._await_start(is_wanted)
        except BaseException:
            for replica in self._replicas:
                replica.end(seconds=0)
            self.shutdown()
            raise
        caches = self.resolved.user.cache.enable_prefix_caching
        self.router = Router(
            len(self._replicas),
            block_size=self.resolved.block_size,
            num_blocks=min(self.capacity.num_blocks) if caches and len(self._replicas) > 1 else 0,
        )

    # Any thread

    def add(self, request: Request) -> None:
        self._inbox.append(request)

    def abort(self, request_id: str) -> None:
        self._inbox.append(Abort(request_id))

    def clear_prefix_cache(self) -> None:
        self._inbox.append(ClearPrefixCache())

    def watch(self, *, is_on: bool) -> None:
        """Have the engines send frames, each beginning anew, or have them stop."""
        self._inbox.append(Watch(is_on))

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
    def files(self) -> list[int]:
        """File descriptors, of which one becomes readable when `poll` may have something.

        They tell of what came since the last `poll`: call that before the first wait and after every `add`.
        """
        return [file for replica in self._replicas for file in replica.files]

    def step(self) -> list[SeqUpdate]:
        """Hand out what has come in, and return what has changed; wait for that up to `PATIENCE` seconds."""
        updates = self.poll()
        if not updates and self.has_work:
            wait(self.files, PATIENCE)
            updates = self.poll()
        return updates

    def poll(self) -> list[SeqUpdate]:
        """`step` that never waits."""
        self.hand_out()
        updates, self._refusals = self._refusals, []
        for replica in self._replicas:
            updates += self._collect(replica)
        return updates

    def hand_out(self) -> None:
        """Only hand out what has come in; `poll` soon after, for this may swallow what `files` would tell."""
        while self._inbox:
            self._refusals += self._hand_out(self._inbox.popleft())
        for replica in self._replicas:
            replica.flush()

    def take_views(self) -> list[tuple[int, Frame]]:
        """What watched engines have sent since the last call, each with the engine's index."""
        views, self._views = self._views, []
        return views

    def shutdown(self) -> None:
        self._end()
        atexit.unregister(self._end)

    def _hand_out(self, order: Request | Abort | ClearPrefixCache | Watch) -> list[SeqUpdate]:
        """Post an order to the engine that it is for; a request that no engine can take is answered."""
        match order:
            case Request():
                return self._hand_out_request(order)
            case Abort():
                index = self.router.engine_of(order.request_id)
                if index is not None:
                    self._replicas[index].post(order)
            case ClearPrefixCache():
                self.router.forget_prefixes()
                self._post_to_all(order)
            case Watch():
                self._post_to_all(order)
        return []

    def _post_to_all(self, order: Order) -> None:
        for replica in self._replicas:
            replica.post(order)

    def _hand_out_request(self, request: Request) -> list[SeqUpdate]:
        if self.error is not None:
            return [failure(request.id, self.error)]
        try:
            order = Add(request.id, msgspec.Raw(encode(request)))
        except (TypeError, ValueError, OverflowError) as error:
            return [failure(request.id, f"the request cannot be sent to an engine: {error}")]
        index = self.router.choose(request)
        assert index is not None, "while there is no error, an engine is left"
        self._replicas[index].post(order)
        return []

    def _collect(self, replica: Replica) -> list[SeqUpdate]:
        """What an engine has done; if it has ended, an answer to each of its requests."""
        updates: list[SeqUpdate] = []
        if replica.is_gone and replica.error is None:
            replica.error = self.error = "the engine was shut down"
            updates = [failure(name, self.error) for name in self.router.close(replica.index)]
            self.router.note(updates)
            return updates
        messages = replica.receive()
        for message in messages:
            if isinstance(message, Turn):
                news = self._take_turn(replica, message)
            elif isinstance(message, View):
                self._views.append((replica.index, message.frame))
                continue
            else:
                assert isinstance(message, Failed), message
                replica.end(seconds=0)
                news = [failure(name, message.message) for name in self._close(replica, message.message)]
            self.router.note(news)
            updates += news
        return joined(updates) if len(messages) > 1 else updates

    def _take_turn(self, replica: Replica, turn: Turn) -> list[SeqUpdate]:
        """The updates of a turn.  An engine that has failed answers its requests itself, without its name."""
        news = [SeqUpdate(*packed) for packed in turn.updates]
        if turn.error is not None:
            error = f"engine {replica.index}: {turn.error}"
            self._close(replica, error)
            for update in news:
                update.error = error if update.error == turn.error else update.error
        return news

    def _close(self, replica: Replica, error: str) -> list[str]:
        """Hand nothing more to an engine; the ids of the requests that it has not answered."""
        if replica.error is None:
            replica.error = error
            replica.stats = replica.stats.at_rest()  # if it was killed, its last turn says otherwise
            logger.error("%s", error)
            if all(other.error is not None for other in self._replicas):
                self.error = error
        return self.router.close(replica.index)

    def _await_start(self, is_wanted: Callable[[], bool]) -> tuple[Resolved, Capacity]:
        """Wait until every engine is ready.  Raises what the first of those says that will never be.

        One that is ready waits for the others, and may say meanwhile where it stands.
        """
        ready: dict[int, tuple[Resolved, Capacity, EngineStats]] = {}
        while len(ready) < len(self._replicas):
            wait(self.files, PATIENCE)
            if not is_wanted():
                raise RuntimeError("the engine is not wanted any more")
            for replica in self._replicas:
                for message in replica.receive():
                    match message:
                        case Failed(is_users=True):
                            raise ValueError(message.message)
                        case Failed():
                            raise RuntimeError(
                                f"an engine cannot start (see what it wrote): {message.message}"
                            )
                        case Turn(error=str(error)):
                            raise RuntimeError(
                                f"engine {replica.index} has failed before others began: {error}"
                            )
                        case Ready():
                            ready[replica.index] = pickle.loads(message.pickled)
                            replica.stats = ready[replica.index][2]
                        case _:
                            pass
        return ready[0][0], least([capacity for _, capacity, _ in ready.values()])


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
        num_blocks=tuple(map(min, zip(*(capacity.num_blocks for capacity in capacities), strict=True))),
        max_model_len=min(capacity.max_model_len for capacity in capacities),
    )


def short_folder() -> tempfile.TemporaryDirectory[str]:
    """A private folder for sockets, whose paths the system allows about a hundred bytes."""
    folder = tempfile.TemporaryDirectory(prefix="pellucid-")
    if len(address(folder.name, 1000)) <= zmq.IPC_PATH_MAX_LEN:
        return folder
    folder.cleanup()
    return tempfile.TemporaryDirectory(prefix="pellucid-", dir="/tmp")


@contextmanager
def own_cpus(index: int, num_shares: int) -> Generator[None, None, None]:
    """Processes started within get a share of the CPUs, if OpenMP pins threads: else all to the same."""
    is_pinned = "OMP_PROC_BIND" in os.environ and "OMP_NUM_THREADS" in os.environ
    if not is_pinned or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)  # of this thread alone
    os.sched_setaffinity(0, share_of_cpus(index, num_shares))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def end_all(
    replicas: Sequence[Replica], context: Context, folder: tempfile.TemporaryDirectory[str], owner: int
) -> None:
    """Ask the engines to leave, and see to it that they have left."""
    if os.getpid() != owner:
        return  # a fork of the owner, which has nothing to end
    staying = [replica for replica in replicas if not replica.is_gone]
    for replica in staying:
        replica.post(Stop())
        replica.flush()
    until = time.monotonic() + FAREWELL
    for replica in staying:
        replica.end(max(0.0, until - time.monotonic()))
    context.destroy(linger=0)
    folder.cleanup()
