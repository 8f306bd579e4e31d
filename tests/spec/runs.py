"""Whole runs of the real scheduler in virtual time: how fast, if steps and drafts are like this.

The device's part is played: of each place in each answer it is settled beforehand whether a draft of it will
stand, so that engines with other numbers of drafts differ in nothing else.  Plans are made one ahead of
results, as on a GPU.

    python -m tests.spec.runs [MACHINE ..]    # tables of rates, rows and lengths; a minute each
    python -m tests.spec.runs never_slower    # the runs of benchmarks/never_slower.py
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pellucid.graphs.shapes import StepShape, decode_shapes
from pellucid.kv.kinds import Full
from pellucid.kv.manager import KVManager
from pellucid.sampling_params import SamplingParams
from pellucid.schedule.plan import StepPlan, StepResult, ints
from pellucid.schedule.scheduler import Scheduler
from pellucid.schedule.step import SchedulerOptions
from pellucid.spec.costs import kinds_to_time
from pellucid.spec.drafter import UNTIMED, Drafter, Timed, Timings
from pellucid.types import Request

BLOCK = 64  # tokens
PERIOD = 20  # tokens, of texts: where a draft stands the text goes on as so many tokens before
Rates = Callable[[int, int], NDArray[np.float64]]  # of a request by its number, at each of so many places
Numbers = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What its steps take, in milliseconds."""

    tokens: Sequence[float]  # numbers of tokens in a step, and
    forward: Sequence[float]  # what the model takes for each of these; between them, on a line
    query: float = 0.0  # of attention, for a row; each query more takes a quarter
    running: tuple[float, float] = (0.0, 0.0)  # of the drafter at all, and for each token of the step
    each_pass: tuple[float, float] = (0.0, 0.0)  # and for each row
    most: int = 4  # drafts of a row
    drafter: Drafter = Drafter.STATELESS
    cheap_tokens: int = 256
    max_rows: int = 256  # of recorded steps, to whose shapes others are padded; 0: none are recorded
    noise: float = 0.02
    held_up: float = 0.002  # share of steps that something else holds up, which counts for nothing else
    cold: float = 0.0  # a step behind one of another kind takes so much longer, as caches hold other things

    def milliseconds(self, num_rows: int, drafts: Numbers, num_tokens: int, num_propose: int) -> float:
        """num_rows: that decode.  drafts: that rows verify.  num_tokens: of all rows, drafts included."""
        num_drafts = int(drafts.sum())
        if self.max_rows and num_tokens == num_rows + num_drafts:
            num = max(num_propose, int(drafts.max(initial=0)))
            shape = self.recorded(num_rows, num_tokens, num)
            num_tokens, num_propose = shape.num_tokens, shape.max_query - 1
        queries = num_rows + 0.25 * (num_tokens - num_rows) * (num_drafts > 0)
        took = float(np.interp(num_tokens, self.tokens, self.forward)) + self.query * queries
        if num_propose:
            took += self.running[0] + self.running[1] * num_tokens
            took += (num_propose - 1) * (self.each_pass[0] + self.each_pass[1] * num_rows)
        return took

    def timed(self, most_rows: int) -> tuple[Timed, ...]:
        """What an engine finds at start."""
        is_padded = self.max_rows > 0
        all_or_one = is_padded and self.drafter is Drafter.KEEPS_KV
        kinds = kinds_to_time(most_rows, self.most, all_or_one=all_or_one, is_padded=is_padded)

        def seconds(rows: int, verified: int, made: int) -> float:
            return self.milliseconds(rows, np.full(rows, verified), rows * (1 + verified), made) / 1000

        return tuple(Timed(*kind, seconds(*kind)) for kind in kinds)

    def recorded(self, num_rows: int, num_tokens: int, num_drafts: int) -> StepShape:
        """What a step replays in which a row has, or is to have, so many drafts; it makes all its passes."""
        shapes = shapes_of(self.max_rows, self.most, self.drafter is Drafter.KEEPS_KV)
        return min(
            shape
            for shape in shapes
            if shape.num_rows >= num_rows and shape.num_tokens >= num_tokens and shape.max_query > num_drafts
        )


