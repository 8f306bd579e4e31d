"""What the scheduler takes to plan and to commit a step, in the loads that a server meets.

    python benchmarks/host.py --loads

The scheduler alone, on one core: plans are made a step ahead of commits, as on a GPU, and their results cost
nothing.  Every run of a load is the same, so each step counts with the least that it has taken in some runs:
what else the machine does is left out.  Microseconds.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from pellucid.kv.kinds import Full, Kind, Window
from pellucid.kv.manager import KVManager
from pellucid.sampling_params import SamplingParams
from pellucid.schedule.plan import StepPlan, StepResult, ints
from pellucid.schedule.scheduler import Scheduler
from pellucid.schedule.step import SchedulerOptions
from pellucid.types import Request

BLOCK = 64
MAX_LEN = 4096
PROMPT = 128
WARM, STEPS, RUNS = 64, 256, 4
DRAFTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the requests are like.  Lengths are in tokens."""

    is_quiet: bool = True
    num_spec: int = 0
    num_queued: int = 0  # requests that find no blocks
    answer: int = MAX_LEN - PROMPT - 1  # longest
    shortest: int | None = None  # answer; what ends is replaced
    kinds: tuple[Kind, ...] = (Full(BLOCK),)
    share: float = 1.0  # of the blocks that all need in the end; below 1 they preempt each other


LOADS = {
    "steady, quiet": Load(),
    "steady, streamed": Load(is_quiet=False),
    "steady, streamed, the head of the queue lacks blocks": Load(is_quiet=False, num_queued=8, answer=1400),
    f"up to {DRAFTS} drafts a row, ragged": Load(num_spec=DRAFTS, answer=3000),
    f"up to {DRAFTS} drafts a row, ragged; the head lacks blocks": Load(
        num_spec=DRAFTS, num_queued=8, answer=1400
    ),
    "one in 340 rows ends a step, and another begins": Load(answer=640, shortest=40),
    "all end in one step, and others begin": Load(answer=200),
    "a starved pool": Load(answer=640, shortest=320, share=0.4),
    "windows of 512 tokens beside full attention": Load(kinds=(Full(BLOCK), Window(BLOCK, 1, 512))),
}


