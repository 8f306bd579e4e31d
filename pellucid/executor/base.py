"""The door for executors: how plans reach the workers and results come back.

An executor names its worker by string; this package never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pellucid.cluster.line import HasFileno
from pellucid.kv.kinds import Kind
from pellucid.registry import Registry
from pellucid.resolve import Resolved
from pellucid.schedule.plan import StepPlan, StepResult
from pellucid.spec.drafter import UNTIMED, Drafter, Timings

WORKER = "pellucid.worker.worker:Worker"  # which executors load by this name
Hear = Callable[[int, str, object], None]  # a rank, a feature's name, what its half there says


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What the workers found they can hold, once weights are loaded."""

    kinds: tuple[Kind, ...]  # of KV
    num_pages: int  # the padding page 0 not counted
    max_model_len: int  # tokens; the model's own may have been lowered to what fits
    num_spec: int = 0  # most drafts a row may carry
    page_bytes: int = 0  # of the rank whose pages are largest
    drafter: Drafter = Drafter.NONE
    timings: Timings = UNTIMED  # of steps, at start


def _nothing(told: object) -> None:
    pass


def _unheard(name: str, said: object) -> None:
    pass


MeetAt = Callable[[int | None], int]


def alone(port: int | None) -> int:
    """Nobody is met but the ranks of this engine."""
    assert port is not None, "nobody says where the ranks meet"
    return port


class NoPace:
    """Of a worker that no other engine waits for; see lockstep/pace.py."""

    lines: Sequence[HasFileno] = ()  # readable when others may wait for a step

    def attend(self) -> None:
        """Take part in the steps that they wait for."""


class WorkersLost(RuntimeError):
    """One was killed, or says nothing: not because of anything that it was asked for, as far as one knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A worker's place among those of one engine."""

    rank: int = 0
    device: int | None = None  # index of its GPU; None is torch's current one
    node: int = 0  # which machine it is on
    address: str | None = None  # of that; None if there is one machine
    first: str | None = None  # of rank 0's
    # Where they meet: rank 0 says the port that it listens at, the others say None and are told it.
    meet: MeetAt = alone
    entered: Callable[[str], None] = _nothing  # told each collective's name before it begins
    waiting: Callable[[bool], None] = _nothing  # told when it begins and ceases to wait for another stage
    say: Callable[[str, object], None] = _unheard  # to the host's half of a feature, by name; from any thread


class Pending(Protocol):
    """A step's result on its way: what a worker hands back for a plan that it has launched."""

    def wait(self) -> None:
        """Until the step has ended.  Raises RuntimeError naming the worker that failed."""
        ...

    def result(self) -> StepResult:
        """What the step yielded; it is waited for if it has not been."""
        ...


class Ticket(Pending, Protocol):
    """A plan under way; of one that is open the second half is launched when the rest has come."""

    def provide(self, late: Mapping[str, object]) -> None:
        """Hand in what follows an open plan, by feature."""
        ...


class Executor(Protocol):
    """Owns the workers.  `depth` plans may be under way."""

    def start(self, resolved: Resolved, meet: MeetAt = alone) -> Capacity:
        """meet: as of a `Seat`, where ranks of other engines are met, too."""
        ...

    def submit(self, plan: StepPlan) -> Ticket: ...

    def call(self, name: str, *args: object) -> object:
        """Run a worker's method by name, outside the loop, and return rank 0's answer."""
        ...

    def check(self) -> None:
        """Raise RuntimeError if a worker has died."""
        ...

    def listen(self, hear: Hear) -> None:
        """From now on tell this what workers say out of turn; it may be called from any thread."""
        ...

    @property
    def lines(self) -> Sequence[HasFileno]:
        """Readable when a worker has said something that `check` takes in."""
        ...

    def shutdown(self) -> None: ...


EXECUTORS: Registry[type[Executor]] = Registry(
    "executor",
    {
        "local": "pellucid.executor.local:LocalExecutor",
        "multiproc": "pellucid.executor.multiproc:MultiprocExecutor",
        "ray": "pellucid.nodes.ray:ray_executor",
    },
)
