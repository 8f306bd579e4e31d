"""Streams beside long prompts, on a device that takes virtual time: who waits how long.

python -m tests.schedule.test_prefill_budget      what streams and prompts wait for, with and without a budget
"""

from __future__ import annotations

import math
import random
import sys
from collections import deque
from dataclasses import dataclass, field, replace
from statistics import median, quantiles

import pytest

from pellucid.kv.kinds import Full
from pellucid.schedule.plan import StepPlan
from pellucid.schedule.prefill_budget import (
    FLOOR,
    LOOKS,
    TILE,
    LearnedPrefillBudget,
    PrefillBudget,
    UnlimitedPrefill,
)
from pellucid.schedule.scheduler import Scheduler, SchedulerOptions
from pellucid.types import Request
from tests.schedule.device import Device, make_kv, make_request

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


# 32 rows decode in 1.2 ms and a token of an 8,000-token prompt costs 3.5 us; 5.0 ms and 24 us, as an H200
# has shown for Qwen3-8B where tiles are full.
SMALL = Speed(decode=0.9e-3, row=10e-6, chunk=0.3e-3, token=2.5e-6, reach=1e-6 / 4000)
LARGE = Speed(decode=4.1e-3, row=28e-6, chunk=0.0, token=19.2e-6, reach=4.3e-6 / 4000)
# Where decodes alone are slower than the products of a chunk would be.
SLOW = replace(LARGE, decode=5.3e-3, chunk=-1.2e-3)
# One row decodes in 0.6 ms, 256 in 5.5, as attention takes its time.
CROWDED = Speed(decode=0.6e-3, row=19e-6, chunk=0.8e-3, token=2.5e-6, reach=1e-6 / 4000)
# 32 rows decode in 0.9 ms, and a chunk costs as much again and more, even a small one.
QUICK = Speed(decode=0.62e-3, row=9e-6, chunk=1.7e-3, token=1.6e-6, reach=0.5e-6 / 4000)
# The matrices are read once, for decodes and chunk together.
SHARED = replace(LARGE, chunk=-3e-3)


@dataclass
class VirtualRun:
    """An engine's loop with two steps under way, in which time passes only on the device."""

    speed: Speed
    prefill_budget: PrefillBudget
    noise: float = 0.02  # of a step's time, standard deviation
    num_slots: int = 64
    now: float = 0.0
    tokens_at: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    plans: list[tuple[int, int]] = field(
        default_factory=list[tuple[int, int]]
    )  # tokens of decodes, of prompts

    def __post_init__(self) -> None:
        options = SchedulerOptions(
            max_model_len=40_000, num_slots=self.num_slots, max_num_batched_tokens=16_384
        )
        kv = make_kv(options, 40_000, (Full(64),), caching=False)
        self.scheduler = Scheduler(options, kv, prefill_budget=self.prefill_budget)
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
        self.prefill_budget.took(self.now - max(submitted, self.last_done))
        self.last_done = self.now
        for update in self.scheduler.commit(plan, self.device.run(plan)).one_by_one():
            self.tokens_at.setdefault(update.request_id, []).append(self.now)
        return True

    def seconds(self, plan: StepPlan) -> float:
        table = self.scheduler.table
        num_decode = num_prompt = reach = 0
        for row in plan.rows:
            planned, known = int(table.planned[row.slot]), table.known[row.slot]
            if planned <= known and (row.num_query > 1 or not row.num_logits):
                num_prompt += row.num_query
                reach += row.num_query * (2 * planned - row.num_query) // 2
            else:
                num_decode += row.num_query
        self.plans.append((num_decode, num_prompt))
        scale = max(0.5, self.random.gauss(1.0, self.noise))
        return scale * self.speed.step(num_decode, num_prompt, reach)

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


def beside_streams(
    speed: Speed, budget: PrefillBudget, *, seconds: float = 6.0, every: float = 0.25
) -> VirtualRun:
    """32 streams, and from 0.25 s on a prompt of 8,000 tokens every so often."""
    run = VirtualRun(speed, budget)
    for i in range(32):
        run.add(stream(i))
    moments = [0.25 + i * every for i in range(int(seconds / every) - 1)]
    run.until(seconds, deque((moment, prompt(i)) for i, moment in enumerate(moments)))
    return run


def figures(run: VirtualRun, since: float = 1.0) -> tuple[float, float, float]:
    """Milliseconds: p99 and maximum between a stream's tokens, median to a prompt's first."""
    gaps = run.gaps(since)
    return 1e3 * quantiles(gaps, n=100)[-1], 1e3 * max(gaps), 1e3 * median(run.first_tokens(since))


CASES = [
    ("small", SMALL, 6.0, 60.0),
    ("quick", QUICK, 5.5, 60.0),
    ("large", LARGE, 30.0, 300.0),
    ("large, shared", SHARED, 30.0, 300.0),
    ("slow decodes", SLOW, 30.0, 300.0),
]


