"""A feature: something that requests may ask for beside tokens, of which the loop knows nothing.

It has two halves, one beside the scheduler and one in every worker.  Who asks has the feature's bit in the
column `asked`; a step has the bits of its rows, and only those features' hooks are called.  In the order of a
request's life:

    host    asks, prepare   it is handed in; `prepare` may take its time
            enter, gate     it is queued; it may have a slot
    worker  admit           it is in a slot
    host    ride            its row is planned: what the plan carries along
    worker  before          before the forward
            extend          its input is there: what layers are to see beside it
    host    late            what follows the plan while the forward runs
    worker  fill            it has come, before the logits are used
            between         the logits are there, nothing is sampled yet
            after           tokens and drafts are there: what goes home beside them
    host    land            the plan is committed
            leave           it has ended, for whatever reason
    worker  retire          its slot has nobody

Some hooks are called whoever asks, for what concerns all requests or none:

    host    holds           the oldest of the queue, which may have to wait for what this feature brings
            vacate          a request leaves its slot; its pages are about to be dropped
            carry           what a plan carries, rows or none
    worker  ahead, behind   what it carries: before its forward, and when all of it is launched
            say             from any thread, out of turn: `WorkerFacts.say`
    host    hear            what a rank has said so
            poll            once in each turn of the loop
            is_busy         does a feature have something under way that the loop must wait for?
            counters        what it has counted, for stats and metrics; `.._now` is there now
            forget          prefixes are worth nothing any more
    both    bind            the KV cache is there

A half defines the hooks that it needs; the others are never called.  What `asks`, `prepare` and `enter` raise
ends the request alone; the other hooks must not fail.  State is kept by request, slot or plan:
with two plans under way there is no current step.  Law 11: what a plan carries is used by that plan alone,
and `leave` lets go of all that a feature holds.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pellucid.registry import Registry
from pellucid.schedule.plan import FIRST_FEATURE

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pellucid.executor.base import Capacity
    from pellucid.forward import ForwardInput
    from pellucid.kv.hashes import Tokens
    from pellucid.kv.manager import PrefixHit
    from pellucid.lora.bank import Bank
    from pellucid.resolve import Resolved
    from pellucid.rows import StepRows
    from pellucid.sample.output import SampleOutput
    from pellucid.sample.sampler import Sampler
    from pellucid.schedule.news import News
    from pellucid.schedule.plan import Admission
    from pellucid.schedule.scheduler import Scheduler
    from pellucid.schedule.sequence import Sequence as Seq
    from pellucid.spec.base import DraftShape
    from pellucid.types import Request
    from pellucid.worker.inputs import StepCounts, StepInput
    from pellucid.worker.slots import Slots


class RowKind(enum.Enum):
    """Which rows of a request have its features' bits."""

    ALL = "all"
    PROMPT = "prompt"  # chunks, the last one included; and rows that are planned before that has landed
    SAMPLING = "sampling"  # the last chunk, and all behind it


class Halves(enum.IntEnum):
    """What may be replayed of a step that is recorded: a step is as slow as the slowest of its features.

    One with a hook in the second half that does not say SPLIT is EAGER.
    """

    WHOLE = 0  # all of it: what `before` fills lies where the recording reads it
    # By halves, with `between` and `after` in the second one: what `fill` fills lies where it reads it.  That
    # is recorded when nobody asks, so these hooks do not look at who does.
    SPLIT = 1
    EAGER = 2  # the forward alone; the second half is launched kernel by kernel


@dataclass(frozen=True, slots=True)
class AskingRow:
    """A planned row of a request that asks for a feature."""

    index: int  # in the plan
    request: Request
    token_ids: NDArray[np.int32]  # that have landed, the prompt included; not to be changed
    num_draft: int
    samples: bool


