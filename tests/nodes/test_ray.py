"""Ray, if it is installed (`make test-all` installs it): two of its nodes on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest

from pellucid import LLM, SamplingParams
from tests.llm.test_invariance import BASE
from tests.patience import eventually

# Else a cluster that was started before there was a token in ~/.ray, and who joins it after, differ.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
ray: Any = pytest.importorskip("ray")
PROMPTS = ["the", "a quick fox", "one two three four", "lazy"]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Each node has one CPU, so no two ranks are on the same."""
    cluster = import_module("ray.cluster_utils").Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    cluster.second = cluster.add_node(num_cpus=1)
    ray.init(cluster.address, logging_level="ERROR")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def marked(mark: str) -> list[psutil.Process]:
    """Processes that live with this in their environment."""
    found = list[psutil.Process]()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("MARK") == mark and not has_ended(process.pid):
                found.append(process)
    return found


def test_where_no_cluster_runs_a_script_starts_one_and_leaves_nothing_behind(
    tiny: Path, tmp_path: Path
) -> None:
    """It has no guard, and does not shut down.  The first test: it is in no cluster."""
    with LLM(str(tiny), **BASE) as llm:
        expected = tokens(llm)
    script, mark = tmp_path / "script.py", f"{tmp_path}"
    script.write_text(
        f"from pellucid import LLM, SamplingParams\n"
        f"llm = LLM({str(tiny)!r}, **{BASE!r}, distributed_executor_backend='ray', tensor_parallel_size=2)\n"
        f"params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)\n"
        f"outputs = llm.generate({PROMPTS!r}, params, use_tqdm=False)\n"
        f"print([output.outputs[0].token_ids for output in outputs])\n"
    )
    done = subprocess.run(
        [sys.executable, script], env=os.environ | {"MARK": mark}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert done.stdout.splitlines()[-1] == str(expected)
    eventually(lambda: not marked(mark))


def test_two_nodes_of_ray_say_what_one_process_says_and_one_that_dies_is_named(
    cluster: Any, tiny: Path
) -> None:
    with LLM(str(tiny), **BASE) as llm:
        expected = tokens(llm)
    options = {**BASE, "distributed_executor_backend": "ray", "pipeline_parallel_size": 2}
    with LLM(str(tiny), **options) as llm:
        assert tokens(llm) == expected
    with LLM(str(tiny), **options) as llm:  # the places were given back
        team = llm.llm_engine.engine.executor._team  # type: ignore[attr-defined]
        for prompt in PROMPTS:
            llm.llm_engine.add_request(prompt, LONG)
        llm.llm_engine.step()
        os.kill(team.members[1].process.pid, signal.SIGKILL)
        began, answers = time.monotonic(), []
        while not llm.llm_engine.is_finished():
            answers += [output for output in llm.llm_engine.step() if output.finished]
            assert time.monotonic() - began < 10
        assert [answer.outputs[0].finish_reason for answer in answers] == ["error"] * len(PROMPTS)
        error = llm.llm_engine.engine.error or ""
        assert "worker 1 on node " in error and "Ray says: " in error and "died" in error


def raylet(cluster: Any) -> int:
    """The process of the second node's."""
    return cluster.second.all_processes["raylet"][0].process.pid


def load(llm: LLM) -> None:
    """Requests under way."""
    for prompt in PROMPTS:
        llm.llm_engine.add_request(prompt, LONG)
    while not any(output.outputs[0].token_ids for output in llm.llm_engine.step()):
        pass


def has_ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def answers(llm: LLM, seconds: float) -> list[Any]:
    """How they end, within so long."""
    began, found = time.monotonic(), list[Any]()
    while not llm.llm_engine.is_finished():
        found += [output for output in llm.llm_engine.step() if output.finished]
        assert time.monotonic() - began < seconds
    return found


def test_ranks_that_share_layers_are_on_two_nodes_if_none_has_room_for_both(cluster: Any, tiny: Path) -> None:
    """And a rank that a signal stops is named; the next start is as if nothing had been."""
    with LLM(str(tiny), **BASE) as llm:
        expected = tokens(llm)
    options = {
        **BASE,
        "distributed_executor_backend": "ray",
        "tensor_parallel_size": 2,
        "worker_timeout": 15.0,  # actors start within it, too
    }
    with LLM(str(tiny), **options) as llm:
        assert tokens(llm) == expected
        pid = llm.llm_engine.engine.executor._team.members[1].process.pid  # type: ignore[attr-defined]
        load(llm)
        os.kill(pid, signal.SIGSTOP)
        assert {answer.outputs[0].finish_reason for answer in answers(llm, 60)} == {"error"}
        assert "waiting for worker 1 on node " in (llm.llm_engine.engine.error or "")
    eventually(lambda: has_ended(pid), seconds=30)


def test_a_raylet_that_is_stopped_holds_nobody_up_and_replicas_outlive_a_killed_ones(
    cluster: Any, tiny: Path
) -> None:
    """Each engine's rank is on a node of its own.  The last test: a node is lost."""
    options = {**BASE, "distributed_executor_backend": "ray", "data_parallel_size": 2}
    with LLM(str(tiny), **options) as llm:
        load(llm)
        os.kill(raylet(cluster), signal.SIGSTOP)
        try:
            assert {answer.outputs[0].finish_reason for answer in answers(llm, 60)} == {"length"}
        finally:
            os.kill(raylet(cluster), signal.SIGCONT)
        load(llm)
        os.kill(raylet(cluster), signal.SIGKILL)
        began, replicas = time.monotonic(), llm.llm_engine.engine._replicas  # type: ignore[attr-defined]
        assert {answer.outputs[0].finish_reason for answer in answers(llm, 60)} == {"length"}
        while not any(each.error for each in replicas):  # its actors outlive it by a moment
            load(llm)
            assert {answer.outputs[0].finish_reason for answer in answers(llm, 60)} == {"length"}
            assert time.monotonic() - began < 10
        assert sum(each.error is not None for each in replicas) == 1
    cluster.remove_node(cluster.second)
    cluster.second = cluster.add_node(num_cpus=1)
    with LLM(str(tiny), **options | {"data_parallel_size": 1, "pipeline_parallel_size": 2}) as llm:
        load(llm)
        os.kill(raylet(cluster), signal.SIGKILL)
        began, reasons = time.monotonic(), set[str | None]()
        while "error" not in reasons:
            reasons |= {answer.outputs[0].finish_reason for answer in answers(llm, 10)}
            assert time.monotonic() - began < 10
            if llm.llm_engine.engine.error is None:
                load(llm)
        assert "worker " in (llm.llm_engine.engine.error or "")