@pytest.mark.parametrize("name,speed,most_itl,most_ttft", CASES)
def test_streams_bear_long_prompts_and_these_are_soon_done(
    name: str, speed: Speed, most_itl: float, most_ttft: float
) -> None:
    itl, worst, ttft = figures(beside_streams(speed, LearnedPrefillBudget()))
    assert itl < most_itl and worst < 1.05 * most_itl and ttft < most_ttft
    alone = 1e3 * speed.step(32, 8000, 8000 * 4000)
    _, worst, _ = figures(beside_streams(speed, UnlimitedPrefill(), seconds=3.0))
    assert worst > 0.9 * alone, "without a budget streams wait for whole prompts"


@pytest.mark.parametrize("speed,target", [(SMALL, 3.0), (SMALL, 12.0), (LARGE, 25.0), (LARGE, 60.0)])
def test_a_target_that_is_named_is_kept_and_used(speed: Speed, target: float) -> None:
    run = beside_streams(speed, LearnedPrefillBudget(target / 1000), every=0.5)
    itl, _, _ = figures(run)
    assert itl < target
    steps = [1e3 * gap for gap in run.gaps(1.0)]
    with_prompts = [gap for gap in steps if gap > 1.5e3 * speed.step(32, 0, 0)]
    assert median(with_prompts) > 0.8 * target, "prompts get what streams can bear"


def test_prompts_advance_under_a_target_that_cannot_be_kept() -> None:
    run = beside_streams(SMALL, LearnedPrefillBudget(0.0001), every=1.0, seconds=3.0)
    chunks = [num_prompt for num_decode, num_prompt in run.plans if num_decode and num_prompt]
    assert set(chunks) == {FLOOR} and len(run.first_tokens(0.0)) == 2


def test_prompts_do_not_crawl_where_any_chunk_takes_longer_than_a_target_would_be() -> None:
    dear = replace(QUICK, chunk=6e-3)
    itl, _, ttft = figures(beside_streams(dear, LearnedPrefillBudget()))
    assert itl < 1.5e3 * dear.step(32, 64, 0) and ttft < 200


@pytest.mark.parametrize("num_streams,beside", [(1, 32), (32, 32), (48, 48), (49, 64), (80, 80), (81, 0)])
def test_chunks_and_decodes_fill_tiles_of_products(num_streams: int, beside: int) -> None:
    run = VirtualRun(SMALL, LearnedPrefillBudget(), num_slots=128)
    streams = deque((0.0, stream(i)) for i in range(num_streams))
    run.until(1.0, streams + deque([(0.5, prompt(0, 9000))]))
    chunks = [num_prompt for num_decode, num_prompt in run.plans if num_decode and num_prompt]
    over = [(chunk + beside) % TILE for chunk in chunks if chunk > FLOOR]
    assert len(chunks) > 3 and set(over[:-1]) == {0}


def test_without_streams_plans_are_as_without_a_pace() -> None:
    plans: list[list[tuple[int, int]]] = []
    for budget in (LearnedPrefillBudget(), LearnedPrefillBudget(0.001), UnlimitedPrefill()):
        run = VirtualRun(SMALL, budget)
        for i in range(32):
            run.add(replace(stream(i), is_streamed=False))
        run.until(1.0, deque((0.1 * i, prompt(i)) for i in range(1, 9)))
        plans.append(run.plans)
    assert plans[0] == plans[1] == plans[2]


def test_prompts_are_not_paced_before_somebody_reads() -> None:
    run = VirtualRun(SMALL, LearnedPrefillBudget(0.001))
    for i in range(4):
        run.add(prompt(i, is_streamed=True))
    run.step()
    assert run.plans[0] == (0, 16_384)


@pytest.mark.parametrize(("speed", "most"), [(SMALL, 1.25), (LARGE, 1.1)])
def test_a_crowd_that_comes_at_once_is_served_nearly_as_fast_as_without_a_pace(
    speed: Speed, most: float
) -> None:
    last: list[float] = []
    for budget in (LearnedPrefillBudget(), UnlimitedPrefill()):
        run = VirtualRun(speed, budget, num_slots=256)
        run.until(20.0, deque((0.0005 * i, burst(i)) for i in range(256)))
        last.append(max(run.first_tokens(0.0)))
    assert last[0] < most * last[1]


# One every 4 ms is hardly a crowd: streams give what they do otherwise, and no more.
@pytest.mark.parametrize(("every", "most"), [(0.0002, 1.1), (0.001, 1.1), (0.004, 1.25)])
def test_a_crowd_need_not_wait_until_it_is_known_what_its_decodes_take(every: float, most: float) -> None:
    last: list[float] = []
    for budget in (LearnedPrefillBudget(), UnlimitedPrefill()):
        run = VirtualRun(CROWDED, budget, num_slots=256)
        singles = (
            replace(make_request(f"single {i}", 128, max_tokens=16), is_streamed=True) for i in range(64)
        )
        run.until(math.inf, deque((0.02 * i, single) for i, single in enumerate(singles)))
        begin = run.now = run.now + 1.0
        run.until(begin + 20.0, deque((begin + every * i, burst(i)) for i in range(256)))
        last.append(max(run.first_tokens(begin)))
    assert last[0] < most * last[1]