class HostFeature:
    """The half beside the scheduler; there is one an engine, and one thread calls it."""

    rows = RowKind.ALL
    is_watched = False  # each of its rows is looked at when it lands; else only a request's first and last
    is_host_bound = False  # the host must see each token before the next row: one is in flight at most

    def __init__(self, resolved: Resolved) -> None:
        pass

    def asks(self, request: Request) -> bool:
        """Does this request?  What is wrong with its wish is a ValueError."""
        return False

    def prepare(self, request: Request) -> Future[Any] | None:
        """What must be ready before it is queued; None: all is.  An exception says why it can not be."""

    def enter(self, seq: Seq) -> object:
        """It is queued.  Returns what `Admission.ride` is to bring the worker's half: plain data, or None."""

    def gate(self, seq: Seq, beside: Sequence[Seq]) -> bool:
        """May it run beside these, which ask, too?  If not, it and all behind it wait until one has left.

        Beside nobody it may.
        """
        raise NotImplementedError

    def ride(self, rows: Sequence[AskingRow]) -> object:
        """What this plan brings the worker's half: a type that can be imported, its fields typed; or None.

        rows: perhaps none, where one that asked has just given way.
        """

    def late(self, rows: Sequence[AskingRow]) -> object:
        """The same, while the forward already runs.  It stays as it is until the next call."""

    def ended(self) -> dict[str, str | None]:
        """Requests that end now, before what is under way counts, by id; what is wrong, or None."""
        return {}

    def bind(self, scheduler: Scheduler, capacity: Capacity) -> None:
        """The engine is about to begin."""

    def holds(self, seq: Seq, hit: PrefixHit) -> bool:
        """Must it wait, without slot and pages, until `Scheduler.release`?  Asked again behind that.

        hit: what of its prefix is in the KV cache.
        """
        return False

    def vacate(self, seq: Seq, tokens: Tokens, num_computed: int) -> None:
        """It leaves its slot.  tokens: its own, of which so many have KV."""

    def carry(self) -> object:
        """What the next plan brings the worker's half, whoever asks; or None."""

    def hear(self, rank: int, said: Any) -> dict[str, str | None]:
        """What a rank's half has said out of turn.  Returns as `ended`."""
        return {}

    def poll(self) -> dict[str, str | None]:
        """Time has passed.  Returns as `ended`."""
        return {}

    def is_busy(self) -> bool:
        """Will `hear` or `poll` bring something that the loop is not to end before?"""
        return False

    def counters(self) -> dict[str, int]:
        """Totals since the start, under names that no other feature has."""
        return {}

    def forget(self) -> None:
        """What is known of prefixes is to be used no more."""

    def land(self, told: Any, news: News, scheduler: Scheduler) -> None:
        """What the worker's half has told of a plan."""

    def leave(self, request_id: str) -> None:
        """It has ended, perhaps before it was queued."""

    def shutdown(self) -> None:
        """The engine has ended.  May be called again."""


class Home(NamedTuple):
    """What a step brings home for a feature, in the one copy with its tokens."""

    tensors: Sequence[Tensor]  # of 32 bits an item, or counts and ids that fit
    # Makes of them what `HostFeature.land` is told; None: nothing.  It is given the step, how many tokens its
    # rows yielded [B], the tensors as int32 arrays, and a dict to write into which row has failed, and why.
    read: Callable[[StepCounts, np.ndarray, list[np.ndarray], dict[int, str]], object]


@dataclass(frozen=True, slots=True)
class Yielded:
    """What a step has made, on the device, where a feature may read it."""

    step: StepInput
    hidden: Tensor  # [T, D], or of the wanted tokens alone
    output: SampleOutput
    drafts: Tensor  # [B, k]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """What a worker's halves may need."""

    vocab_size: int
    device: torch.device
    slots: Slots
    sampler: Sampler
    head: Callable[..., Tensor]  # hidden states [p, D], `of_head` -> logits [p, V], of the whole vocabulary
    shape: DraftShape
    lora_banks: Sequence[Bank]  # of the target's layers that are here
    modules: Set[str]  # of all its layers: paths that a checkpoint's weights have
    adaptable: Set[str]  # of these, what adapters may change, embedding and head included
    # The target's tensor of this name as its checkpoint has it; None: it has none.
    read_own: Callable[[str], Tensor | None]
    rename: Callable[[str], str]  # from a checkpoint's key to the target's name for that tensor
    ignored: Sequence[str]  # patterns of tensors that it has no use for
    resolved: Resolved
    rank: int
    say: Callable[[str, object], None]  # to the host's half of this name, out of turn; from any thread