@cache
def shapes_of(max_rows: int, most: int, takes_passes: bool) -> list[StepShape]:
    return list(decode_shapes(max_rows, 1 + most, 16384, 8, takes_passes=takes_passes))


# Qwen3-8B on an H200: steps of 1, 32 and 256 rows as they were measured.
H200 = Machine(
    tokens=(1, 2, 4, 64, 128, 256, 512, 1024, 2048, 16384),
    forward=(3.83, 4.0, 4.1, 4.5, 5.05, 7.2, 13.0, 22.6, 42.0, 357.0),
    query=0.0075,
)
# The bundled model on two cores, as measured; each step its own way, and the clock less steady.
SPROUT = Machine(
    tokens=(1, 2, 4, 8, 16, 32, 64, 128, 192, 320, 20320),
    forward=(2.6, 3.0, 3.4, 3.6, 4.4, 7.8, 11.8, 18.1, 23.2, 33.5, 1633.5),
    cheap_tokens=27,
    max_rows=0,
    noise=0.06,
    held_up=0.005,
)
# The same on Zen 5, behind faster products.
ZEN5 = replace(
    SPROUT,
    tokens=(1, 5, 8, 16, 32, 40, 64, 128, 320, 20320),
    forward=(1.12, 1.45, 1.46, 1.9, 2.9, 3.4, 5.6, 9.5, 22.0, 1400.0),
    cold=0.25,
)
MACHINES = {
    "eagle3": replace(
        H200, running=(0.25, 0.0008), each_pass=(0.2, 0.0012), most=3, drafter=Drafter.KEEPS_KV
    ),
    "draft model": replace(
        H200, running=(0.75, 0.0035), each_pass=(0.65, 0.009), most=4, drafter=Drafter.KEEPS_KV
    ),
    "eagle3, 7": replace(
        H200, running=(0.25, 0.0008), each_pass=(0.2, 0.0012), most=7, drafter=Drafter.KEEPS_KV
    ),
    "dflash": replace(H200, running=(0.7, 0.002), each_pass=(0.01, 0.001), most=15, drafter=Drafter.KEEPS_KV),
    "suffix": replace(H200, running=(0.05, 0.0002), most=7),
    "suffix, 15": replace(H200, running=(0.05, 0.0002), most=15),
    "ngram": replace(H200, running=(0.02, 0.0001), drafter=Drafter.READS_TEXT),
    "eagle3 on a CPU": replace(
        SPROUT, running=(0.6, 0.012), each_pass=(0.65, 0.04), drafter=Drafter.KEEPS_KV
    ),
    "medusa on a CPU": replace(SPROUT, running=(0.8, 0.008), most=3),
    "suffix on a CPU": replace(SPROUT, running=(0.2, 0.02)),
    "ngram on a CPU": replace(SPROUT, running=(0.2, 0.005), drafter=Drafter.READS_TEXT),
    "eagle3 on Zen 5": replace(ZEN5, running=(0.6, 0.005), each_pass=(0.42, 0.04), drafter=Drafter.KEEPS_KV),
    "suffix on Zen 5": replace(ZEN5, running=(0.2, 0.01)),
    "ngram on Zen 5": replace(ZEN5, running=(0.1, 0.003), drafter=Drafter.READS_TEXT),
}


def constant(rate: float) -> Rates:
    return lambda number, num: np.full(num, rate)


def mixed(*rates: float) -> Rates:
    """Each request has one of them."""
    return lambda number, num: np.full(num, rates[number % len(rates)])


@dataclass(frozen=True)
class ByTheClock:
    """One after the other, each for so many seconds of a wave."""

    seconds: float
    rates: tuple[float, ...]

    def __call__(self, number: int, num: int) -> Numbers:
        return np.ones(num)  # what stands is found when it is verified

    def at(self, seconds: float) -> float:
        return self.rates[int(seconds / self.seconds) % len(self.rates)]


