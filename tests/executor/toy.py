"""A worker without a model, to which things happen: a plan rides with items of "what happens, rank"."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from pellucid.config import EngineConfig
from pellucid.executor.base import Capacity, NoPace, Seat
from pellucid.executor.multiproc import MultiprocExecutor
from pellucid.models.checkpoint import Checkpoint
from pellucid.platform import Platform
from pellucid.resolve import Resolved
from pellucid.sampling_params import SamplingParams
from pellucid.schedule.plan import Admission, Row, Rows, StepPlan, StepResult, ints

FOREVER = 60.0  # seconds


@dataclass
class Done:
    """A result that waits for nobody."""

    value: StepResult

    def wait(self) -> None:
        pass

    def result(self) -> StepResult:
        return self.value


class ToyWorker:
    """Answers each row with the number of token ids that the plan has admitted."""

    def __init__(self, resolved: Resolved, seat: Seat) -> None:
        self.seat, self.pace = seat, NoPace()

    @property
    def reports(self) -> bool:
        return self.seat.rank == 0

    def start(self) -> Capacity:
        self.seat.entered("barrier")
        return Capacity(kinds=(), num_pages=0, max_model_len=1)

    def execute(self, plan: StepPlan) -> Done:
        for item in cast("list[str]", plan.ride.get("toy", [])):
            what, rank = item.split()
            self.happen(what, is_here=int(rank) == self.seat.rank)
        num_tokens = sum(len(admission.token_ids) for admission in plan.admitted)
        tokens, num_new = ints([num_tokens for _ in plan.rows]), ints([1 for _ in plan.rows])
        return Done(StepResult(plan_id=plan.id, token_ids=tokens, num_new=num_new))

    def happen(self, what: str, *, is_here: bool) -> None:
        if what in ("stop", "sleep"):  # within a collective, in which the others wait
            self.seat.entered("all_gather")
            self.seat.entered("all_reduce")
            if is_here and what == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(FOREVER)
        elif what == "linger":  # at work on its stage, for which the others wait
            for _ in range(3 if is_here else 1):
                self.seat.entered("all_reduce")
            self.seat.waiting(not is_here)
            time.sleep(FOREVER)
        elif is_here and what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif is_here and what == "say":
            threading.Thread(target=lambda: self.seat.say("toy", {"rank": self.seat.rank})).start()
        elif is_here and what == "raise":
            raise ArithmeticError("a toy's")

    def pid(self) -> int:
        return os.getpid()

    def shutdown(self) -> None:
        pass


def started(num_workers: int = 2, *, worker_timeout: float = 60.0) -> MultiprocExecutor:
    """An executor with toys."""
    executor = MultiprocExecutor("tests.executor.toy:ToyWorker")
    executor.start(resolved(num_workers, worker_timeout))
    return executor


def resolved(num_workers: int, worker_timeout: float) -> Resolved:
    """Of no model."""
    options = {"tensor_parallel_size": num_workers, "worker_timeout": worker_timeout}
    return Resolved(
        user=EngineConfig.from_options(options),
        checkpoint=Checkpoint(name="toy", path=Path("toy"), config={}),
        platform=Platform(device="cpu", name="CPU", memory_total=0, memory_free=0, num_cores=1),
        dtype="float32",
        kv_dtype="float32",
        max_model_len=1,
        max_model_len_is_default=False,
        block_size=16,
        max_num_seqs=1,
        max_num_batched_tokens=1,
        depth=1,
        num_threads=1,
        executor="multiproc",
        stage_layers=(1,),
    )


def plan(plan_id: int, *happens: str, num_tokens: int = 0) -> StepPlan:
    """A plan of one row, in which this happens, with a prompt of so many tokens."""
    admission = Admission(
        seq_id=0,
        slot=0,
        token_ids=ints([70000] * num_tokens),
        prompt_len=num_tokens,
        num_computed=0,
        limit=num_tokens,
        seed=0,
        sampling=SamplingParams(),
    )
    return StepPlan(
        id=plan_id,
        committed=plan_id - 1,
        rows=Rows.of([Row(0)]),
        admitted=[admission],
        ride={"toy": list(happens)},
    )
