"""`pellucid bench --profile FILE`: what host and device did during a run, as a trace and as a table.

The trace is Chrome's format, which https://ui.perfetto.dev shows.  Host spans come from wrapping the engine's
methods for as long as the run takes, so a run that is not profiled pays nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self, cast

from pellucid.cli.console import terminal
from pellucid.cli.measure import run_once
from pellucid.cli.workloads import Workload
from pellucid.engine.core import Engine
from pellucid.llm import LLM
from pellucid.types import RequestOutput, SeqUpdate

if TYPE_CHECKING:
    from pellucid.executor.base import Ticket
    from pellucid.schedule.news import News
    from pellucid.schedule.plan import StepPlan, StepResult

HOST, DEVICE = 1, 2  # process ids in the trace
MOST_NAMES, LONGEST_NAME = 20, 60  # of the table: rows, letters
Facts = dict[str, int]


class Span(NamedTuple):
    """Something that took a while.  Times in nanoseconds, `start` is time.time_ns's."""

    name: str
    start: int
    duration: int
    lane: str
    facts: Facts | None = None

    @property
    def end(self) -> int:
        return self.start + self.duration


@dataclass
class Profile:
    """A run, seen from inside."""

    host: list[Span] = field(default_factory=list[Span])
    device: list[Span] = field(default_factory=list[Span])

    def trace(self) -> dict[str, object]:
        """As Chrome's trace format has it, times in microseconds from the first span on."""
        spans = [*((HOST, span) for span in self.host), *((DEVICE, span) for span in self.device)]
        origin = min((span.start for _, span in spans), default=0)
        lanes = {lane: i for i, lane in enumerate(dict.fromkeys(span.lane for _, span in spans), start=1)}
        events: list[dict[str, object]] = [
            {
                "ph": "X",
                "name": span.name,
                "pid": process,
                "tid": lanes[span.lane],
                "ts": (span.start - origin) / 1000,
                "dur": span.duration / 1000,
                "args": span.facts or {},
            }
            for process, span in spans
        ]
        for process, name in ((HOST, "host"), (DEVICE, "device")):
            events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
        for process, lane in dict.fromkeys((process, span.lane) for process, span in spans):
            facts = {"name": lane}
            events.append(
                {"ph": "M", "name": "thread_name", "pid": process, "tid": lanes[lane], "args": facts}
            )
        return {"traceEvents": events, "displayTimeUnit": "ms"}


class HostSpans:
    """Notes when the engine plans, launches, waits, unpacks, commits and makes outputs; a context manager."""

    def __init__(self, llm: LLM, engine: Engine) -> None:
        self.spans: list[Span] = []
        self._llm_engine, self._engine = llm.llm_engine, engine
        self._wrapped: list[tuple[object, str]] = []
        self._stepped = 0  # when the engine's last step ended

    def __enter__(self) -> Self:
        scheduler, executor, engine = self._engine.scheduler, self._engine.executor, self._engine
        next_plan, submit, commit = scheduler.next_plan, executor.submit, scheduler.commit
        step, step_with_outputs = engine.step, self._llm_engine.step

        def plan_noted() -> StepPlan | None:
            with self.noted("plan"):
                return next_plan()

        def submit_noted(plan: StepPlan) -> Ticket:
            with self.noted("launch", facts_of(plan)):
                return NotedTicket(submit(plan), self, facts_of(plan))

        def commit_noted(plan: StepPlan, result: StepResult) -> News:
            with self.noted("commit", facts_of(plan)):
                return commit(plan, result)

        def step_noted() -> list[SeqUpdate]:
            with self.noted("step"):
                updates = step()
            self._stepped = time.time_ns()
            return updates

        def outputs_noted() -> list[RequestOutput]:
            outputs = step_with_outputs()
            self.add("outputs", self._stepped)
            return outputs

        self._wrap(scheduler, "next_plan", plan_noted)
        self._wrap(executor, "submit", submit_noted)
        self._wrap(scheduler, "commit", commit_noted)
        self._wrap(engine, "step", step_noted)
        self._wrap(self._llm_engine, "step", outputs_noted)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for owner, name in self._wrapped:
            delattr(owner, name)  # the method of its class is seen again

    def _wrap(self, owner: object, name: str, noted: Callable[..., object]) -> None:
        setattr(owner, name, noted)
        self._wrapped.append((owner, name))

    @contextmanager
    def noted(self, name: str, facts: Facts | None = None) -> Iterator[None]:
        """A span for what runs within."""
        began = time.time_ns()
        yield
        self.add(name, began, facts)

    def add(self, name: str, began: int, facts: Facts | None = None) -> None:
        """A span that ends now."""
        self.spans.append(Span(name, began, time.time_ns() - began, "engine", facts))


