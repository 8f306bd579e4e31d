"""The processes that a test has started, by what their command lines say, or the names that forks have."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import psutil


def members(owner: int | None = None) -> dict[int, str]:
    """Members of a process (this one) that live, and theirs: pids and names, such as "engine 0"."""
    found: dict[int, str] = {}
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(owner).children():
            with suppress(psutil.NoSuchProcess):
                command = child.cmdline()
                if "tests.forked" in command:
                    for fork in child.children():
                        if fork.status() != psutil.STATUS_ZOMBIE:
                            found |= {fork.pid: fork.name()} | members(fork.pid)
                elif "pellucid.member" in command and child.status() != psutil.STATUS_ZOMBIE:
                    found |= {child.pid: command[-1].removeprefix("pellucid ")} | members(child.pid)
    return found


def member(name: str, owner: int | None = None) -> int:
    """The pid of the only one of this name below a process."""
    (pid,) = [pid for pid, other in members(owner).items() if other == name]
    return pid


def alive(pids: Iterable[int]) -> set[int]:
    """Those of them that have not ended, whosever they are now."""
    return {pid for pid in pids if psutil.pid_exists(pid) and not is_zombie(pid)}


def is_zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
