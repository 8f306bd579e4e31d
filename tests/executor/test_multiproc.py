"""Workers in their own processes: one that dies, fails or hangs is named, and every request is answered."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pellucid import LLM, LLMEngine, SamplingParams
from pellucid.cluster.line import wait
from pellucid.executor.multiproc import MultiprocExecutor
from tests.executor import toy
from tests.executor.toy import plan
from tests.processes import member, members
from tests.tiny import write_checkpoint

OPTIONS = {"dtype": "float32", "device": "cpu", "block_size": 16, "cpu_kv_cache_gib": 0.05}


def started(tiny: Path, **options: object) -> LLMEngine:
    engine = LLMEngine.from_options(model=str(tiny), **(OPTIONS | options))
    for _ in range(3):
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=200, ignore_eos=True))
    for _ in range(4):
        engine.step()
    return engine


def finish(engine: LLMEngine) -> list[str | None]:
    """Step until every request is answered; the reasons."""
    reasons = []
    while engine.has_unfinished_requests():
        reasons += [output.outputs[0].finish_reason for output in engine.step() if output.finished]
    return reasons


@pytest.mark.parametrize(
    ("rank", "parallel"),
    [
        pytest.param(0, "tensor_parallel_size", marks=pytest.mark.matrix),
        (1, "tensor_parallel_size"),
        (0, "pipeline_parallel_size"),
        pytest.param(1, "pipeline_parallel_size", marks=pytest.mark.matrix),
    ],
)
def test_a_worker_that_dies_is_named_and_ends_the_engine(
    tiny: Path, rank: int, parallel: str, request: pytest.FixtureRequest
) -> None:
    if parallel == "pipeline_parallel_size":  # the others are started anew
        request.getfixturevalue("forks")
    engine = started(tiny, depth=2, **{parallel: 2})
    os.kill(member(f"worker {rank}"), signal.SIGKILL)
    assert finish(engine) == ["error"] * 3
    assert f"worker {rank} has died (exit code -9), its last plan was" in (engine.engine.error or "")
    assert not members(), "the others live on"
    engine.shutdown()


@pytest.mark.usefixtures("forks")
def test_a_worker_that_hangs_is_named_in_time(tiny: Path) -> None:
    engine = started(tiny, tensor_parallel_size=2, worker_timeout=3.0)
    os.kill(member("worker 1"), signal.SIGSTOP)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):  # which may interrupt the wait, and changes nothing
        finish(engine)
    assert engine.engine.error is None
    began = time.monotonic()
    assert finish(engine) == ["error"] * 3
    assert time.monotonic() - began < 10
    error = engine.engine.error or ""
    assert "waiting for worker 1, its last plan was" in error
    assert "worker 0" not in error
    assert not members(), "a stopped worker lives on"
    engine.shutdown()


@pytest.mark.usefixtures("forks")
def test_what_the_user_can_mend_is_a_value_error(tiny: Path) -> None:
    with pytest.raises(ValueError, match="lower max_model_len to 48"):
        LLM(
            str(tiny),
            tensor_parallel_size=2,
            **(OPTIONS | {"max_model_len": 256, "num_gpu_blocks_override": 3}),
        )
    assert not members()


@pytest.mark.usefixtures("forks")
def test_a_checkpoint_that_is_refused_behind_the_start_leaves_no_workers(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny")
    (folder / "generation_config.json").write_text('{"top_p": 0}')
    with pytest.raises(ValueError, match="so says generation_config.json"):
        LLM(str(folder), executor="multiproc", **OPTIONS)
    assert not members()


def test_one_worker_may_have_a_process_of_its_own(tiny: Path) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=8)
    with LLM(str(tiny), **OPTIONS) as llm:
        expected = llm.generate([[5, 6, 7]], greedy, use_tqdm=False)[0].outputs[0].token_ids
    with LLM(str(tiny), executor="multiproc", depth=2, **OPTIONS) as llm:
        assert llm.generate([[5, 6, 7]], greedy, use_tqdm=False)[0].outputs[0].token_ids == expected
    assert not members(), "shutdown leaves workers behind"


def test_a_wish_that_contradicts_itself_is_refused(tiny: Path) -> None:
    with pytest.raises(ValueError, match="executor is 'local', which runs one worker, not 2"):
        LLM(str(tiny), tensor_parallel_size=2, executor="local", **OPTIONS)


# What happens within a step, to toys


@pytest.fixture
def toys() -> Iterator[MultiprocExecutor]:
    yield from toy_executor(worker_timeout=60.0)


@pytest.fixture
def hasty_toys() -> Iterator[MultiprocExecutor]:
    yield from toy_executor(worker_timeout=1.0)


def toy_executor(worker_timeout: float) -> Iterator[MultiprocExecutor]:
    executor = toy.started(worker_timeout=worker_timeout)
    yield executor
    executor.shutdown()
    assert not members()


def test_long_plans_arrive_in_order(toys: MultiprocExecutor) -> None:
    lengths = [1, 100_000, 0, 2_000_000, 7]
    tickets = [toys.submit(plan(i, num_tokens=length)) for i, length in enumerate(lengths)]
    assert [ticket.result().tokens for ticket in tickets] == [[[length]] for length in lengths]


def test_a_call_waits_its_turn_among_plans(toys: MultiprocExecutor) -> None:
    ticket = toys.submit(plan(0))
    assert toys.call("pid") == member("worker 0")
    assert ticket.result().plan_id == 0


def test_what_any_worker_says_out_of_turn_is_heard_with_its_rank(toys: MultiprocExecutor) -> None:
    heard: list[object] = []
    toys.listen(lambda rank, name, said: heard.append((rank, name, said)))
    toys.submit(plan(0, "say 0", "say 1")).result()
    while len(heard) < 2:
        wait(toys.lines, 5.0)
        toys.check()
    assert sorted(heard) == [(rank, "toy", {"rank": rank}) for rank in (0, 1)]  # type: ignore[type-var]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_killed_within_a_step_is_named_with_the_step(toys: MultiprocExecutor, rank: int) -> None:
    toys.submit(plan(4)).result()
    dies = rf"worker {rank} has died \(exit code -9\), its last plan was 5$"
    with pytest.raises(RuntimeError, match=dies):
        for i in (5, 6, 7):  # the report may be of another rank, that lived on
            toys.submit(plan(i, f"die {rank}")).result()
            time.sleep(0.2)
    with pytest.raises(RuntimeError, match=dies):
        toys.check()


def test_an_exception_in_a_worker_comes_home_with_its_traceback(toys: MultiprocExecutor) -> None:
    with pytest.raises(
        RuntimeError, match="worker 0 has failed, its last plan was 3: ArithmeticError: a toy's"
    ):
        toys.submit(plan(3, "raise 0")).result()


def test_a_worker_stopped_within_a_collective_is_named_with_the_collective(
    hasty_toys: MultiprocExecutor,
) -> None:
    began = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        hasty_toys.submit(plan(8, "stop 1")).result()
    assert time.monotonic() - began < 20
    message = str(raised.value)
    assert message.startswith(
        "no result for 1 s, waiting for worker 1, its last plan was 8, its last collective there number 2, "
        "all_reduce (stopped by a signal)"
    )
    assert "worker 0" not in message


def test_without_a_culprit_all_who_wait_are_named(hasty_toys: MultiprocExecutor) -> None:
    with pytest.raises(
        RuntimeError, match="waiting for worker 0, .* all_reduce; worker 1, .* all_reduce; raise"
    ):
        hasty_toys.submit(plan(0, "sleep 0")).result()


def test_who_waits_for_another_stage_is_not_named(hasty_toys: MultiprocExecutor) -> None:
    hasty_toys.submit(plan(1)).result()
    with pytest.raises(
        RuntimeError, match="for 1 s, waiting for worker 0, its last plan was 2, [^;]*; raise"
    ):
        hasty_toys.submit(plan(2, "linger 0")).result()


def test_a_plan_is_submitted_at_once_though_nobody_reads_and_who_does_not_is_named(
    hasty_toys: MultiprocExecutor,
) -> None:
    os.kill(member("worker 1"), signal.SIGSTOP)
    long = plan(0, num_tokens=2_000_000)
    began = time.monotonic()
    ticket = hasty_toys.submit(long)  # or the time-out would end it here
    with pytest.raises(RuntimeError, match=r"for 1 s, waiting for worker 1, before its first plan.*stopped"):
        ticket.result()
        hasty_toys.call("pid")  # which worker 0 alone answers
    assert time.monotonic() - began < 20


# Other engines, and owners that go


OWNER = """
from tests.executor import toy
ticket = toy.started().submit(toy.plan(0, "sleep 0"))
print("ready", flush=True)
ticket.result()
"""


def test_workers_that_hang_in_a_collective_leave_when_their_owner_is_killed(tmp_path: Path) -> None:
    with owner(tmp_path, OWNER) as other:
        assert other.stdout is not None and other.stdout.readline() == b"ready\n"
        kill_and_see_workers_leave(other)
    assert not list((tmp_path / "temporary").iterdir()), "something is left behind"


OTHER_ENGINE = """
import sys
from pellucid import SamplingParams
from tests.executor.test_multiproc import OPTIONS, LLMEngine
engine = LLMEngine.from_options(model=sys.argv[1], tensor_parallel_size=2, **OPTIONS)
engine.add_request([1, 2, 3], SamplingParams(max_tokens=250, ignore_eos=True, temperature=0))
engine.step()
print("ready", flush=True)
while True:
    if not engine.step():
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=250, ignore_eos=True, temperature=0))
"""


@pytest.mark.usefixtures("forks")
def test_engines_side_by_side_never_meet(tiny: Path, tmp_path: Path) -> None:
    with owner(tmp_path, OTHER_ENGINE, str(tiny)) as other:
        engine = LLMEngine.from_options(model=str(tiny), tensor_parallel_size=2, **OPTIONS)
        assert other.stdout is not None and other.stdout.readline() == b"ready\n"
        together = answer(engine)
        kill_and_see_workers_leave(other)
    assert together == answer(engine), "the other engine was heard"
    engine.shutdown()


def owner(folder: Path, script: str, *arguments: str) -> subprocess.Popen[bytes]:
    """A process that has workers of its own; what it leaves in files would be in folder/temporary."""
    (folder / "owner.py").write_text(script)
    (folder / "temporary").mkdir()
    return subprocess.Popen(
        [sys.executable, str(folder / "owner.py"), *arguments],
        stdout=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(folder / "temporary"), "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def kill_and_see_workers_leave(other: subprocess.Popen[bytes]) -> None:
    workers = psutil.Process(other.pid).children(recursive=True)
    assert len(workers) >= 2
    other.kill()
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive, "workers outlive their owner"


def answer(engine: LLMEngine) -> list[int]:
    engine.add_request([5, 6, 7], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs[-1].outputs[0].token_ids
