"""Several machines, which are addresses of this one: the tokens of one process, and ends that are named."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pellucid import LLM, SamplingParams
from pellucid.nodes.connection import SECRET
from tests.forked import Forked, Nursery
from tests.llm.test_invariance import BASE
from tests.patience import PATIENCE, eventually
from tests.processes import alive, members

OTHER = "127.0.0.2"  # on Linux all of 127.0.0.0/8 is this machine's
PROMPTS = ["the", "a quick fox", "one two three four", "lazy"]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only here are there other addresses")


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "known to all nodes")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextmanager
def agent(port: int, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A second machine's."""
    command = [sys.executable, "-m", "pellucid", "agent", "--master-port", str(port), "--node-addr", OTHER]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def forked_agent(forks: Nursery, port: int) -> Iterator[Forked]:
    process = forks.run("agent", "--master-port", str(port), "--node-addr", OTHER, "--once")
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def two_nodes(
    model: Path, forks: Nursery | None = None, **options: Any
) -> Iterator[tuple[LLM, subprocess.Popen[str] | Forked]]:
    """forks: whose the second machine's agent and its members are, instead of started anew."""
    port = free_port()
    with (
        agent(port, "--once") if forks is None else forked_agent(forks, port) as process,
        LLM(str(model), nnodes=2, master_port=port, **{**BASE, **options}) as llm,
    ):
        yield llm, process


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[list[int]]:
    with LLM(str(tiny), **BASE) as llm:
        return tokens(llm)


@pytest.mark.parametrize(
    "layout,is_forked",
    [
        ({"tensor_parallel_size": 2}, False),
        ({"pipeline_parallel_size": 2}, True),
        ({"data_parallel_size": 2}, True),
    ],
    ids=["tp", "pp", "dp"],
)
def test_two_machines_say_what_one_process_says_and_nothing_stays(
    layout: dict[str, int],
    is_forked: bool,
    tiny: Path,
    expected: list[list[int]],
    request: pytest.FixtureRequest,
) -> None:
    forks = request.getfixturevalue("forks") if is_forked else None
    with two_nodes(tiny, forks, **layout) as (llm, process):
        there = members(process.pid)
        assert len(there) == 1
        assert tokens(llm) == expected
        llm.llm_engine.shutdown()
        assert process.wait(PATIENCE) == 0
    eventually(lambda: not alive(there))
    assert not members()


def ends_in(llm: LLM, seconds: float) -> tuple[str, float]:
    """The error that long answers end in from now on, and after how long."""
    began = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        llm.generate(PROMPTS, LONG, use_tqdm=False)
    took = time.monotonic() - began
    assert took < seconds
    return str(raised.value), took


@pytest.mark.parametrize("victim", ["rank", "agent"])
def test_a_rank_or_an_agent_that_is_killed_is_named_within_ten_seconds(
    victim: str, tiny: Path, forks: Nursery
) -> None:
    with two_nodes(tiny, forks, tensor_parallel_size=2) as (llm, process):
        (there,) = members(process.pid)
        for prompt in PROMPTS:
            llm.llm_engine.add_request(prompt, LONG)
        llm.llm_engine.step()
        os.kill(process.pid if victim == "agent" else there, signal.SIGKILL)
        began, answers = time.monotonic(), []
        while not llm.llm_engine.is_finished():
            answers += [output for output in llm.llm_engine.step() if output.finished]
            assert time.monotonic() - began < 10
        error = answers[-1].outputs[0]
        assert len(answers) == len(PROMPTS) and error.finish_reason == "error"
        assert f"worker 1 on node 1 ({OTHER}) " in (llm.llm_engine.engine.error or "")
        eventually(lambda: not alive([there]))
    assert not members()