def burst(index: int, length: int = 512, max_tokens: int = 256, name: str = "prompt") -> Request:
    return replace(make_request(f"{name} {index}", length, max_tokens=max_tokens), is_streamed=True)


def test_a_first_prompt_of_a_few_tokens_does_not_spoil_the_rest() -> None:
    run = VirtualRun(LARGE, LearnedPrefillBudget())
    run.add(replace(stream(0), prompt_token_ids=[1] * 5))
    run.until(0.2)
    run.until(0.8, deque([(0.2, prompt(0))]))
    assert run.first_tokens(0.0)[0] < 0.3
    assert 1e3 * max(run.gaps(0.1)) < 40


@pytest.mark.parametrize("seconds", [0.0, 0.001])
def test_prompts_that_seem_to_cost_nothing_get_all_they_ask_for(seconds: float) -> None:
    budget = LearnedPrefillBudget()
    for i in range(5000):
        num_prompt = (0, 64, 1024, 500)[i % 4]
        budget.planned(32, num_prompt, num_prompt * 3000)
        budget.took(seconds)
    assert budget.room(32, 100) > 5000


def test_an_accident_is_soon_forgotten() -> None:
    run = VirtualRun(SMALL, LearnedPrefillBudget())
    for i in range(32):
        run.add(stream(i))
    run.until(2.0, deque((0.2 + 0.1 * i, prompt(i)) for i in range(15)))
    before = run.prefill_budget.room(32, 0)
    for _ in range(2):
        run.prefill_budget.planned(32, 1024, 1024 * 512)
        run.prefill_budget.took(3.0)  # something was compiled
    run.until(3.0, deque((2.0 + 0.1 * i, prompt(100 + i)) for i in range(9)))
    assert run.prefill_budget.room(32, 0) > 0.7 * before


@pytest.mark.parametrize("num_prompt", [FLOOR, 512])
def test_an_accident_is_no_guess_at_what_the_decodes_of_a_crowd_take(num_prompt: int) -> None:
    rooms: list[int] = []
    for first in (CROWDED.step(100, num_prompt, 0), 1.0):
        budget = LearnedPrefillBudget()
        for beside in [0, 512] * 20:
            budget.planned(1, beside, 0)
            budget.took(CROWDED.step(1, beside, 0))
        for i in range(100):
            budget.planned(100, num_prompt, 0)
            budget.took(CROWDED.step(100, num_prompt, 0) if i else first)
        rooms.append([budget.room(100, 0) for _ in range(LOOKS + 1)][-1])
    assert rooms[1] < 2 * rooms[0], rooms


@pytest.mark.parametrize("first", [1.0, 1.1, 2.5])
def test_a_guess_is_corrected_once_it_can_be(first: float) -> None:
    """In a crowd what decodes take is guessed, perhaps badly; then half as many are measured."""
    budget, rng = LearnedPrefillBudget(), random.Random(0)

    def step(num_decode: int, num_waiting: int, scale: float = 1.0) -> float:
        room = min(8192, budget.room(num_decode, 0, num_waiting))
        seconds = scale * LARGE.step(num_decode, room, 0) * rng.uniform(0.95, 1.05)
        budget.planned(num_decode, room, 0)
        budget.took(seconds)
        return seconds

    for _ in range(10):
        budget.planned(1, 0, 0)
        budget.took(LARGE.step(1, 0, 0))
    for _ in range(5):
        step(1, num_waiting=60)
    step(64, num_waiting=60, scale=first)
    for num_decode, num_waiting in [(64, 60)] * 20 + [(32, 1)] * 20:
        step(num_decode, num_waiting)
    assert sum(step(64, num_waiting=1) for _ in range(300)) < 300 * 0.03


def test_what_surprises_twice_is_no_accident() -> None:
    budget = LearnedPrefillBudget()
    for beside in [0, 512] * 20:
        budget.planned(1, beside, 0)
        budget.took(CROWDED.step(1, beside, 0))
    slow = replace(CROWDED, row=100e-6)
    for _ in range(3):
        budget.planned(250, FLOOR, 0)
        budget.took(slow.step(250, FLOOR, 0))
    assert budget.room(250, 0) > 8 * FLOOR


def main() -> None:
    for name, speed, _, _ in CASES:
        for label, budget in (
            ("auto", LearnedPrefillBudget()),
            ("4x", LearnedPrefillBudget(4 / 0.9 * speed.step(32, 0, 0))),
            ("off", UnlimitedPrefill()),
        ):
            itl, worst, ttft = figures(beside_streams(speed, budget))
            sys.stdout.write(
                f"{name:14} {label:6} ITL p99 {itl:6.1f} max {worst:6.1f} ms, TTFT p50 {ttft:6.1f} ms\n"
            )


if __name__ == "__main__":
    main()
