"""Streams beside long prompts, on a device that takes virtual time: who waits how long.

python -m tests.schedule.test_pace      a table of what streams and prompts wait for, with and without a pace
"""

from __future__ import annotations

import random
import sys
from collections import deque
from dataclasses import dataclass, field, replace
from statistics import median, quantiles

import pytest

from pellucid.kv.manager import KVManager
from pellucid.kv.specs import KVGroupSpec
from pellucid.schedule.pace import FLOOR, LearnedPace, Pace, Unpaced
from pellucid.schedule.plan import StepPlan
from pellucid.schedule.scheduler import Scheduler, SchedulerOptions
from pellucid.schedule.sequence import Sequence
from pellucid.types import Request
from tests.schedule.device import Device, make_request

DEPTH = 2


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Seconds: of a step that only decodes, of what a chunk adds beside it, of each token."""

    decode: float
    row: float
    chunk: float
    token: float
    reach: float  # for each token before a prompt token

    def step(self, num_decode: int, num_prompt: int, reach: int) -> float:
        seconds = self.decode + self.row * num_decode + self.token * num_prompt + self.reach * reach
        return seconds + (self.chunk if num_prompt else 0.0)


# 32 rows decode in 1.2 ms and a token of an 8,000-token prompt costs 3.5 us; 5.3 ms and 25 us.
SMALL = Speed(decode=0.9e-3, row=10e-6, chunk=0.3e-3, token=2.5e-6, reach=1e-6 / 4000)
LARGE = Speed(decode=4.4e-3, row=28e-6, chunk=0.0, token=22e-6, reach=3e-6 / 4000)
# The matrices are read once, for decodes and chunk together.
SHARED = replace(LARGE, chunk=-3e-3)


@dataclass
class VirtualRun:
    """An engine's loop with two steps under way, in which time passes only on the device."""

    speed: Speed
    pace: Pace
    noise: float = 0.02  # of a step's time, standard deviation
    num_slots: int = 64
    now: float = 0.0
    tokens_at: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    plans: list[tuple[int, int]] = field(
        default_factory=list[tuple[int, int]]
    )  # tokens of decodes, of prompts

    def __post_init__(self) -> None:
        group = KVGroupSpec(block_size=64, num_layers=1, num_kv_heads=1, head_dim=1, dtype="int8", itemsize=1)
        options = SchedulerOptions(
            max_model_len=40_000, num_slots=self.num_slots, max_num_batched_tokens=16_384
        )
        kv = KVManager((group,), (40_000,), enable_prefix_caching=False)
        self.scheduler = Scheduler(options, kv, pace=self.pace)
        self.device, self.random = Device(), random.Random(0)
        self.inflight: deque[tuple[StepPlan, float, float]] = deque()  # submitted, done
        self.last_done = 0.0
        self.arrived: dict[str, float] = {}

    def add(self, request: Request) -> None:
        self.arrived[request.id] = self.now
        self.scheduler.add(request)

    def until(self, end: float, arrivals: deque[tuple[float, Request]] | None = None) -> None:
        """Until this moment, or until there is nothing to do."""
        arrivals = arrivals or deque()
        while self.now < end and (arrivals or self.inflight or self.scheduler.has_unfinished):
            while arrivals and arrivals[0][0] <= self.now:
                moment, request = arrivals.popleft()
                self.add(request)
                self.arrived[request.id] = moment
            if not self.step():
                self.now = arrivals[0][0]

    def step(self) -> bool:
        while len(self.inflight) < DEPTH and (plan := self.scheduler.next_plan()):
            begin = max(self.now, self.inflight[-1][2] if self.inflight else self.last_done)
            self.inflight.append((plan, self.now, begin + self.seconds(plan)))
        if not self.inflight:
            return False
        plan, submitted, self.now = self.inflight.popleft()
        self.pace.took(self.now - max(submitted, self.last_done))
        self.last_done = self.now
        for update in self.scheduler.commit(plan, self.device.run(plan)):
            self.tokens_at.setdefault(update.request_id, []).append(self.now)
        return True

    def seconds(self, plan: StepPlan) -> float:
        lengths = self.lengths()
        num_decode = num_prompt = reach = 0
        for row in plan.rows:
            seq = lengths[row.seq_id]
            if seq.num_planned <= seq.prefill_len and (row.num_query > 1 or not row.num_logits):
                num_prompt += row.num_query
                reach += row.num_query * (2 * seq.num_planned - row.num_query) // 2
            else:
                num_decode += row.num_query
        self.plans.append((num_decode, num_prompt))
        scale = max(0.5, self.random.gauss(1.0, self.noise))
        return scale * self.speed.step(num_decode, num_prompt, reach)

    def lengths(self) -> dict[int, Sequence]:
        return {seq.id: seq for seq in self.scheduler.running()}

    def gaps(self, since: float) -> list[float]:
        """Between the tokens of streams, from a moment on."""
        return [
            later - earlier
            for name, times in self.tokens_at.items()
            if name.startswith("stream")
            for earlier, later in zip(times, times[1:], strict=False)
            if earlier >= since
        ]

    def first_tokens(self, since: float) -> list[float]:
        """Of prompts that came from a moment on: how long until the first token."""
        return [
            times[0] - self.arrived[name]
            for name, times in self.tokens_at.items()
            if name.startswith("prompt") and self.arrived[name] >= since
        ]


