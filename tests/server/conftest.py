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

SMALL = ["--device", "cpu", "--num-threads", "1", "--cpu-kv-cache-gib", "0.05", "--max-num-seqs", "16"]
START_SECONDS = 120


@dataclass
class Running:
    """A server's process and where it listens."""

    process: subprocess.Popen[str]
    url: str

    @property
    def engine(self) -> psutil.Process:
        """The engine's process."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(child for child in children if any("spawn_main" in part for part in child.cmdline()))

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        text = httpx.get(f"{self.url}/metrics").text
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        samples = re.findall(rf"^{re.escape(name)}{{(.*)}} (\S+)$", text, re.MULTILINE)
        assert samples, f"no metric {name}"
        return sum(float(value) for found, value in samples if wanted <= set(found.split(",")))

    def wait_until_idle(self, seconds: float = 20.0) -> None:
        """No completion is under way and no block in use."""
        eventually(
            lambda: (
                self.metric("vllm:num_requests_running") + self.metric("vllm:num_requests_waiting") == 0
                and self.metric("vllm:kv_cache_usage_perc") == 0
            ),
            seconds,
        )


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it never came true"
        time.sleep(0.05)


@contextmanager
def running(*options: str, env: dict[str, str] | None = None) -> Generator[Running, None, None]:
    """Start a server, and end it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pellucid", "serve", "--port", "0", *SMALL, *options],
        stdout=subprocess.PIPE, text=True, env={**os.environ, **(env or {})},
    )  # fmt: skip
    alarm = threading.Timer(START_SECONDS, process.kill)
    alarm.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        alarm.cancel()
        ready = re.match(r"ready: (http://\S+) serves (.*), after [\d.]+ s$", line)
        assert ready, f"the server said {line!r} instead of being ready"
        yield Running(process, ready[1])
    finally:
        alarm.cancel()
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
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
