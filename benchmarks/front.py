"""What the server costs around a device: `pellucid serve` as it is, over a device that is a clock.

    python benchmarks/front.py [SERVE_OPTION ...]      and beside it
    pellucid bench serve --workload load

Front and engine are real, each in its process, the worker's host part included; but a step takes so long as
is written here, and gives a random token to every row that samples.  `bench serve` then shows what their
clients would see, and CPU time of each process: with --output-len 1 of requests, with more of tokens.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from host import NoDeviceExecutor

from pellucid.cli.main import main
from pellucid.executor.base import EXECUTORS, Capacity, Hear
from pellucid.executor.local import LocalTicket
from pellucid.resolve import Resolved
from pellucid.schedule.plan import StepPlan, StepResult

# Seconds of any step, of a row that decodes, of a prompt token: about those of Qwen3-0.6B on an H200.
STEP, DECODE, PROMPT = 0.6e-3, 19e-6, 3.0e-6
OPTIONS = (
    *("serve", "--executor", "clock", "--device", "cpu", "--dtype", "float32", "--depth", "2"),
    *("--max-num-seqs", "256", "--max-num-batched-tokens", "16640", "--model", "shape:qwen3-0.6b"),
)


@dataclass(frozen=True, slots=True)
class ClockTicket:
    """A step that has ended when its time has come.  due: seconds of time.monotonic."""

    ticket: LocalTicket
    due: float

    def provide(self, masks: object) -> None:
        self.ticket.provide(masks)

    def wait(self) -> None:
        time.sleep(max(0.0, self.due - time.monotonic()))
        self.ticket.wait()

    def result(self) -> StepResult:
        return self.ticket.result()


class ClockExecutor:
    """Steps begin when they are submitted, or when the one before has ended."""

    def start(self, resolved: Resolved) -> Capacity:
        self._host, self._free_at = NoDeviceExecutor(), 0.0
        return self._host.start(resolved)

    def submit(self, plan: StepPlan) -> ClockTicket:
        ticket = self._host.submit(plan)
        num_tokens = sum(row.num_query for row in plan.rows)
        num_decode = sum(row.num_query == 1 for row in plan.rows)
        seconds = STEP + DECODE * num_decode + PROMPT * (num_tokens - num_decode)
        self._free_at = max(self._free_at, time.monotonic()) + seconds
        return ClockTicket(ticket, self._free_at)

    def call(self, name: str, *args: object) -> object:
        raise NotImplementedError(name)

    def check(self) -> None:
        """Nothing can fail."""

    def listen(self, hear: Hear) -> None:
        """Nobody speaks."""

    @property
    def lines(self) -> tuple[()]:
        return ()

    def shutdown(self) -> None:
        """Nothing to give back."""


EXECUTORS.register("clock", f"{Path(__file__).stem}:ClockExecutor")  # which the engine imports

if __name__ == "__main__":
    sys.exit(main([*OPTIONS, *sys.argv[1:]]))