def stream(index: int) -> Request:
    return replace(make_request(f"stream {index}", 100, max_tokens=30_000), is_streamed=True)


def prompt(index: int, length: int = 8000, *, is_streamed: bool = False) -> Request:
    return replace(make_request(f"prompt {index}", length, max_tokens=1), is_streamed=is_streamed)


def beside_streams(speed: Speed, pace: Pace, *, seconds: float = 6.0, every: float = 0.25) -> VirtualRun:
    """32 streams, and from 0.25 s on a prompt of 8,000 tokens every so often."""
    run = VirtualRun(speed, pace)
    for i in range(32):
        run.add(stream(i))
    moments = [0.25 + i * every for i in range(int(seconds / every) - 1)]
    run.until(seconds, deque((moment, prompt(i)) for i, moment in enumerate(moments)))
    return run


def figures(run: VirtualRun, since: float = 1.0) -> tuple[float, float, float]:
    """Milliseconds: p99 and maximum between a stream's tokens, median to a prompt's first."""
    gaps = run.gaps(since)
    return 1e3 * quantiles(gaps, n=100)[-1], 1e3 * max(gaps), 1e3 * median(run.first_tokens(since))


CASES = [("small", SMALL, 6.0, 60.0), ("large", LARGE, 30.0, 300.0), ("large, shared", SHARED, 30.0, 300.0)]


@pytest.mark.parametrize("name,speed,most_itl,most_ttft", CASES)
def test_streams_bear_long_prompts_and_these_are_soon_done(
    name: str, speed: Speed, most_itl: float, most_ttft: float
) -> None:
    itl, _, ttft = figures(beside_streams(speed, LearnedPace()))
    assert itl < most_itl and ttft < most_ttft
    alone = speed.step(32, 8000, 8000 * 4000)
    unpaced_itl, _, _ = figures(beside_streams(speed, Unpaced(), seconds=3.0))
    assert unpaced_itl > 0.9e3 * alone, "without a pace streams wait for whole prompts"


def main() -> None:
    for name, speed, _, _ in CASES:
        for label, pace in (
            ("auto", LearnedPace()),
            ("4x", LearnedPace(4 / 0.9 * speed.step(32, 0, 0))),
            ("off", Unpaced()),
        ):
            itl, worst, ttft = figures(beside_streams(speed, pace))
            sys.stdout.write(
                f"{name:14} {label:6} ITL p99 {itl:6.1f} max {worst:6.1f} ms, TTFT p50 {ttft:6.1f} ms\n"
            )


if __name__ == "__main__":
    main()