class Drive:
    """A scheduler under a load."""

    def __init__(self, load: Load, num_rows: int) -> None:
        self.load, self.num_rows, self._rng = load, num_rows, np.random.default_rng(0)
        needed = num_rows * -(-(PROMPT + load.answer + load.num_spec) // BLOCK)
        num_blocks = int(load.share * needed)
        options = SchedulerOptions(
            max_model_len=MAX_LEN if not load.num_queued else BLOCK * num_blocks,
            num_slots=num_rows + load.num_queued,
            max_num_batched_tokens=max(16_384, (1 + load.num_spec) * num_rows + 2048),
            num_spec=load.num_spec,
        )
        kv = KVManager(
            load.kinds,
            num_blocks * sum(kind.stripes for kind in load.kinds),
            num_slots=options.num_slots,
            max_len=options.max_len,
            max_chunk=options.max_chunk,
        )
        self.scheduler = Scheduler(options, kv)
        self._names = iter(range(10**9))
        self._inflight: deque[StepPlan] = deque()
        self.plan_seconds: list[float] = []
        self.commit_seconds: list[float] = []
        self.num_joined: list[int] = []  # in each plan
        self.num_ended: list[int] = []  # in each commit
        for _ in range(num_rows):
            self._add()
        while self.scheduler.num_waiting:
            self.step()
        for _ in range(load.num_queued):
            self._add([1] * (BLOCK * (num_blocks - num_rows)), answer=1)

    def _add(self, prompt: list[int] | None = None, answer: int | None = None) -> None:
        load = self.load
        if answer is None:
            shortest = load.answer if load.shortest is None else load.shortest
            answer = int(self._rng.integers(shortest, load.answer, endpoint=True))
        self.scheduler.add(
            Request(
                id=str(next(self._names)),
                prompt_token_ids=prompt or self._rng.integers(0, 100_000, PROMPT).tolist(),
                sampling=SamplingParams(max_tokens=answer, ignore_eos=True),
                eos_token_ids=(151_645, 151_643),
                is_quiet=load.is_quiet,
                is_streamed=not load.is_quiet,
            )
        )

    def step(self) -> None:
        """Plan a step, and commit the one before it."""
        began = time.perf_counter()
        plan = self.scheduler.next_plan()
        self.plan_seconds.append(time.perf_counter() - began)
        self.num_joined.append(0 if plan is None else len(plan.admitted))
        if plan is not None:
            self._inflight.append(plan)
        if len(self._inflight) > 1 or plan is None:
            self._commit(self._inflight.popleft())

    def _commit(self, plan: StepPlan) -> None:
        result = self._result(plan)
        began = time.perf_counter()
        news = self.scheduler.commit(plan, result)
        self.commit_seconds.append(time.perf_counter() - began)
        ended = [update for update in news.updates if update.finish_reason is not None]
        self.num_ended.append(len(ended))
        for _ in ended:
            self._add()

    def _result(self, plan: StepPlan) -> StepResult:
        """A token for each row that samples, and for each draft one more, as chance will have it."""
        rows, width = plan.rows, 1 + self.load.num_spec
        table, slots = self.scheduler.table, plan.rows.slots
        query = np.ones_like(slots) if rows.num_query is None else rows.num_query
        draft = np.zeros_like(slots) if rows.num_draft is None else rows.num_draft
        new = 1 + self._rng.integers(0, draft, endpoint=True) if rows.num_draft is not None else 1 + draft
        ends = table.computed[slots] + query - draft
        new = np.where(ends >= table.known[slots], np.minimum(new, table.limit[slots] - ends), 0)
        tokens = self._rng.integers(0, 100_000, (len(rows), width), dtype=np.int32)
        num_new = np.maximum(new, 0).astype(np.int32)
        return StepResult(plan_id=plan.id, token_ids=ints(tokens.tobytes()), num_new=ints(num_new.tobytes()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of each step, in microseconds to plan and to commit it; and how many joined and ended in it."""

    plan: np.ndarray
    commit: np.ndarray
    num_joined: np.ndarray
    num_ended: np.ndarray

    @property
    def us_a_join(self) -> float:
        """What a sequence that begins adds to a plan; NaN if none does."""
        return added(self.plan, self.num_joined)

    @property
    def us_an_end(self) -> float:
        """What one that ends adds to a commit."""
        return added(self.commit, self.num_ended)


def added(micros: np.ndarray, counts: np.ndarray) -> float:
    """What each of so many in a step adds to it, against the median of the steps that have none."""
    has_some = counts > 0
    if not has_some.any() or has_some.all():
        return float("nan")
    return float((micros[has_some] - np.median(micros[~has_some])).sum() / counts.sum())


def measure(load: Load, num_rows: int) -> Figures:
    """Drive the scheduler through a load."""
    plans, commits = list[list[float]](), list[list[float]]()
    for _ in range(RUNS):
        drive = Drive(load, num_rows)
        for _ in range(WARM):
            drive.step()
        drive.plan_seconds, drive.commit_seconds, drive.num_joined, drive.num_ended = [], [], [], []
        for _ in range(STEPS):
            drive.step()
        plans.append(drive.plan_seconds)
        commits.append(drive.commit_seconds)
    return Figures(
        plan=1e6 * np.min(plans, axis=0),
        commit=1e6 * np.min(commits, axis=0),
        num_joined=np.array(drive.num_joined),
        num_ended=np.array(drive.num_ended),
    )


def show(all_rows: list[int]) -> None:
    """Drive the scheduler through each load, and print what it took."""
    heads = "rows   plan  commit   both: mean  median    most   ends a step   us a join   an end"
    print(f"{'us a step':60} {heads}")
    for num_rows in all_rows:
        for title, load in LOADS.items():
            took = measure(load, num_rows)
            both = took.plan + took.commit
            print(
                f"{title:60} {num_rows:4}  {took.plan.mean():5.0f}   {took.commit.mean():5.0f}        "
                f"{both.mean():5.0f}   {np.median(both):5.0f}   {both.max():5.0f}   "
                f"{took.num_ended.mean():11.2f}   {took.us_a_join:9.1f}   {took.us_an_end:6.1f}"
            )