def turns(length: int, *rates: float) -> Rates:
    """One after the other, each for so many tokens of every request."""
    return lambda number, num: np.array(rates)[np.arange(num) // length % len(rates)]


@dataclass(frozen=True, kw_only=True)
class Work:
    """Requests that are there at once, wave by wave; those beyond `rows` wait for a slot."""

    rows: int
    answer: int = 96  # tokens
    prompt: int = 64
    shortest: int = 0  # answer, if they differ
    answers: Sequence[int] = ()  # tokens, of each wave's, if waves differ: at most `answer`
    budget: int = 16384  # tokens of a step
    requests: int = 0  # of a wave, if more than rows
    sizes: Sequence[int] = ()  # requests of each wave, if waves differ
    rates: Sequence[Rates] = (constant(0.8),)  # of each wave

    def num_requests(self, wave: int) -> int:
        return self.sizes[wave] if self.sizes else self.requests or self.rows


class Run:
    """An engine that answers them."""

    def __init__(self, machine: Machine, work: Work, *, fixed: int | None = None, seed: int = 0) -> None:
        """fixed: drafts of each row and step, 0 none; else as many as they are worth."""
        self.machine, self.work = machine, work
        is_adaptive = fixed is None
        most = machine.most if fixed is None else fixed
        if fixed:
            self.machine = replace(machine, most=fixed)
        max_len = work.prompt + work.answer + 1
        options = SchedulerOptions(
            max_model_len=max_len,
            num_slots=work.rows,
            max_num_batched_tokens=work.budget,
            num_spec=most,
            cheap_tokens=machine.cheap_tokens if is_adaptive else 0,
            drafter=machine.drafter if most else Drafter.NONE,
            timings=Timings(machine.max_rows > 0, machine.timed(work.rows)) if is_adaptive else UNTIMED,
        )
        num_pages = work.rows * -(-(max_len + 2 * most) // BLOCK) + work.rows + 8
        kv = KVManager(
            (Full(BLOCK),),
            num_pages,
            num_slots=work.rows,
            max_len=options.max_len,
            max_chunk=options.max_chunk,
            enable_prefix_caching=False,
        )
        self.scheduler = Scheduler(options, kv)
        self._clock, self._dice = np.random.default_rng(seed), np.random.default_rng(seed + 1)
        self.known, self.computed, self.limit = np.zeros((3, work.rows + 1), dtype=np.int64)
        self.texts = np.zeros((work.rows + 1, max_len + 1), dtype=np.int32)
        self.stands = np.zeros((work.rows + 1, max_len + 1), dtype=np.int32)  # how many drafts from there on
        self.luck = np.ones((work.rows + 1, max_len + 1))  # of a draft at each place
        self.waves: list[float] = []  # tokens a second, of each
        self._inflight: deque[tuple[StepPlan, StepResult, float, float]] = deque()
        self._rates: dict[int, NDArray[np.float64]] = {}  # of sequences
        self._kind = (False, False, False)  # of the last step: has it the drafter, drafts, prompts
        self._wave_rates, self._seconds = work.rates[0], 0.0  # of the wave: how long it has run
        for number, rates in enumerate(work.rates):
            self._wave(number, rates)

    @property
    def speed(self) -> float:
        """Tokens a second, of all waves."""
        return len(self.waves) / sum(1 / wave for wave in self.waves)

    def _wave(self, number: int, rates: Rates) -> None:
        work, num_tokens = self.work, 0
        self._wave_rates, self._seconds = rates, 0.0
        for index in range(work.num_requests(number)):
            answer = work.answers[number] if work.answers else work.answer
            if work.shortest:
                answer = int(self._dice.integers(work.shortest, work.answer, endpoint=True))
            num_tokens += answer
            self._rates[len(self._rates)] = rates(index, answer + 1)
            tokens = self._dice.integers(1 << 30, size=work.prompt).tolist()
            request = Request(
                id=f"{number}.{index}",
                prompt_token_ids=tokens,
                sampling=SamplingParams(max_tokens=answer, ignore_eos=True),
                is_quiet=True,
            )
            self.scheduler.add(request)
        while self.scheduler.has_unfinished:
            while len(self._inflight) < 2 and (plan := self.scheduler.next_plan()) is not None:
                self._inflight.append((plan, *self._run(plan)))
            plan, result, took, seen = self._inflight.popleft()
            self._seconds += took
            self.scheduler.took(seen)
            self.scheduler.commit(plan, result)
        self.waves.append(num_tokens / self._seconds)

    def _admit(self, plan: StepPlan) -> None:
        for new in plan.admitted:
            slot, num = new.slot, len(new.token_ids)
            self.known[slot], self.computed[slot], self.limit[slot] = num, new.num_computed, new.limit
            rates = self._rates[new.seq_id]
            luck = self.luck[slot, num : new.limit + 1] = self._dice.random(new.limit - num + 1)
            stands = luck < rates[: new.limit - num + 1]
            text, follows = self.texts[slot], self.stands[slot]
            text[:num] = new.token_ids
            text[num : new.limit + 1] = self._dice.integers(1 << 30, size=new.limit - num + 1)
            follows[:] = 0
            for place in range(num, new.limit + 1):
                if stands[place - num]:
                    text[place] = text[place - PERIOD]
            for place in range(new.limit, num - 1, -1):
                follows[place] = (
                    1 + (follows[place + 1] if place < new.limit else 0) if stands[place - num] else 0
                )

    def _run(self, plan: StepPlan) -> tuple[StepResult, float, float]:
        """What it yields; the seconds that it takes, and those that are seen."""
        self._admit(plan)
        rows = plan.rows
        slots = rows.slots
        query = np.ones_like(slots) if rows.num_query is None else rows.num_query
        draft = np.zeros_like(slots) if rows.num_draft is None else rows.num_draft
        end = self.computed[slots] + query - draft
        samples = end >= self.known[slots]
        # The token at place `end` is the model's own; drafts are of the places from there on.
        follows = self.stands[slots, np.minimum(end, self.limit[slots])]
        if isinstance(self._wave_rates, ByTheClock):
            at = np.minimum(end[:, None] + np.arange(self.machine.most), self.texts.shape[1] - 1)
            stands = self.luck[slots[:, None], at] < self._wave_rates.at(self._seconds)
            follows = stands.cumprod(axis=1).sum(axis=1)
        new = 1 + np.minimum(follows, draft)
        new = np.where(samples, np.minimum(new, self.limit[slots] - end), 0)
        new = np.maximum(new, 0)
        width = int(new.max(initial=0))
        places = np.minimum(end[:, None] + np.arange(width), self.texts.shape[1] - 1)
        tokens = self.texts[slots[:, None], places]
        self.known[slots] = np.where(samples, end + new, self.known[slots])
        self.computed[slots] = end + np.maximum(0, new - 1)
        num_decodes = int((query - draft == 1).sum())
        took = self.machine.milliseconds(num_decodes, draft, plan.num_tokens, plan.num_propose) / 1000
        took *= max(0.5, self._clock.normal(1, self.machine.noise))
        kind = plan.num_propose > 0, bool(draft.any()), plan.num_tokens > num_decodes + draft.sum()
        took *= 1 + self.machine.cold * (kind != self._kind)
        self._kind = kind
        seen = took * (3 if self._clock.random() < self.machine.held_up else 1)
        result = StepResult(
            plan_id=plan.id,
            token_ids=ints(np.ascontiguousarray(tokens).tobytes()),
            num_new=ints(new.astype(np.int32).tobytes()),
        )
        return result, took, seen


class Ratios(NamedTuple):
    """Of throughputs."""

    first: float  # of none, in the first wave
    of_off: float  # of none
    of_best: float  # of the best number of drafts in every step, which may be none
    best: int
    best_of_off: float

    @property
    def falls_short(self) -> bool:
        """Of what is asked for: 0.98 of none, and 0.95 of the best where drafts are good."""
        return self.of_off < 0.98 or (self.best_of_off > 1.1 and self.of_best < 0.95)

    def __str__(self) -> str:
        return f"{self.first:.3f} {self.of_off:.3f} {self.of_best:.3f} ({self.best}: {self.best_of_off:.3f})"


def compare(machine: Machine, work: Work) -> Ratios:
    """As many drafts as they are worth, against fixed numbers."""
    adaptive = Run(machine, work)
    runs = {num: Run(machine, work, fixed=num) for num in numbers(machine.most)}
    best = max(runs, key=lambda num: runs[num].speed)
    off = runs[0]
    return Ratios(
        first=adaptive.waves[0] / off.waves[0],
        of_off=adaptive.speed / off.speed,
        of_best=adaptive.speed / runs[best].speed,
        best=best,
        best_of_off=runs[best].speed / off.speed,
    )


def numbers(most: int) -> list[int]:
    return sorted({num for num in (0, 1, 2, 3, 4, 7, 11) if num < most} | {most})


TASKS = {
    "0.9": constant(0.9),
    "0.8": constant(0.8),
    "0.5": constant(0.5),
    "0.2": constant(0.2),
    "0": constant(0.0),
    "mixed": mixed(0.9, 0.5, 0.0),
    "mixed, behind a queue": mixed(0.9, 0.5, 0.0),
    "turns of 32": turns(32, 0.8, 0.5, 0.2),
    "turns of 96": turns(96, 0.9, 0.1),
}
SIZES = ((1, 96), (1, 768), (8, 96), (32, 96), (64, 96), (256, 96))  # rows, tokens of an answer


def work_of(task: str, rows: int, answer: int) -> Work:
    if "queue" in task:
        return Work(rows=rows, answer=answer, rates=(TASKS[task],), requests=4 * rows + 2)
    return Work(rows=rows, answer=answer, rates=(TASKS[task],) * (3 if answer < 200 else 1))


def never_slower(machine: Machine, rows: Sequence[int], seed: int = 0) -> dict[tuple[str, int], Ratios]:
    """As benchmarks/never_slower.py --rates 0.8 0.5 0.2 --turns 2 --tokens 192, by task and rows.

    Engines live on from task to task.  The best is all drafts in every step, or none.
    """
    machine, rates, tokens = replace(machine, max_rows=max(rows)), (0.8, 0.5, 0.2), 192
    tasks = [(name, num) for name in (*map(str, rates), "switching") for num in rows]
    sizes = [num for _, num in tasks for _ in range(2)]
    work = Work(rows=max(rows), answer=tokens, sizes=sizes, rates=(constant(0.0),) * len(sizes))
    off = Run(machine, work, fixed=0, seed=seed).waves
    given = [
        ByTheClock(num * tokens / off[2 * i] / 4, rates) if name == "switching" else constant(float(name))
        for i, (name, num) in enumerate(tasks)
        for _ in range(2)
    ]
    work = replace(work, rates=given)
    adaptive, fixed = (Run(machine, work, fixed=num, seed=seed).waves for num in (None, machine.most))

    def seconds(waves: Sequence[float], task: int) -> float:
        return 1 / waves[2 * task] + 1 / waves[2 * task + 1]

    found = {}
    for i, task in enumerate(tasks):
        of_off, best_of_off = (seconds(off, i) / seconds(waves, i) for waves in (adaptive, fixed))
        num, most = (machine.most, best_of_off) if best_of_off > 1 else (0, 1.0)
        found[task] = Ratios(adaptive[2 * i] / off[2 * i], of_off, of_off / most, num, most)
    return found


def main() -> None:
    if sys.argv[1:2] == ["never_slower"]:
        for rows in ((1, 32), (8, 64), (256,)):
            for (task, num), ratios in never_slower(MACHINES["eagle3"], rows).items():
                sys.stdout.write(f"| {task} | {num} | {ratios}{' !' * ratios.falls_short} |\n")
        return
    for name in sys.argv[1:] or MACHINES:
        sys.stdout.write(
            f"\n{name}: of none in the first of three waves, and in all; of the best (number: of none); "
            "! where it falls short\n\n"
        )
        sys.stdout.write("| | " + " | ".join(f"{rows} x {answer}" for rows, answer in SIZES) + " |\n")
        sys.stdout.write("|---" * (1 + len(SIZES)) + "|\n")
        for task in TASKS:
            cells = [compare(MACHINES[name], work_of(task, *size)) for size in SIZES]
            shown = [f"{ratios}{' !' * ratios.falls_short}" for ratios in cells]
            sys.stdout.write(f"| {task} | " + " | ".join(shown) + " |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
