"""The server under load: started here if asked to, and its CPU time, if it runs on this machine."""

from __future__ import annotations

import ipaddress
import json
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

import psutil

from pellucid.cli.load.http import Target

READY = re.compile(r"ready: (http://\S+) ")
STOP_SECONDS = 60.0  # until a server that was started here and does not stop is killed
ASK_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Spawned:
    """A server that was started here.  seconds: until it was ready."""

    url: str
    seconds: float
    pid: int


@contextmanager
def spawned(options: Sequence[str]) -> Iterator[Spawned]:
    """Run `pellucid serve` with `options` on a free port, and stop it at the end.  Raises ValueError."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "pellucid", "serve", "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None, "it was asked for"
    try:
        url = _wait_until_ready(process.stdout)
        if url is None:
            raise ValueError(f"the server did not start (status {process.wait()}); its own words are above")
        spawn = Spawned(url, time.perf_counter() - began, process.pid)
        threading.Thread(target=_drain, args=(process.stdout,), daemon=True).start()
        yield spawn
    finally:
        _stop(process)


def _wait_until_ready(lines: IO[str]) -> str | None:
    """The address, or None if the server ended without one."""
    for line in lines:
        if match := READY.match(line):
            return match[1]
        sys.stderr.write(line)
    return None


def _drain(lines: IO[str]) -> None:
    for line in lines:
        sys.stderr.write(line)


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass(frozen=True, slots=True)
class Served:
    """A model that a server offers.  max_model_len: None if the server does not say."""

    model: str
    max_model_len: int | None


def ask_models(target: Target, model: str | None) -> Served:
    """The model to load, the first one by default.  Raises ValueError if the server cannot be asked."""
    url = target.url("/v1/models")
    headers = {} if target.api_key is None else {"Authorization": f"Bearer {target.api_key}"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=ASK_SECONDS
        ) as answer:
            found = [card for card in json.load(answer)["data"] if model in (None, card["id"])]
    except urllib.error.HTTPError as error:
        hint = "; give --api-key" if error.code in (401, 403) else ""
        raise ValueError(f"{url} answers {error.code}{hint}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = getattr(error, "reason", error)
        raise ValueError(f"no server answers at {url}: {reason}; give --base-url, or --spawn one") from None
    if found:
        return Served(found[0]["id"], found[0].get("max_model_len"))
    if model is None:
        raise ValueError(f"{url} lists no model; give --model")
    return Served(model, None)


@dataclass(frozen=True, slots=True)
class ProcessCpu:
    """CPU seconds that one process of the server has taken, user's and system's."""

    pid: int
    name: str
    seconds: float


class ServerCpu:
    """Watches a server on this machine: the processes that listen, and all that they have started."""

    def __init__(self, roots: Sequence[int]) -> None:
        self._roots = roots
        self._before = self._read()

    @classmethod
    def of(cls, target: Target, pid: int | None) -> ServerCpu | None:
        """None if the server is elsewhere, or its processes are not ours to see.  pid: its own, if known."""
        if pid is not None:
            return cls([pid])
        roots = _listeners(target.port) if _is_local(target.host) else []
        return cls(roots) if roots else None

    def restart(self) -> None:
        """Count from here."""
        self._before = self._read()

    def processes(self) -> list[ProcessCpu]:
        """What each has taken since `restart`, the most first."""
        now = self._read()
        spent = [
            ProcessCpu(pid, name, seconds - self._before.get(pid, ("", 0.0))[1])
            for pid, (name, seconds) in now.items()
        ]
        return sorted(spent, key=lambda process: -process.seconds)

    def _read(self) -> dict[int, tuple[str, float]]:
        """pid: (name, CPU seconds)"""
        found: dict[int, tuple[str, float]] = {}
        for root in self._roots:
            try:
                process = psutil.Process(root)
                family = [process, *process.children(recursive=True)]
            except psutil.Error:
                continue
            for each in family:
                try:
                    times = each.cpu_times()
                    found[each.pid] = (each.name(), times.user + times.system)
                except psutil.Error:
                    continue
        return found


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listeners(port: int) -> list[int]:
    """Processes that listen on a port, as far as they may be seen."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.Error:
        return []
    found = {
        each.pid
        for each in connections
        if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port and each.pid
    }
    return sorted(found)
