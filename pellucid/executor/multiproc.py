"""Workers as members, one for each rank: a plan goes to all, its result comes from the one that has it.

A worker that dies, fails or falls silent is named, with the last plan that it began; then all of them are
ended, for a step needs every one.  The workers' own side is in member.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

from pellucid.cluster.messages import (
    Answer,
    Call,
    Failed,
    Late,
    Meet,
    Message,
    Plan,
    Result,
    Said,
    tagged,
    untagged,
)
from pellucid.cluster.supervisor import Launcher, Supervisor
from pellucid.executor.base import WORKER, Capacity, HasFileno, Hear, MeetAt, WorkersLost, alone
from pellucid.executor.member import Work
from pellucid.interrupts import held_back
from pellucid.nodes.place import Place, addresses, arrange, named
from pellucid.observe.progress import Standing
from pellucid.registry import load_object
from pellucid.resolve import Resolved
from pellucid.schedule.plan import StepPlan, StepResult

logger = logging.getLogger(__name__)
NODES = "pellucid.nodes.launcher:NodesLauncher"  # which reaches other machines; few need it
FAREWELL = 5.0  # seconds that workers have to leave by themselves
PATIENCE = 0.1  # seconds that are waited at a time: a Ctrl-C that is held back is heard in between


class Arrangement(NamedTuple):
    """Where the ranks of an engine are, and what starts them there; None: on this machine."""

    launcher: Launcher | None
    resolved: Resolved
    places: list[Place]


Arrange = Callable[[Resolved, list[Place]], Arrangement]


def on_nodes(resolved: Resolved, places: list[Place]) -> Arrangement:
    """Ranks are where the configuration says."""
    launcher: Launcher | None = None
    if any(place.node != places[0].node for place in places):
        launcher = load_object(NODES)(resolved.nodes, here=places[0].node)
    return Arrangement(launcher, resolved, places)


class MultiprocTicket:
    """A plan that the workers have been sent."""

    def __init__(self, executor: MultiprocExecutor, plan_id: int) -> None:
        self._executor, self._plan_id = executor, plan_id

    def provide(self, late: Mapping[str, object]) -> None:
        self._executor.provide(late)

    def wait(self) -> None:
        self._executor.wait_for(self._plan_id)

    def result(self) -> StepResult:
        return self._executor.take_result(self._plan_id)


class MultiprocExecutor:
    """Workers in processes of their own, one for each rank of the mesh."""

    def __init__(self, worker: str = WORKER, arrange: Arrange = on_nodes) -> None:
        self._worker, self._arrange = worker, arrange  # "module:Class"; finds places for ranks
        self._team = Supervisor()
        self._standings: list[Standing] = []  # by rank
        self._results: dict[int, StepResult] = {}  # by plan id, until they are asked for
        self._answers: dict[int, object] = {}  # by rank
        self._ended_because: str | None = None
        self._listener: Hear | None = None

    def listen(self, hear: Hear) -> None:
        self._listener = hear

    @property
    def lines(self) -> Sequence[HasFileno]:
        return self._team.lines

    def start(self, resolved: Resolved, meet: MeetAt = alone) -> Capacity:
        """Start the processes and wait until all have loaded their part."""
        self._meet = meet
        self._timeout = resolved.user.parallel.worker_timeout
        places = [place for place in arrange(resolved.user.parallel) if place.dp == resolved.replica]
        launcher, resolved, places = self._arrange(resolved, places)
        self._team = Supervisor(launcher)
        try:
            for rank, place in enumerate(places):
                self._start_worker(resolved, rank, place)
            if resolved.user.parallel.shares_experts and resolved.replica:  # rank 0 is another engine's
                self._team.send(Meet(meet(None)))
            return cast(Capacity, self._team.await_ready(self._hear)[0])
        except BaseException:  # Ctrl-C, too: a loading worker holds memory that others may want
            self._end("the engine has not started")
            raise

    def _start_worker(self, resolved: Resolved, rank: int, place: Place) -> None:
        at = addresses(resolved.user.parallel, resolved.nodes, place)
        work = Work(worker=self._worker, rank=rank, place=place, addresses=at, resolved=resolved)
        name, life = named(f"worker {rank}", place, resolved.nodes), "pellucid.executor.member:live"
        member = self._team.start(name, life, work, node=place.node)
        member.standing = Standing(member.process.notes)
        self._standings.append(member.standing)

    def submit(self, plan: StepPlan) -> MultiprocTicket:
        self._send(Plan.of(plan))
        return MultiprocTicket(self, plan.id)

    def provide(self, late: Mapping[str, object]) -> None:
        """Send what the plan that was submitted last waits for."""
        self._send(Late.of(late))

    def wait_for(self, plan_id: int) -> None:
        """Until a plan's result has come.  Raises RuntimeError naming the worker that failed."""
        self._wait_until(lambda: plan_id in self._results)

    def take_result(self, plan_id: int) -> StepResult:
        """A plan's result, waited for if need be."""
        self.wait_for(plan_id)
        return self._results.pop(plan_id)

    def call(self, name: str, *args: object) -> object:
        self._answers.clear()
        self._send(Call(name, [*map(tagged, args)]))
        self._wait_until(lambda: len(self._answers) == len(self._team.members), is_long=True)
        return self._answers[0]

    def check(self) -> None:
        self._receive(0)

    def shutdown(self) -> None:
        """End all workers; those that can leave by themselves do."""
        self._end("the engine was shut down", seconds=FAREWELL)

    def _end(self, reason: str, *, seconds: float = 0.0) -> None:
        if self._ended_because is None:
            self._ended_because = reason
            self._team.end(seconds)

    # What workers are told, and what they say

    def _send(self, message: Message) -> None:
        if self._ended_because is not None:
            raise RuntimeError(self._ended_because)
        self._team.send(message)

    def _wait_until(self, is_done: Callable[[], bool], *, is_long: bool = False) -> None:
        """is_long: it may take any time, as loading weights does, but nobody may be stopped."""
        until = time.monotonic() + self._timeout
        while not is_done():
            left = until - time.monotonic()
            if left <= 0 and is_long and not any(m.process.is_stopped for m in self._team.members):
                left = self._timeout
                until += left
            if left <= 0:
                self._fail(Failed(self._describe_silence(), is_lost=True))
            self._receive(min(left, PATIENCE))
            held_back.let_through()

    def _receive(self, seconds: float) -> None:
        """Take in what workers say; wait for the first word up to `seconds`.  Raises why one has failed."""
        if self._ended_because is not None:
            raise RuntimeError(self._ended_because)
        for rank, message in self._team.poll(seconds):
            self._hear(rank, message)
        if self._team.failures:
            self._fail(self._team.cause())

    def _hear(self, rank: int, message: Message) -> None:
        match message:
            case Result():
                result = message.whole()
                self._results[result.plan_id] = result
            case Answer(value):
                self._answers[rank] = untagged(value)
            case Meet(port):
                self._team.send(Meet(self._meet(port)), to=self._team.members[1:])
            case Said(name, said):
                assert self._listener is not None, "nobody listens"
                self._listener(rank, name, untagged(said))
            case Failed():
                pass  # one failure may be another one's echo
            case _:
                raise AssertionError(f"{message} is not from workers")

    def _describe_silence(self) -> str:
        """Who is stopped, or else furthest behind: the others wait for it."""
        ranks = range(len(self._standings))
        stopped = [rank for rank in ranks if self._team.members[rank].process.is_stopped]
        values = [standing.value for standing in self._standings]
        late = [rank for rank in ranks if values[rank] == min(values)]
        names = [member.name for member in self._team.members]
        said = "; ".join(f"{names[rank]}, {self._standings[rank]}" for rank in stopped or late)
        state = " (stopped by a signal)" if stopped else ""
        return (
            f"no result for {self._timeout:g} s, waiting for {said}{state}; "
            "raise --worker-timeout if steps may take as long"
        )

    def _fail(self, cause: Failed) -> None:
        logger.error("%s", cause.message)
        self._end(cause.message)
        raise (WorkersLost if cause.is_lost else RuntimeError)(cause.message)
