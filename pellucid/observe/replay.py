"""A trace of steps run again, in virtual time: the real scheduler, and a worker as slow as the recorded one.

With whatever else is to be asked of budget, blocks or policy.

Drafts are not made again: each row yields a token.  Knows no device and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np

from pellucid.kv.manager import KVManager
from pellucid.observe.trace import VERSION, EngineRecord, PictureRecord, Record, RequestRecord, StepRecord
from pellucid.sampling_params import SamplingParams
from pellucid.schedule.plan import StepPlan, StepResult
from pellucid.schedule.prefill_budget import LearnedPrefillBudget, UnlimitedPrefill
from pellucid.schedule.scheduler import Scheduler
from pellucid.schedule.step import SchedulerOptions
from pellucid.types import Request

BLOCK_TOKENS = 1 << 20  # numbers that tokens of one block may have, and no other block's
OWN = 1 << 30  # where tokens begin that no other prompt has


@dataclass(frozen=True, slots=True)
class Recorded:
    """A trace, but for its pictures."""

    engine: EngineRecord
    requests: list[RequestRecord]
    steps: list[StepRecord]

    @property
    def num_generated(self) -> dict[str, int]:
        """Tokens that each request got, by its id."""
        names, found = dict[int, str](), dict[str, int]()
        for step in self.steps:
            names.update(step.admitted)
            for seq_id, _, _, num_new in step.rows:
                if seq_id in names:
                    found[names[seq_id]] = found.get(names[seq_id], 0) + num_new
        return found


@dataclass(slots=True)
class Outcome:
    """How it went.  Times in seconds."""

    num_steps: int = 0
    seconds: float = 0.0  # from the first arrival to the last token
    num_tokens: int = 0  # generated
    num_preemptions: int = 0
    kv_peak: float = 0.0  # share of the cache
    num_cached: int = 0  # tokens of prompts
    waits: list[float] = field(default_factory=list[float])  # for each request's first token
    gaps: list[float] = field(default_factory=list[float])  # between two of a request's tokens
    refused: list[str] = field(default_factory=list[str])


def read_trace(path: str | Path) -> Recorded:
    """Raises ValueError for what is no trace; a last line that was cut off is left out."""
    decode = msgspec.json.Decoder(Record).decode
    records: list[Record] = []
    lines = Path(path).read_bytes().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            records.append(decode(line))
        except msgspec.MsgspecError as error:
            if number == len(lines) and records:
                break
            raise ValueError(f"{path}, line {number}: {error}; is it a file of --trace-steps?") from error
    if not records or not isinstance(records[0], EngineRecord):
        raise ValueError(f"{path} does not begin with an engine; is it a file of --trace-steps?")
    if records[0].version != VERSION:
        raise ValueError(f"{path} is of version {records[0].version}, this reads {VERSION}")
    if num_more := sum(isinstance(record, EngineRecord) for record in records[1:]):
        raise ValueError(f"{path} has traces of {num_more + 1} engines; give each a file of its own")
    requests = [record for record in records if isinstance(record, RequestRecord)]
    return Recorded(records[0], requests, [record for record in records if isinstance(record, StepRecord)])


def pictures(path: str | Path) -> list[dict[str, object]]:
    """What the X-ray shows of a trace."""
    decode = msgspec.json.Decoder(Record).decode
    records = (decode(line) for line in Path(path).read_bytes().splitlines())
    return [record.sight for record in records if isinstance(record, PictureRecord)]


def measured(recorded: Recorded) -> Outcome:
    """How it went when it was recorded."""
    outcome, watch = Outcome(), _Watch({each.id: each.arrival for each in recorded.requests})
    names: dict[int, str] = {}
    for step in recorded.steps:
        names.update(step.admitted)
        outcome.num_cached += step.num_cached
        outcome.kv_peak = max(outcome.kv_peak, step.kv_usage)
        outcome.num_preemptions = step.num_preemptions
        for seq_id, _, _, num_new in step.rows:
            if num_new and seq_id in names:
                watch.note(outcome, names[seq_id], num_new, step.landed)
    outcome.num_steps = len(recorded.steps)
    outcome.seconds = watch.seconds
    return outcome


class StepCost:
    """Seconds of a step, by its tokens of decodes and of prompts: a plane through what was recorded."""

    def __init__(self, steps: Sequence[StepRecord]) -> None:
        """Raises ValueError if there are none."""
        if not steps:
            raise ValueError("the trace has no steps; there is nothing to learn their times from")
        sizes = [_sizes([(query, drafts) for _, query, drafts, _ in step.rows]) for step in steps]
        table = np.array([(1.0, *size) for size in sizes])
        seconds = np.array([step.seconds for step in steps])
        kept = [0, 1, 2]
        while True:  # nothing makes a step shorter
            solved = np.linalg.lstsq(table[:, kept], seconds, rcond=None)[0]
            if (solved >= 0).all() or len(kept) == 1:
                break
            kept.remove(kept[int(solved.argmin())])
        self.parts = np.zeros(3)
        self.parts[kept] = np.maximum(solved, 0.0)

    def seconds(self, plan: StepPlan) -> float:
        sizes = _sizes([(row.num_query, row.num_draft) for row in plan.rows])
        return max(1e-6, float(self.parts @ (1.0, *sizes)))


def replay(
    recorded: Recorded,
    cost: StepCost,
    *,
    options: SchedulerOptions | None = None,
    num_pages: int | None = None,
    target_itl_ms: float | None = None,
    has_prefix_cache: bool | None = None,
) -> Outcome:
    """Run the scheduler on the recorded requests.  What is not said is as it was recorded.

    target_itl_ms: as the option; None sets no limit.
    """
    engine = recorded.engine
    options = replace(options or engine.options, pp=1, num_spec=0, cheap_tokens=0)
    kv = KVManager(
        tuple(engine.kinds),
        engine.num_pages if num_pages is None else num_pages,
        num_slots=options.num_slots,
        max_len=options.max_len,
        max_chunk=options.max_chunk,
        enable_prefix_caching=engine.has_prefix_cache if has_prefix_cache is None else has_prefix_cache,
    )
    budget = LearnedPrefillBudget(target_itl_ms / 1000) if target_itl_ms else UnlimitedPrefill()
    scheduler = Scheduler(options, kv, budget)
    worker, outcome = _Worker(), Outcome()
    watch = _Watch({each.id: each.arrival for each in recorded.requests})
    coming = _requests(recorded)
    now = coming[-1].arrival if coming else 0.0
    while coming or scheduler.has_unfinished:
        while coming and coming[-1].arrival <= now:
            refusal = scheduler.add(coming.pop())
            if refusal is not None:
                outcome.refused.append(f"{refusal.request_id}: {refusal.error}")
        plan = scheduler.next_plan()
        if plan is None:
            if not coming and not scheduler.has_unfinished:
                break
            assert coming, "nothing runs, nothing comes, and something waits"
            now = max(now, coming[-1].arrival)
            continue
        seconds = cost.seconds(plan)
        now += seconds
        outcome.num_steps += 1
        outcome.num_cached += sum(admission.num_computed for admission in plan.admitted)
        outcome.kv_peak = max(outcome.kv_peak, scheduler.kv.usage)
        scheduler.prefill_budget.took(seconds)
        for update in scheduler.commit(plan, worker.run(plan)).one_by_one():
            if update.new_token_ids:
                watch.note(outcome, update.request_id, len(update.new_token_ids), now)
    outcome.num_preemptions, outcome.seconds = scheduler.counters.num_preemptions, watch.seconds
    return outcome


class _Watch:
    """Notes when requests get their tokens.  arrivals: by id."""

    def __init__(self, arrivals: dict[str, float]) -> None:
        self._arrivals, self._newest = arrivals, dict[str, float]()
        self._first, self._last = min(arrivals.values(), default=0.0), 0.0

    def note(self, outcome: Outcome, request_id: str, num_new: int, now: float) -> None:
        before = self._newest.get(request_id)
        if before is None:
            outcome.waits.append(now - self._arrivals.get(request_id, now))
        else:
            outcome.gaps.append(now - before)
        self._newest[request_id] = self._last = now
        outcome.num_tokens += num_new

    @property
    def seconds(self) -> float:
        return max(0.0, self._last - self._first)


@dataclass(slots=True)
class _Worker:
    """Knows how many tokens are in each slot; every row that samples yields one."""

    known: dict[int, int] = field(default_factory=dict[int, int])
    computed: dict[int, int] = field(default_factory=dict[int, int])
    limit: dict[int, int] = field(default_factory=dict[int, int])
    num_made: int = 0

    def run(self, plan: StepPlan) -> StepResult:
        for new in plan.admitted:
            self.known[new.slot], self.limit[new.slot] = len(new.token_ids), new.limit
            self.computed[new.slot] = new.num_computed
        tokens: list[list[int]] = []
        for row in plan.rows:
            end = self.computed[row.slot] = self.computed[row.slot] + row.num_query
            samples = end >= self.known[row.slot] and end < self.limit[row.slot]
            self.num_made += samples
            tokens.append([OWN + self.num_made % OWN] if samples else [])
            self.known[row.slot] += samples
        return StepResult.of(plan.id, tokens)


def _requests(recorded: Recorded) -> list[Request]:
    """All that got a token, the last to come first.  Each runs as long as it ran."""
    lengths = recorded.num_generated
    found = [
        Request(
            id=each.id,
            prompt_token_ids=_prompt(each, index, recorded.engine.kinds[0].block_size),
            sampling=SamplingParams(max_tokens=lengths[each.id], ignore_eos=True),
            is_streamed=each.is_streamed,
            priority=each.priority,
            arrival=each.arrival,
        )
        for index, each in enumerate(recorded.requests)
        if lengths.get(each.id)
    ]
    return sorted(found, key=lambda request: request.arrival)[::-1]


def _prompt(request: RequestRecord, index: int, block_size: int) -> list[int]:
    """Tokens that are the same where blocks were, and nowhere else."""
    tokens: list[int] = []
    for block in request.blocks:
        tokens += [(block + i) % OWN for i in range(block_size)]
    rest = request.prompt_len - len(tokens)
    return tokens + [(OWN + index * BLOCK_TOKENS + i) % (2 * OWN - 1) for i in range(rest)]


def _sizes(rows: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Tokens of decodes, drafts among them, and of prompts.  rows: tokens computed, drafts of these."""
    num_decode = sum(query for query, drafts in rows if query == 1 + drafts)
    return num_decode, sum(query for query, _ in rows) - num_decode
