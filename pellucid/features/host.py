"""All features of an engine, as its loop calls them; what nobody has asked for costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, Self

from msgspec.structs import replace

from pellucid.features.base import FEATURES, AskingRow, Hooks, HostFeature, RowKind, bits_of, defines
from pellucid.registry import load_object
from pellucid.resolve import Resolved
from pellucid.schedule.news import News
from pellucid.schedule.plan import FEATURE_BITS, HOST_BOUND, StepPlan
from pellucid.schedule.sequence import Sequence
from pellucid.types import Request

if TYPE_CHECKING:
    from pellucid.executor.base import Capacity
    from pellucid.kv.hashes import Tokens
    from pellucid.kv.manager import PrefixHit
    from pellucid.schedule.scheduler import Scheduler

RowsOf = Callable[[StepPlan, int], list[AskingRow]]  # of a plan, those that have one of these bits


class HostFeatures:
    """The halves beside the scheduler."""

    def __init__(self, features: Mapping[str, HostFeature] | None = None) -> None:
        self._features = dict(features or {})
        self.bits = bits_of(self._features)
        self._hooks = Hooks(self._features)
        self._askers = [
            (each.asks, self.bits[name] | HOST_BOUND * each.is_host_bound)
            for name, each in self._features.items()
        ]
        self.watched = self._mask(lambda feature: feature.is_watched or feature.is_host_bound)
        self.prompt_only = self._mask(lambda feature: feature.rows is RowKind.PROMPT)
        self.sampling_only = self._mask(lambda feature: feature.rows is RowKind.SAMPLING) | HOST_BOUND
        self.with_late = self._mask(lambda feature: defines(feature, "late"))

    @classmethod
    def of(cls, resolved: Resolved) -> Self:
        """Those that are registered."""
        return cls({name: load_object(FEATURES.load(name).host)(resolved) for name in resolved.features})

    def _mask(self, has: Callable[[HostFeature], bool]) -> int:
        return reduce(or_, (self.bits[name] for name, each in self._features.items() if has(each)), 0)

    # A request's life

    def asks(self, request: Request) -> int:
        """The bits of what it asks for."""
        asked = 0
        for asks, bits in self._askers:
            if asks(request):
                asked |= bits
        return asked

    def prepare(self, request: Request) -> dict[str, Future[Any]]:
        """What it must wait for before it is queued, by feature."""
        hooks = self._hooks.of(FEATURE_BITS, "prepare")
        futures = {name: each.prepare(request) for name, each in hooks if each.asks(request)}
        return {name: future for name, future in futures.items() if future is not None}

    def enter(self, seq: Sequence) -> None:
        """It is queued."""
        for name, feature in self._hooks.of(seq.asked, "enter"):
            told = feature.enter(seq)
            if told is not None:
                seq.ride[name] = told

    def may_run(self, seq: Sequence, running: Iterable[Sequence]) -> bool:
        """May it have a slot beside these?"""
        gates = self._hooks.of(seq.asked, "gate")
        if not gates:
            return True
        others = list(running)
        return all(
            feature.gate(seq, [other for other in others if other.asked & self.bits[name]])
            for name, feature in gates
        )

    def holds(self, seq: Sequence, hit: PrefixHit) -> bool:
        """Does one keep it from being admitted, until it lets go of it?  All are asked."""
        keepers = [name for name, each in self._hooks.of(FEATURE_BITS, "holds") if each.holds(seq, hit)]
        return bool(keepers)

    def vacate(self, seq: Sequence, tokens: Tokens, num_computed: int) -> None:
        """It leaves its slot."""
        for _, feature in self._hooks.of(FEATURE_BITS, "vacate"):
            feature.vacate(seq, tokens, num_computed)

    def leave(self, request_id: str) -> None:
        """It has ended."""
        for _, feature in self._hooks.of(FEATURE_BITS, "leave"):
            feature.leave(request_id)

    # Whoever asks

    def bind(self, scheduler: Scheduler, capacity: Capacity) -> None:
        """The engine is about to begin."""
        for _, feature in self._hooks.of(FEATURE_BITS, "bind"):
            feature.bind(scheduler, capacity)

    def hear(self, name: str, rank: int, said: object) -> dict[str, str | None]:
        """What a rank has said out of turn.  Returns requests that end by it."""
        return self._features[name].hear(rank, said)

    def poll(self) -> dict[str, str | None]:
        """Requests that end in this turn."""
        ended: dict[str, str | None] = {}
        for _, feature in self._hooks.of(FEATURE_BITS, "poll"):
            ended |= feature.poll()
        return ended

    @property
    def are_busy(self) -> bool:
        """Is there something to wait for beside plans?"""
        return any(feature.is_busy() for _, feature in self._hooks.of(FEATURE_BITS, "is_busy"))

    def counters(self) -> dict[str, int]:
        """What all have counted."""
        hooks = self._hooks.of(FEATURE_BITS, "counters")
        return {name: num for _, feature in hooks for name, num in feature.counters().items()}

    def forget(self) -> None:
        """Prefixes are worth nothing any more."""
        for _, feature in self._hooks.of(FEATURE_BITS, "forget"):
            feature.forget()

    # A step

    def carry(self) -> dict[str, object]:
        """What the next plan carries, whoever asks."""
        told = {name: feature.carry() for name, feature in self._hooks.of(FEATURE_BITS, "carry")}
        return {name: each for name, each in told.items() if each is not None}

    def asked_by(self, names: Iterable[str]) -> int:
        """The bits of these features."""
        return reduce(or_, map(self.bits.__getitem__, names), 0)

    def ride(self, plan: StepPlan, rows_of: RowsOf) -> StepPlan:
        """The plan with what its rows' features have for workers."""
        rides = dict(plan.ride)
        for name, feature in self._hooks.of(plan.asked, "ride"):
            ride = feature.ride(self._rows(name, plan, rows_of))
            if ride is not None:
                rides[name] = ride
        if rides:
            plan = replace(plan, ride=rides)
        return plan

    def late(self, plan: StepPlan, rows_of: RowsOf) -> dict[str, object]:
        """What follows the plan, by feature; `plan.is_open` says that something does."""
        hooks = self._hooks.of(plan.asked, "late")
        return {name: feature.late(self._rows(name, plan, rows_of)) for name, feature in hooks}

    def _rows(self, name: str, plan: StepPlan, rows_of: RowsOf) -> list[AskingRow]:
        rows = rows_of(plan, self.bits[name])
        if self._features[name].rows is RowKind.SAMPLING:
            return [row for row in rows if row.samples]
        return rows

    def ended(self, plan: StepPlan) -> dict[str, str | None]:
        """Requests that end now; what is wrong with each, or None."""
        ended: dict[str, str | None] = {}
        for _, feature in self._hooks.of(plan.asked, "ended"):
            ended |= feature.ended()
        return ended

    def land(self, told: Mapping[str, object], news: News, scheduler: Scheduler) -> None:
        """What workers have told with a plan's result."""
        for name, each in told.items():
            self._features[name].land(each, news, scheduler)

    def shutdown(self) -> None:
        """May be called again."""
        for feature in self._features.values():
            feature.shutdown()
