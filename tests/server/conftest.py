"""A real server on loopback, with the bundled model; one for most tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import openai
import psutil
import pytest

from tests.forked import Forked, Nursery
from tests.patience import PATIENCE, eventually
from tests.processes import members
from tests.server.chromium import Tab, chromium, find_chromium

SMALL = ["--device", "cpu", "--num-threads", "1", "--cpu-kv-cache-gib", "0.05", "--max-num-seqs", "16"]


@dataclass
class Running:
    """A server's process and where it listens."""

    process: subprocess.Popen[str] | Forked
    url: str

    @property
    def engine(self) -> psutil.Process:
        """The engine's process."""
        return psutil.Process(next(iter(members(self.process.pid))))

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=PATIENCE).text
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        samples = re.findall(rf"^{re.escape(name)}{{(.*)}} (\S+)$", text, re.MULTILINE)
        assert samples, f"no metric {name}"
        return sum(float(value) for found, value in samples if wanted <= set(found.split(",")))

    @contextmanager
    def held(self, when: Callable[[], bool]) -> Generator[None, None, None]:
        """Have the engine stand still as soon as this is true, however slow it is to see."""
        engine, until = self.engine, time.monotonic() + PATIENCE
        try:
            engine.suspend()
            while not when():
                assert time.monotonic() < until, "it never came true"
                engine.resume()
                time.sleep(0.05)
                engine.suspend()
            yield
        finally:
            engine.resume()

    def wait_until_idle(self) -> None:
        """No completion is under way and no block in use."""
        eventually(
            lambda: (
                self.metric("vllm:num_requests_running") + self.metric("vllm:num_requests_waiting") == 0
                and self.metric("vllm:kv_cache_usage_perc") == 0
            )
        )


@contextmanager
def running(
    *options: str, env: dict[str, str] | None = None, forks: Nursery | None = None
) -> Generator[Running, None, None]:
    """Start a server, and end it.  forks: of which it is one, its engine too, instead of started anew."""
    arguments = ["serve", "--port", "0", *SMALL, *options]
    environment = {**os.environ, **(env or {})}
    if forks is None:
        process = subprocess.Popen(
            [sys.executable, "-m", "pellucid", *arguments],
            stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
    else:
        process = forks.run(*arguments, environment=environment)
    alarm = threading.Timer(PATIENCE, process.kill)
    alarm.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        alarm.cancel()
        ready = re.match(r"ready: ((?:http://|unix:)\S+) serves (.*), after [\d.]+ s$", line)
        assert ready, f"the server said {line!r} instead of being ready"
        yield Running(process, ready[1])
    finally:
        alarm.cancel()
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


@pytest.fixture(scope="session")
def server() -> Generator[Running, None, None]:
    with running() as server:
        yield server


@pytest.fixture(scope="session")
def client(server: Running) -> Generator[openai.OpenAI, None, None]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="session")
def tab() -> Generator[Tab, None, None]:
    """A browser, where there is one."""
    path = find_chromium()
    if path is None:
        pytest.skip("NO CHROMIUM HERE: the page is not tested (apt-get install chromium)")
    with chromium(path) as tab:
        tab.size(1360, 860)
        yield tab
