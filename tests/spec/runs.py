"""Whole runs of the real scheduler in virtual time: how fast, if steps and drafts are like this.

The device's part is played: of each place in each answer it is settled beforehand whether a draft of it will
stand, so that engines with other numbers of drafts differ in nothing else.  Plans are made one ahead of
results, as on a GPU.

    python -m tests.spec.runs [MACHINE ..]    # tables of rates, rows and lengths; a minute each
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

from pellucid.graphs.shapes import decode_shapes
from pellucid.kv.kinds import Full
from pellucid.kv.manager import KVManager
from pellucid.sampling_params import SamplingParams
from pellucid.schedule.plan import StepPlan, StepResult, ints
from pellucid.schedule.scheduler import Scheduler
from pellucid.schedule.step import SchedulerOptions
from pellucid.spec.drafter import Drafter
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

    def milliseconds(self, num_rows: int, num_drafts: int, num_tokens: int, num_propose: int) -> float:
        """num_rows: that decode.  num_tokens: of all rows, drafts included."""
        if self.max_rows and num_tokens == num_rows + num_drafts:
            num_tokens = padded(self.max_rows, self.most, num_rows, num_tokens)
        queries = num_rows + 0.25 * (num_tokens - num_rows) * (num_drafts > 0)
        took = float(np.interp(num_tokens, self.tokens, self.forward)) + self.query * queries
        if num_propose:
            took += self.running[0] + self.running[1] * num_tokens
            took += (num_propose - 1) * (self.each_pass[0] + self.each_pass[1] * num_rows)
        return took


@cache
def padded(max_rows: int, most: int, num_rows: int, num_tokens: int) -> int:
    """Tokens of the recorded step that such a one replays."""
    shapes = decode_shapes(max_rows, 1 + most, 16384, 8)
    return min(
        shape.num_tokens
        for shape in shapes
        if shape.num_rows >= num_rows
        and shape.num_tokens >= num_tokens
        and (num_tokens == num_rows or not shape.is_plain)
    )


# Qwen3-8B on an H200: steps as benchmarks/h200.md has them.
H200 = Machine(
    tokens=(1, 2, 4, 64, 128, 256, 512, 1024, 2048, 16384),
    forward=(3.83, 4.0, 4.1, 4.72, 5.2, 6.9, 11.6, 23.0, 50.0, 415.0),
    query=0.0106,
)
SPROUT = Machine(tokens=(0, 20000), forward=(4.7, 4704.7), cheap_tokens=20, max_rows=0, noise=0.03)
MACHINES = {
    "eagle3": replace(H200, running=(0.3, 0.001), each_pass=(0.2, 0.0012), most=3, drafter=Drafter.KEEPS_KV),
    "draft model": replace(
        H200, running=(0.75, 0.0035), each_pass=(0.65, 0.009), most=4, drafter=Drafter.KEEPS_KV
    ),
    "eagle3, 7": replace(
        H200, running=(0.3, 0.001), each_pass=(0.2, 0.0012), most=7, drafter=Drafter.KEEPS_KV
    ),
    "dflash": replace(H200, running=(0.7, 0.002), each_pass=(0.01, 0.001), most=15, drafter=Drafter.KEEPS_KV),
    "suffix": replace(H200, running=(0.05, 0.0002), most=7),
    "suffix, 15": replace(H200, running=(0.05, 0.0002), most=15),
    "ngram": replace(H200, running=(0.02, 0.0001), drafter=Drafter.READS_TEXT),
    "eagle3 on a CPU": replace(SPROUT, running=(1.2, 0.02), each_pass=(0.9, 0.05), drafter=Drafter.KEEPS_KV),
    "medusa on a CPU": replace(SPROUT, running=(0.4, 0.02), most=3),
    "ngram on a CPU": replace(SPROUT, running=(0.2, 0.01), drafter=Drafter.READS_TEXT),
}


def constant(rate: float) -> Rates:
    return lambda number, num: np.full(num, rate)


def mixed(*rates: float) -> Rates:
    """Each request has one of them."""
    return lambda number, num: np.full(num, rates[number % len(rates)])


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
    rates: Sequence[Rates] = (constant(0.8),)  # of each wave

    @property
    def num_requests(self) -> int:
        return self.requests or self.rows


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
        self.waves: list[float] = []  # tokens a second, of each
        self._inflight: deque[tuple[StepPlan, StepResult, float]] = deque()
        self._rates: dict[int, NDArray[np.float64]] = {}  # of sequences
        for number, rates in enumerate(work.rates):
            self._wave(number, rates)

    @property
    def speed(self) -> float:
        """Tokens a second, of all waves."""
        return len(self.waves) / sum(1 / wave for wave in self.waves)

    def _wave(self, number: int, rates: Rates) -> None:
        work, num_tokens, seconds = self.work, 0, 0.0
        for index in range(work.num_requests):
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
            plan, result, took = self._inflight.popleft()
            seconds += took
            self.scheduler.took(took)
            self.scheduler.commit(plan, result)
        self.waves.append(num_tokens / seconds)

    def _admit(self, plan: StepPlan) -> None:
        for new in plan.admitted:
            slot, num = new.slot, len(new.token_ids)
            self.known[slot], self.computed[slot], self.limit[slot] = num, new.num_computed, new.limit
            rates = self._rates[new.seq_id]
            stands = self._dice.random(new.limit - num + 1) < rates[: new.limit - num + 1]
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

    def _run(self, plan: StepPlan) -> tuple[StepResult, float]:
        self._admit(plan)
        rows = plan.rows
        slots = rows.slots
        query = np.ones_like(slots) if rows.num_query is None else rows.num_query
        draft = np.zeros_like(slots) if rows.num_draft is None else rows.num_draft
        end = self.computed[slots] + query - draft
        samples = end >= self.known[slots]
        # The token at place `end` is the model's own; drafts are of the places from there on.
        new = 1 + np.minimum(self.stands[slots, np.minimum(end, self.limit[slots])], draft)
        new = np.where(samples, np.minimum(new, self.limit[slots] - end), 0)
        new = np.maximum(new, 0)
        width = int(new.max(initial=0))
        places = np.minimum(end[:, None] + np.arange(width), self.texts.shape[1] - 1)
        tokens = self.texts[slots[:, None], places]
        self.known[slots] = np.where(samples, end + new, self.known[slots])
        self.computed[slots] = end + np.maximum(0, new - 1)
        num_decodes, num_drafts = int((query - draft == 1).sum()), int(draft.sum())
        took = self.machine.milliseconds(num_decodes, num_drafts, plan.num_tokens, plan.num_propose) / 1000
        took *= max(0.5, self._clock.normal(1, self.machine.noise)) * (
            3 if self._clock.random() < 0.002 else 1
        )
        result = StepResult(
            plan_id=plan.id,
            token_ids=ints(np.ascontiguousarray(tokens).tobytes()),
            num_new=ints(new.astype(np.int32).tobytes()),
        )
        return result, took


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
    "mixed, behind a queue": mixed(0.9, 0.5, 0.0),
    "turns of 32": turns(32, 0.8, 0.5, 0.2),
    "turns of 96": turns(96, 0.9, 0.1),
}
SIZES = ((1, 96), (1, 768), (8, 96), (32, 96), (64, 96), (256, 96))  # rows, tokens of an answer


def work_of(task: str, rows: int, answer: int) -> Work:
    if "queue" in task:
        return Work(rows=rows, answer=answer, rates=(TASKS[task],), requests=4 * rows + 2)
    return Work(rows=rows, answer=answer, rates=(TASKS[task],) * (3 if answer < 200 else 1))


def main() -> None:
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
