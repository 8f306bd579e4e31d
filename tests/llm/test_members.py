"""Programs of every kind may have members; whatever becomes of one is told, and nothing is left of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pellucid import LLM, SamplingParams
from tests.forked import Nursery
from tests.llm.test_invariance import BASE
from tests.patience import PATIENCE, eventually
from tests.processes import alive, member, members

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
PROGRAM = """
import sys
print("begun", flush=True)
from pellucid import LLM, SamplingParams
{before}
llm = LLM({model!r}, device="cpu", dtype="float32", cpu_kv_cache_gib=0.05, {options})
output = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)[0]
print(len(output.outputs[0].token_ids), flush=True)
"""


@pytest.mark.parametrize(
    "way,options",
    [
        pytest.param("a script", "tensor_parallel_size=2", marks=pytest.mark.matrix),
        pytest.param("a script", "data_parallel_size=2", marks=pytest.mark.matrix),
        ("a pipe", "tensor_parallel_size=2"),
        ("a prompt", "data_parallel_size=2"),
    ],
)
def test_a_program_needs_no_guard(tiny: Path, tmp_path: Path, way: str, options: str) -> None:
    done = run(tmp_path, PROGRAM.format(model=str(tiny), options=options, before=""), way)
    assert (done.returncode, done.stdout.split()) == (0, ["begun", "5"]), done.stderr


def run(folder: Path, program: str, way: str = "a script") -> subprocess.CompletedProcess[str]:
    """Run a program from a folder, in which modules of its own may lie; nothing stays behind."""
    (folder / "temporary").mkdir(exist_ok=True)
    if way == "a script":
        (folder / "script.py").write_text(program)
    arguments = {"a script": [str(folder / "script.py")], "a pipe": ["-"], "a prompt": ["-i"]}[way]
    memory = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    done = subprocess.run(
        [sys.executable, *arguments],
        input="" if way == "a script" else program,
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"TMPDIR": str(folder / "temporary"), "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=PATIENCE,
        check=False,
    )
    assert not [*(folder / "temporary").iterdir()], "a file stays behind"
    assert not memory or not {*os.listdir("/dev/shm")} - {*memory}, "memory stays behind"
    return done


REGISTER = 'from pellucid.models.registry import MODELS; MODELS.register("Qwen3ForCausalLM", "{path}")'


@pytest.mark.parametrize(
    "options",
    ["tensor_parallel_size=2", pytest.param("data_parallel_size=2", marks=pytest.mark.matrix)],
)
def test_a_class_in_a_module_beside_the_script_is_known_to_its_members(
    tiny: Path, tmp_path: Path, options: str
) -> None:
    (tmp_path / "mine.py").write_text("from pellucid.models.qwen3 import Qwen3 as Mine; print('imported')")
    before = REGISTER.format(path="mine:Mine")
    done = run(tmp_path, PROGRAM.format(model=str(tiny), options=options, before=before))
    assert done.stdout.count("imported") == 2, done.stderr


def test_a_class_in_the_script_itself_is_refused_with_the_way_out(tiny: Path, tmp_path: Path) -> None:
    before = "from pellucid.models.qwen3 import Qwen3 as Mine; " + REGISTER.format(path="__main__:Mine")
    alone, among_two = (
        PROGRAM.format(model=str(tiny), options=options, before=before)
        for options in ("", "tensor_parallel_size=2")
    )
    done = run(tmp_path, alone + among_two.replace("begun", "begun again"))
    assert done.stdout.split() == ["begun", "5", "begun", "again"], "in the script's own process it is known"
    assert done.stderr.splitlines()[-1] == (
        "ValueError: __main__:Mine is in a script, which other processes do not run; put Mine into a module "
        'beside it, say mine.py, and name it "mine:Mine"'
    )


@pytest.mark.parametrize(
    "options,who",
    [
        pytest.param(
            "tensor_parallel_size=2",
            "worker [01] has failed, before its first plan[^:]*",
            marks=pytest.mark.matrix,
        ),
        ("data_parallel_size=2", "engine [01] has failed"),
        (
            "tensor_parallel_size=2, data_parallel_size=2",
            "engine [01] has failed: RuntimeError: worker [01] has failed, before its first plan[^:]*",
        ),
    ],
)
def test_why_a_start_fails_is_the_last_thing_on_the_screen(
    tiny: Path, tmp_path: Path, options: str, who: str
) -> None:
    (tmp_path / "broken.py").write_text(
        "from pellucid.models.qwen3 import Qwen3\n"
        "class Broken(Qwen3):\n    def __init__(self, config, b):\n        raise OSError('out of\\nluck')\n"
    )
    before = REGISTER.format(path="broken:Broken")
    done = run(tmp_path, PROGRAM.format(model=str(tiny), options=options, before=before))
    *others, last = done.stderr.splitlines()
    assert re.fullmatch(rf"RuntimeError: {who}: OSError: out of luck", last), done.stderr
    assert any('broken.py", line 4' in line for line in others), "the member's own traceback"


TOLD = {
    ("worker", signal.SIGKILL): "the engine has failed: WorkersLost: worker 1 has died (exit code -9)",
    (
        "worker",
        signal.SIGSTOP,
    ): "the engine has failed: WorkersLost: no result for 3 s, waiting for worker 1",
    ("engine", signal.SIGKILL): "has died (exit code -9)",
    ("engine", signal.SIGSTOP): "(a signal has stopped it)",
}


@pytest.mark.parametrize(
    "hurts",
    [
        [("worker", signal.SIGKILL), ("engine", signal.SIGSTOP)],
        [("worker", signal.SIGSTOP), ("engine", signal.SIGKILL)],
    ],
    ids=["a dead worker, a stopped engine", "a stopped worker, a dead engine"],
)
def test_whatever_becomes_of_a_member_under_load_is_named_and_leaves_nothing(
    tiny: Path, hurts: list[tuple[str, signal.Signals]], caplog: pytest.LogCaptureFixture, forks: Nursery
) -> None:
    """Requests of the first one that is lost go on at the other, and end with that."""
    options = BASE | {"tensor_parallel_size": 2, "data_parallel_size": 2, "worker_timeout": 3.0}
    others = members()
    with LLM(str(tiny), **options) as llm:
        engine = llm.llm_engine
        found = {pid: name for pid, name in members().items() if pid not in others}
        assert sorted(found.values()) == ["engine 0", "engine 1", *["worker 0"] * 2, *["worker 1"] * 2]
        pids = {name: pid for pid, name in found.items() if "engine" in name}
        for number in range(40):
            engine.add_request([1, 2, number], LONG)
        while not any(output.outputs[0].token_ids for output in engine.step()):
            pass
        for index, (kind, number) in enumerate(hurts):
            pid = pids[f"engine {index}"]
            os.kill(pid if kind == "engine" else member("worker 1", pid), number)
        began, errors = time.monotonic(), set[str]()
        while engine.has_unfinished_requests():
            errors |= {output.error for output in engine.step() if output.error is not None}
        assert time.monotonic() - began < 30
        named = [record.getMessage() for record in caplog.records if record.name.endswith("replicas")]
        for index, hurt in enumerate(hurts):
            assert any(name.startswith(f"engine {index}") and TOLD[hurt] in name for name in named)
        assert len(errors) == 1 and errors <= {*named}, "but the last one's"
        # Who has lost a worker answers still, and has no other one.
        eventually(lambda: alive(found) == {pids["engine 0"]}, seconds=20)
    assert not alive(found)


OWNER = """
import asyncio, sys
from pellucid import AsyncLLM, SamplingParams
async def main():
    llm = AsyncLLM(model=sys.argv[1], tensor_parallel_size=2, device="cpu", cpu_kv_cache_gib=0.05)
    print("ready", flush=True)
    while True:
        async for _ in llm.generate([1, 2, 3], SamplingParams(max_tokens=250, ignore_eos=True)):
            pass
asyncio.run(main())
"""


def test_members_of_members_end_with_an_owner_that_is_killed_under_load(tiny: Path, tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tiny)],
        stdout=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert owner.stdout is not None and owner.stdout.readline() == b"ready\n"
    found = [psutil.Process(pid) for pid in members(owner.pid)]
    assert len(found) == 3, "an engine, and its workers"
    owner.kill()
    owner.communicate()
    _, alive = psutil.wait_procs(found, timeout=20)
    assert not alive, "members outlive their owner"
    assert not [*tmp_path.iterdir()], "something is left behind"
