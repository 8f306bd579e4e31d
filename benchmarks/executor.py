"""What it costs to send a plan to the workers: 256 decode rows, with a worker that only looks at the clock.

    python benchmarks/executor.py [--workers N] [--rows B] [--gap MS]

submit: the engine's thread, until it may go on.  arrived: from the beginning of submit until the worker's
`execute` holds the plan (the later one of several).  result: from then until `ticket.result()` has returned.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pellucid.config import EngineConfig
from pellucid.executor.base import Capacity, Seat
from pellucid.executor.multiproc import MultiprocExecutor
from pellucid.models.checkpoint import Checkpoint
from pellucid.platform import detect
from pellucid.resolve import resolve
from pellucid.schedule.plan import Rows, StepPlan, StepResult, ints

NUM_PLANS = 500


@dataclass
class Done:
    """A result that waits for nobody."""

    value: StepResult

    def wait(self) -> None:
        pass

    def result(self) -> StepResult:
        return self.value


class ClockWorker:
    """Notes when each plan arrives, in seconds of the clock that all processes share, and samples token 1."""

    def __init__(self, resolved: object, seat: Seat) -> None:
        self.reports, self.arrivals = seat.rank == 0, list[float]()

    def start(self) -> Capacity:
        return Capacity(kinds=(), num_pages=0, max_model_len=1)

    def execute(self, plan: StepPlan) -> Done:
        self.arrivals.append(time.monotonic())
        ones = ints([1] * len(plan.rows))
        return Done(StepResult(plan_id=plan.id, token_ids=ones, num_new=ones))

    def arrival(self) -> float:
        return self.arrivals[-1]

    def shutdown(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument(
        "--gap", type=float, default=5.0, help="milliseconds between two plans, like a step's"
    )
    args = parser.parse_args()
    options = {
        "model": "sprout",
        "device": "cpu",
        "executor": "multiproc",
        "tensor_parallel_size": args.workers,
    }
    user = EngineConfig.from_options(options)
    executor = MultiprocExecutor(f"{Path(__file__).stem}:ClockWorker")
    executor.start(resolve(user, detect("cpu"), Checkpoint.open(user.model)))
    times = [measure(executor, plan_id, args.rows, args.gap / 1e3) for plan_id in range(NUM_PLANS)]
    executor.shutdown()
    for name, column in zip(("submit", "arrived", "result"), zip(*times, strict=True), strict=True):
        micros = sorted(1e6 * seconds for seconds in column)
        late = micros[int(0.95 * len(micros))]
        print(f"{name:8} median {statistics.median(micros):6.0f} us   95% {late:6.0f} us")


def measure(
    executor: MultiprocExecutor, plan_id: int, num_rows: int, gap: float
) -> tuple[float, float, float]:
    """Seconds of one plan: (submit, arrived, result)."""
    rows = Rows(slots=np.arange(num_rows))
    plan = StepPlan(id=plan_id, committed=plan_id - 1, rows=rows)
    time.sleep(gap)
    began = time.monotonic()
    ticket = executor.submit(plan)
    submitted = time.monotonic()
    ticket.result()
    ended = time.monotonic()
    arrived = executor.call("arrival")
    assert isinstance(arrived, float)
    return submitted - began, arrived - began, ended - arrived


if __name__ == "__main__":
    main()