def test_an_agent_that_is_stopped_holds_nobody_up(
    tiny: Path, expected: list[list[int]], forks: Nursery
) -> None:
    with two_nodes(tiny, forks, tensor_parallel_size=2) as (llm, process):
        there = members(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        assert tokens(llm) == expected
        llm.llm_engine.shutdown()
        eventually(lambda: not alive(there))  # their lines have ended


def test_when_a_machine_dies_its_engines_requests_end_and_others_go_on(
    tiny: Path, expected: list[list[int]], forks: Nursery
) -> None:
    with two_nodes(tiny, forks, data_parallel_size=2) as (llm, process):
        assert tokens(llm) == expected
        os.kill(process.pid, signal.SIGKILL)
        eventually(lambda: process.poll() is not None)
        began = time.monotonic()
        while time.monotonic() - began < 10:
            llm.llm_engine.step()
            time.sleep(0.1)
            if any(e is not None for e in (r.error for r in llm.llm_engine.engine._replicas)):  # type: ignore[attr-defined]
                break
        errors = [replica.error for replica in llm.llm_engine.engine._replicas]  # type: ignore[attr-defined]
        assert errors[0] is None and f"engine 1 on node 1 ({OTHER}) is lost" in str(errors[1])
        assert tokens(llm) == expected  # by engine 0


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two, each with a network of its own, and a link between them: 10.77.0.1 and 10.77.0.2."""
    names = f"pellucid-{os.getpid()}-a", f"pellucid-{os.getpid()}-b"
    if os.getuid() or shutil.which("ip") is None:
        pytest.skip("only root makes network namespaces, by `ip`")
    for i, name in enumerate(names):
        if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
            pytest.skip("no network namespaces can be made here")
        if not i:
            ip(f"-n {name} link add link0 type veth peer name link1")
        else:
            ip(f"-n {names[0]} link set link1 netns {name}")
    try:
        for i, name in enumerate(names):
            ip(f"-n {name} addr add 10.77.0.{i + 1}/24 dev link{i}")
            for device in ("lo", f"link{i}"):
                ip(f"-n {name} link set {device} up")
        yield names
    finally:
        for name in names:
            ip(f"netns del {name}")


def ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True)


CUT = """
import subprocess, sys, time
from pellucid import LLM, SamplingParams

llm = LLM({model!r}, **{base!r}, tensor_parallel_size=2, nnodes=2, master_addr="10.77.0.1")
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
outputs = llm.generate({prompts!r}, params, use_tqdm=False)
print([output.outputs[0].token_ids for output in outputs])
llm.llm_engine.add_request("the", SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
llm.llm_engine.step()
subprocess.run("ip -n {other} link set link1 down".split(), check=True)
began = time.monotonic()
while not llm.llm_engine.is_finished():
    llm.llm_engine.step()
print(time.monotonic() - began)
print(llm.llm_engine.engine.error)
"""


@pytest.mark.matrix
def test_a_machine_whose_network_goes_is_named(
    tiny: Path, expected: list[list[int]], namespaces: tuple[str, str]
) -> None:
    here, other = (["ip", "netns", "exec", name, sys.executable] for name in namespaces)
    script = CUT.format(model=str(tiny), base=BASE, prompts=PROMPTS, other=namespaces[1])
    command = [*other, "-m", "pellucid", "agent", "--master-addr", "10.77.0.1", "--once"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        said = subprocess.run(
            [*here, "-c", script], capture_output=True, text=True, timeout=PATIENCE, check=True
        )
        *_, ours, took, error = said.stdout.splitlines()
        assert ours == str(expected) and float(took) < 20, "10 s, on a machine that has time"
        assert "worker 1 on node 1 (10.77.0.2) is lost" in error
        assert process.wait(PATIENCE) == 0, "it hears nothing of the head, and leaves"
    for name in namespaces:
        eventually(lambda name=name: not subprocess.check_output(["ip", "netns", "pids", name]))


def test_a_stopped_rank_is_named_with_its_machine(tiny: Path, forks: Nursery) -> None:
    with two_nodes(tiny, forks, tensor_parallel_size=2, worker_timeout=3.0) as (llm, process):
        (there,) = members(process.pid)
        os.kill(there, signal.SIGSTOP)
        error, _ = ends_in(llm, 30)
        assert f"waiting for worker 1 on node 1 ({OTHER})" in error and "(stopped by a signal)" in error
        eventually(lambda: not alive([there]))


def test_who_does_not_know_the_secret_is_told_so(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv(SECRET, "not the same one")
    with agent(port, "--once") as process:
        monkeypatch.setenv(SECRET, "known to all nodes")
        with pytest.raises(ValueError, match=r"after 4 s node 1 of 2 has not come; start `pellucid agent"):
            LLM(str(tiny), nnodes=2, master_port=port, worker_timeout=4.0, tensor_parallel_size=2, **BASE)
        _, said = process.communicate(timeout=PATIENCE)
        assert process.returncode == 2 and f"is {SECRET} the same there?" in said
    monkeypatch.delenv(SECRET)
    with pytest.raises(ValueError, match=f"{SECRET} has 0 characters"):
        LLM(str(tiny), nnodes=2, master_port=port, tensor_parallel_size=2, **BASE)


def test_a_node_that_is_one_too_many_is_refused_on_both_sides(tiny: Path) -> None:
    port = free_port()
    with agent(port, "--node-rank", "2", "--once") as process:
        with pytest.raises(ValueError, match=r"node 2 \(127.0.0.2\) is one too many: of 2 nodes, \[1\] are"):
            LLM(str(tiny), nnodes=2, master_port=port, tensor_parallel_size=2, **BASE)
        _, said = process.communicate(timeout=PATIENCE)
        assert process.returncode == 2 and "is one too many" in said


@pytest.mark.parametrize(
    "options,error",
    [
        ({"nnodes": 2}, "nnodes is 2, and there are 1 ranks"),
        ({"nnodes": 0}, "nnodes is 0"),
        (
            {"nnodes": 2, "tensor_parallel_size": 2, "node_rank": 1},
            "node_rank is 1, and requests are for node 0",
        ),
        ({"nnodes": 2, "tensor_parallel_size": 2, "node_rank": 2}, r"node_rank is 2, must be in \[0, 2\)"),
        ({"data_parallel_size": 3, "data_parallel_size_local": 2}, "of which it must be a part"),
        (
            {"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_start_rank": 1},
            "must be a multiple of data_parallel_size_local, 2",
        ),
        (
            {"data_parallel_size": 4, "data_parallel_size_local": 2, "nnodes": 4},
            "leave one of these out",
        ),
    ],
)
def test_what_cannot_be_dealt_out_is_refused(options: dict[str, Any], error: str, tiny: Path) -> None:
    with pytest.raises(ValueError, match=error):
        LLM(str(tiny), **options, **BASE)