class NotedTicket:
    """A ticket whose wait and unpacking are spans."""

    def __init__(self, ticket: Ticket, spans: HostSpans, facts: Facts) -> None:
        self._ticket, self._spans, self._facts = ticket, spans, facts

    def provide(self, late: Mapping[str, object]) -> None:
        self._ticket.provide(late)

    def wait(self) -> None:
        with self._spans.noted("wait", self._facts):
            self._ticket.wait()

    def result(self) -> StepResult:
        with self._spans.noted("unpack", self._facts):
            return self._ticket.result()


def facts_of(plan: StepPlan) -> Facts:
    """What a step is, in numbers."""
    return {"plan": plan.id, "rows": len(plan.rows), "tokens": plan.num_tokens}


def profile_run(llm: LLM, workload: Workload, temperature: float) -> Profile:
    """Run a workload once more under the profiler.  Raises ValueError if the engine is in other processes."""
    engine = llm.llm_engine.engine
    if not isinstance(engine, Engine):
        raise ValueError("--profile looks into one engine; leave out --data-parallel-size")
    engine.executor.call("start_profile")
    with HostSpans(llm, engine) as host:
        run_once(llm, workload, temperature)
    device = engine.executor.call("stop_profile")
    return Profile(host.spans, [Span(*span) for span in cast("list[tuple[str, int, int, str]]", device)])


@dataclass(frozen=True, slots=True)
class Total:
    """All spans of one name.  Seconds that are its own: `own_times`."""

    name: str
    count: int
    seconds: float


def totals(spans: Sequence[Span]) -> list[Total]:
    """By name, most time first."""
    seconds, counts = Counter[str](), Counter[str]()
    for span, own in zip(spans, own_times(spans), strict=True):
        seconds[span.name] += own
        counts[span.name] += 1
    return [Total(name, counts[name], num / 1e9) for name, num in seconds.most_common()]


def own_times(spans: Sequence[Span]) -> list[int]:
    """Of each span its duration less what others have of it, nanoseconds.

    Those are the spans that lie within it on its lane, and the one before it that had not ended: a kernel may
    be launched early and wait for its inputs, and only what it adds is its own.
    """
    own = [span.duration for span in spans]
    around: dict[str, list[int]] = {}  # per lane: the spans that have not ended
    for index in sorted(range(len(spans)), key=lambda i: (spans[i].start, -spans[i].duration)):
        span, open_spans = spans[index], around.setdefault(spans[index].lane, [])
        while open_spans and spans[open_spans[-1]].end <= span.start:
            open_spans.pop()
        if open_spans and span.end <= spans[open_spans[-1]].end:
            own[open_spans[-1]] -= span.duration
        elif open_spans:
            own[index] -= spans[open_spans[-1]].end - span.start
        open_spans.append(index)
    return own


def idle_share(spans: Iterable[Span]) -> float:
    """Share of the time from the first span to the last in which none ran."""
    first = end = idle = 0
    for index, span in enumerate(sorted(spans, key=lambda span: span.start)):
        if index == 0:
            first = end = span.start
        idle += max(0, span.start - end)
        end = max(end, span.end)
    return idle / (end - first) if end > first else 0.0


def print_profile(profile: Profile) -> None:
    """The host's parts and the device's kernels with the most time."""
    from rich.table import Table

    title = f"the device idles {idle_share(profile.device):.1%} of the time" if profile.device else ""
    for heading, spans in (("host", profile.host), ("device", profile.device)):
        table = Table(title=title if heading == "device" else "", title_justify="left")
        table.add_column(heading, overflow="fold")
        for column in ("ms", "share", "count", "mean us"):
            table.add_column(column, justify="right")
        all_of_them = totals(spans)
        everything = sum(total.seconds for total in all_of_them) or 1.0
        for total in all_of_them[:MOST_NAMES]:
            table.add_row(
                total.name[:LONGEST_NAME],
                f"{1e3 * total.seconds:,.2f}",
                f"{total.seconds / everything:.1%}",
                f"{total.count:,}",
                f"{1e6 * total.seconds / total.count:,.2f}",
            )
        terminal().print(table)