class WorkerFeature:
    """The half in a worker.  Everything in it is launched; nothing waits for the device."""

    halves = Halves.WHOLE

    def __init__(self, facts: WorkerFacts) -> None:
        pass

    def make_room(self, most: int) -> None:
        """Lay out what recordings will read, for steps of so many logits: it never moves."""

    def admit(self, admissions: Sequence[Admission]) -> Mapping[int, str] | None:
        """Those that ask for it are in their slots; in the warm-up without a ride.

        Who does not ask is not told of: what is kept by slot may be that of a request which has left.
        Returns, by slot, what is wrong with whom, who then ends with that error; every rank finds the same.
        """

    def bind(self, pages: Tensor | None, capacity: Capacity) -> None:
        """The KV cache is there, bytes [1 + num_pages, page_bytes]; or is about to go: None."""

    def ahead(self, ride: Any) -> None:
        """What `carry` has sent: before the plan's forward, whether or not it has rows."""

    def behind(self, ride: Any) -> None:
        """The same: when all of the plan is launched."""

    def shutdown(self) -> None:
        """The worker is about to end, or to be built anew."""

    def retire(self, slots: Sequence[int]) -> None:
        """Those in these slots have left; called before others are admitted, also for who did not ask."""

    def before(self, counts: StepCounts, ride: Any) -> None:
        """ride: what the host's half has sent with the plan; None in the warm-up."""

    def extend(self, rows: StepRows, fwd: ForwardInput) -> None:
        """Add to what the forward sees.  Steps are recorded with it and without."""

    def fill(self, counts: StepCounts, late: Any) -> None:
        """late: what the host's half has sent behind the plan."""

    def clear(self, counts: StepCounts) -> None:
        """No row asks, but a recording runs that reads what `fill` fills: let it change nothing."""

    def between(self, rows: StepRows, logits: Tensor) -> None:
        """Change logits [S, this rank's share of V] in place."""

    def after(self, rows: StepRows, yielded: Yielded) -> Home | None:
        """What goes home; None: nothing of this step."""


class Feature(NamedTuple):
    """Both halves, as "module:Class"."""

    host: str
    worker: str


FEATURES: Registry[Feature] = Registry(
    "feature",
    {
        "lora": "pellucid.features.lora:LORA",
        "grammar": "pellucid.features.grammar:GRAMMAR",
        "logprobs": "pellucid.features.logprobs:LOGPROBS",
        "prompt_logprobs": "pellucid.features.logprobs:PROMPT_LOGPROBS",
        "pooling": "pellucid.features.pooling:POOLING",
        "kv_transfer": "pellucid.connectors:KV_TRANSFER",
        "kv_events": "pellucid.connectors:KV_EVENTS",
        "mean_pooling": "pellucid.features.pooling:MEAN_POOLING",
    },
)


def defines(feature: HostFeature | WorkerFeature, hook: str) -> bool:
    """Has this half a hook of its own?"""
    plain = HostFeature if isinstance(feature, HostFeature) else WorkerFeature
    return getattr(type(feature), hook) is not getattr(plain, hook)


class Hooks:
    """A half's features by the bits of a step; for the same bits the same tuple each time."""

    def __init__(self, features: Mapping[str, Any]) -> None:
        self._features, self._bits = dict(features), bits_of(features)
        self._known: dict[tuple[int, str], tuple[tuple[str, Any], ...]] = {}

    def of(self, asked: int, hook: str) -> tuple[tuple[str, Any], ...]:
        """(name, feature) of those that are asked for and define the hook."""
        found = self._known.get((asked, hook))
        if found is None:
            found = tuple(
                (name, feature)
                for name, feature in self._features.items()
                if self._bits[name] & asked and defines(feature, hook)
            )
            self._known[asked, hook] = found
        return found


def bits_of(names: Iterable[str]) -> dict[str, int]:
    """Each feature's bit in `asked`, by its place; the bits below are the scheduler's own."""
    return {name: FIRST_FEATURE << place for place, name in enumerate(names)}
