"""Members and their owner: starts, words, and every way to end, of either side."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pellucid.cluster.messages import Answer, Call, Failed, Message, tagged, untagged
from pellucid.cluster.supervisor import GRACE, Supervisor
from pellucid.registry import Registry
from tests.cluster.toy import LIFE, Toy
from tests.patience import PATIENCE, eventually
from tests.processes import alive, members


@pytest.fixture
def team() -> Iterator[Supervisor]:
    supervisor = Supervisor()
    yield supervisor
    supervisor.end(seconds=5)
    assert not members(), "something is left behind"


def started(team: Supervisor, *toys: Toy) -> Supervisor:
    for index, toy in enumerate(toys or (Toy(), Toy())):
        team.start(f"toy {index}", LIFE, toy, standing="that came so far" if index else "")
    assert {*team.await_ready(hear=lambda *_: None)} == {"here I am"}
    return team


def ask(team: Supervisor, index: int, name: str, *args: object) -> Any:
    """A member's answer, or its `Failed`."""
    team.send(Call(name, [*map(tagged, args)]), to=[team.members[index]])
    said = heard(team)
    assert [i for i, _ in said] == [index]
    message = said[0][1]
    return untagged(message.value) if isinstance(message, Answer) else message


def heard(team: Supervisor) -> list[tuple[int, Message]]:
    until = time.monotonic() + PATIENCE
    while not (said := team.poll(0.1)):
        assert time.monotonic() < until, "nobody says anything"
    return said


def test_members_answer_and_leave_when_they_are_told_to(team: Supervisor) -> None:
    started(team)
    assert {*members().values()} == {"toy 0", "toy 1"}
    assert ask(team, 1, "echo", {"a": [1, None, 2.5]}) == {"a": [1, None, 2.5]}
    assert ask(team, 0, "echo", "b" * 3_000_000) == "b" * 3_000_000
    began = time.monotonic()
    team.end(seconds=60)
    assert time.monotonic() - began < 30 and not members()
    assert [toy.process.exit_code() for toy in team.members] == [0, 0]
    team.end(seconds=60)


