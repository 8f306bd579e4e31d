"""Members, and programs with members, forked from a process that has imported what they will need.

That takes seconds less for each of them.  For tests of what they do.  How members start and end is tested
with `python -m pellucid.member` itself, in tests/executor, tests/cluster, tests/nodes and
tests/llm/test_members.py.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TextIO

from pellucid.nodes.local import NOTES, TITLE, LocalProcess

LOOK_EVERY = 0.1  # seconds
PR_SET_NAME = 15  # Linux: what a process is called, up to 15 characters, beside its command line
NUM_DESCRIPTORS = 3  # of a member: the two of its line, and its notes


class Nursery:
    """The process that they come from.  line: to it; without one it is started."""

    def __init__(self, line: socket.socket | None = None) -> None:
        self._lock, self._process = threading.Lock(), None
        if line is not None:
            self._ours = line
            return
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.forked", str(theirs.fileno())],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)},
                pass_fds=(theirs.fileno(),),
                process_group=0,
            )

    def run(self, *arguments: str, environment: Mapping[str, str] | None = None) -> Forked:
        """Start `python -m pellucid` with these arguments, a program whose members are forks, too.

        What it writes to its standard output comes in `stdout`.
        """
        reads, writes = os.pipe()
        wish = {"title": TITLE + arguments[0], "folder": os.getcwd(), "path": sys.path}
        wish |= {"environment": dict(os.environ if environment is None else environment)}
        pid = self.ask(wish | {"arguments": arguments}, writes, 2)
        os.close(writes)
        return Forked(pid, self, os.fdopen(reads))

    def spawn(
        self, name: str, line: tuple[int, int], environment: Mapping[str, str] | None = None
    ) -> LocalProcess:
        """As `pellucid.nodes.local.spawn`."""
        with tempfile.TemporaryFile() as file:
            file.truncate(NOTES)
            wish = {"title": TITLE + name, "folder": os.getcwd(), "path": sys.path}
            wish["environment"] = dict(os.environ if environment is None else environment)
            pid = self.ask(wish, *line, file.fileno())
            return LocalProcess(Forked(pid, self), mmap.mmap(file.fileno(), NOTES))  # type: ignore[arg-type]

    def ask(self, wish: dict[str, Any], *descriptors: int) -> Any:
        with self._lock:
            socket.send_fds(self._ours, [json.dumps(wish).encode()], descriptors)
            return json.loads(self._ours.recv(64))

    def close(self) -> None:
        self._ours.close()
        if self._process is not None:
            self._process.wait()


class Forked:
    """As much of a Popen as members' owners use."""

    def __init__(self, pid: int, nursery: Nursery, stdout: TextIO | None = None) -> None:
        self.pid, self._nursery, self.stdout, self.returncode = pid, nursery, stdout, None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._nursery.ask({"ended": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired("a member", timeout or 0.0)
            time.sleep(0.005)
        return code

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def serve(asked: socket.socket) -> None:
    """Fork whoever is wanted, until nobody can want any more."""
    import pellucid.attention.torch
    import pellucid.engine.member
    import pellucid.executor.member
    import pellucid.models.build
    import pellucid.worker.worker  # noqa: F401
    from pellucid import collector

    collector.freeze()  # once: each fork has the garbage collector look at all there is as it starts
    codes: dict[int, int] = {}  # of those that have ended
    while True:
        while not select.select([asked], [], [], LOOK_EVERY)[0]:
            codes |= ended()
        message, descriptors, _, _ = socket.recv_fds(asked, 1 << 20, NUM_DESCRIPTORS)
        if not message:
            return
        wish = json.loads(message)
        if "ended" in wish:
            codes |= ended()
            asked.send(json.dumps(codes.get(wish["ended"])).encode())
        elif pid := os.fork():
            codes.pop(pid, None)  # of one before it that had its number
            asked.send(json.dumps(pid).encode())
            for descriptor in descriptors:
                os.close(descriptor)
        else:
            asked.close()
            become(wish, descriptors)


def ended() -> dict[int, int]:
    """The exit codes of forks that have ended since it was called, by pid."""
    codes: dict[int, int] = {}
    with suppress(ChildProcessError):
        while (end := os.waitpid(-1, os.WNOHANG))[0]:
            codes[end[0]] = os.waitstatus_to_exitcode(end[1])
    return codes


def become(wish: dict[str, Any], descriptors: list[int]) -> None:
    """What a process started anew would be."""
    from pellucid import member
    from pellucid.cli.main import main as program
    from pellucid.nodes import local

    code = 1
    try:
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(wish["folder"])
        os.environ.clear()
        os.environ.update(wish["environment"])
        sys.path[:] = wish["path"]
        if "arguments" in wish or "engine" in wish["title"]:  # it will have members of its own
            local.spawn = Nursery(nested(descriptors)).spawn
        ctypes.CDLL(None).prctl(PR_SET_NAME, wish["title"].removeprefix(TITLE).encode())
        if "arguments" in wish:
            for number, descriptor in enumerate(descriptors, 1):
                os.dup2(descriptor, number)
                os.close(descriptor)
            sys.argv = ["pellucid", *wish["arguments"]]
            code = program() or 0
            atexit._run_exitfuncs()
        else:
            sys.argv = ["pellucid.member", *map(str, descriptors), wish["title"]]
            member.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def nested(others: list[int]) -> socket.socket:
    """A line to a nursery of this process's own, while that has one thread.  others: not to be held by it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        return ours
    try:
        ours.close()
        for descriptor in others:
            os.close(descriptor)
        serve(theirs)
    finally:
        os._exit(0)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