def test_a_member_imports_what_its_owner_does_in_the_same_folder(
    team: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "types.py").write_text("raise ImportError('not the standard library')")
    (tmp_path / "unheard_of.py").write_text("thing = 1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match="ModuleNotFoundError: No module named 'unheard_of'"):
        started(Supervisor(), Toy(path="unheard_of:thing"))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    started(team, Toy(path="unheard_of:thing"))
    path, folder = ask(team, 0, "path")
    ours = [entry for entry in dict.fromkeys(sys.path) if os.path.isabs(entry)]
    assert [entry for entry in path if entry in ours] == ours and folder == str(tmp_path)


def test_what_has_been_registered_is_known_there_and_a_class_of_the_script_is_refused_by_name(
    team: Supervisor,
) -> None:
    registry: Registry[object] = Registry("toy kind of a test", {})
    registry.register("mine", "tests.cluster.toy:Toy")
    assert started(team, Toy(path="tests.cluster.toy:loads_mine"))
    with pytest.raises(
        ValueError, match='put Mine into a module beside it, say mine.py, and name it "mine:Mine"'
    ):
        started(Supervisor(), Toy(path="__main__:Mine"))


@pytest.mark.parametrize("how,code", [("die", -9), ("exit", 3)])
def test_one_that_dies_is_named_with_what_is_known_of_it(team: Supervisor, how: str, code: int) -> None:
    started(team)
    began = time.monotonic()
    failed = ask(team, 1, how)
    assert failed == Failed(f"toy 1 has died (exit code {code}), that came so far", is_lost=True)
    assert time.monotonic() - began < 5
    assert ask(team, 0, "echo", 1) == 1, "another one lives on"
    assert team.failures == [failed] and team.cause() == failed


def test_one_that_hangs_up_and_does_not_end_is_named_in_time(team: Supervisor) -> None:
    started(team)
    began = time.monotonic()
    team.members[0].process.reason = lambda: "it was tired"  # type: ignore[method-assign]
    assert ask(team, 0, "hang up") == Failed("toy 0 is lost (no exit code); it was tired", is_lost=True)
    assert GRACE <= time.monotonic() - began < GRACE + 5


def test_one_that_dies_is_named_also_if_a_fork_of_its_holds_the_line(team: Supervisor) -> None:
    started(team)
    ask(team, 1, "fork")
    pid = team.members[1].process.pid
    (fork,) = psutil.Process(pid).children()
    os.kill(pid, signal.SIGKILL)
    assert heard(team) == [(1, Failed("toy 1 has died (exit code -9), that came so far", is_lost=True))]
    fork.kill()


def test_an_exception_is_told_in_one_line_and_its_traceback_comes_before(
    team: Supervisor, capfd: pytest.CaptureFixture[str]
) -> None:
    failed = ask(started(team), 0, "whatever")
    assert failed == Failed("toy 0 has failed: ArithmeticError: a toy's")
    written = capfd.readouterr().err
    assert "ERROR toy 0: a toy's\nTraceback" in written and written.endswith("ArithmeticError: a toy's\n")


def test_who_cannot_start_is_named_and_the_others_end(
    team: Supervisor, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RuntimeError, match="^toy 1 has failed: OSError: no such device$"):
        started(team, Toy(after=60), Toy(raises="builtins:OSError", says="no such\ndevice"))
    assert not members()
    assert "Traceback" in capfd.readouterr().err


def test_what_the_user_can_mend_is_a_value_error_without_a_traceback(
    team: Supervisor, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="^lower it$"):
        started(team, Toy(after=60), Toy(raises="builtins:ValueError", says="lower it"))
    assert not members() and not capfd.readouterr().err


def test_who_only_misses_another_one_waits_for_the_cause(team: Supervisor) -> None:
    echo = Toy(raises="tests.cluster.toy:PeerError", says="connection closed")
    with pytest.raises(RuntimeError, match="toy 1 has failed: OSError: the cause"):
        started(team, echo, Toy(raises="builtins:OSError", says="the cause", after=0.7), echo)


def test_nobody_waits_for_a_cause_that_nobody_can_tell(team: Supervisor) -> None:
    echo = Toy(raises="tests.cluster.toy:PeerError", says="connection closed")
    with pytest.raises(RuntimeError, match="has failed: PeerError: connection closed"):
        started(team, echo, echo)


def test_one_that_is_ready_long_before_the_others_may_say_something(team: Supervisor) -> None:
    team.start("toy 0", LIFE, Toy())
    team.start("toy 1", LIFE, Toy(after=1))
    team.send(Call("echo", [tagged(3)]), to=team.members[:1])
    told: list[tuple[int, Message]] = []
    team.await_ready(hear=lambda index, message: told.append((index, message)))
    assert told == [(0, Answer(tagged(3)))]


def test_a_start_that_is_not_wanted_any_more_ends(team: Supervisor) -> None:
    team.start("toy 0", LIFE, Toy(after=60))
    wanted = iter([True, True, False])
    with pytest.raises(RuntimeError, match="not wanted any more"):
        team.await_ready(hear=lambda *_: None, is_wanted=lambda: next(wanted))
    team.end()


def test_one_that_is_stopped_is_known_to_be_and_is_ended_all_the_same(team: Supervisor) -> None:
    started(team)
    team.send(Call("stop", []), to=team.members[:1])
    eventually(lambda: team.members[0].process.is_stopped)
    assert not team.members[1].process.is_stopped
    began = time.monotonic()
    team.end(seconds=1)
    assert 0.9 < time.monotonic() - began < 20


def test_what_a_stopped_one_has_not_read_costs_nobody_time(team: Supervisor) -> None:
    started(team)
    team.send(Call("stop", []), to=team.members[:1])
    eventually(lambda: team.members[0].process.is_stopped)
    for _ in range(10):
        team.send(Call("echo", [tagged("c" * 1_000_000)]))
    said: list[Message] = []
    while len(said) < 10:
        said += [message for index, message in heard(team) if index]
    os.kill(team.members[0].process.pid, signal.SIGCONT)
    while len(said) < 21:
        said += [message for _, message in heard(team)]
    assert {untagged(message.value) for message in said if isinstance(message, Answer)} == {
        None,
        "c" * 1_000_000,
    }


def test_one_that_is_busy_leaves_in_its_time_or_is_made_to(team: Supervisor) -> None:
    started(team)
    team.send(Call("sleep", [tagged(1.0)]), to=team.members[:1])
    team.send(Call("sleep", [tagged(60.0)]), to=team.members[1:])
    team.end(seconds=4)
    assert [toy.process.exit_code() for toy in team.members] == [0, -9]


def test_a_fork_of_the_owner_ends_nobody(team: Supervisor) -> None:
    started(team)
    if not (pid := os.fork()):
        team.end()
        os._exit(0)
    os.waitpid(pid, 0)
    assert ask(team, 0, "echo", 5) == 5


def test_an_owner_that_lets_go_of_its_members_ends_them(team: Supervisor) -> None:
    other = started(Supervisor())
    assert len(members()) == 2
    del other
    assert not members()


OWNER = """
import os, signal, sys, time
from pellucid.cluster.messages import Call, tagged
from tests.cluster.test_supervisor import Supervisor, started
team = started(Supervisor())
team.send(Call(sys.argv[1], [tagged(60.0)] if sys.argv[1] == "sleep" else []), to=team.members[:1])
time.sleep(0.5)
fork = os.fork() if "fork" in sys.argv else 0
if "fork" in sys.argv and not fork:  # it holds the lines, too
    time.sleep(60)
print(*(member.process.pid for member in team.members), fork, flush=True)
if sys.argv[2] == "leave":
    sys.exit()
if sys.argv[2] == "raise":
    raise OSError("an owner's")
os.kill(os.getpid(), getattr(signal, sys.argv[2]))
time.sleep(60)
"""


@pytest.mark.parametrize(
    "busy,how",
    [
        ("sleep", "SIGKILL"),
        ("sleep", "SIGKILL fork"),
        ("stop", "SIGKILL"),
        ("sleep", "SIGTERM"),
        ("echo", "leave"),
        ("echo", "raise"),
    ],
)
def test_members_end_with_their_owner_however_it_ends(tmp_path: Path, busy: str, how: str) -> None:
    """It is no script with a guard: it comes through a pipe."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    owner = subprocess.Popen(
        [sys.executable, "-", busy, *how.split()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(temporary)},
        cwd=tmp_path,
    )
    assert owner.stdin is not None and owner.stdout is not None
    owner.stdin.write(textwrap.dedent(OWNER).encode())
    owner.stdin.close()
    *pids, fork = map(int, owner.stdout.readline().split())
    owner.wait(PATIENCE)
    eventually(lambda: not alive(pids), seconds=20)
    assert not list(temporary.iterdir()), "something is left behind"
    if fork:
        os.kill(fork, signal.SIGKILL)
