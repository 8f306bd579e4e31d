"""Servers that end, and what they refuse meanwhile."""

from __future__ import annotations

import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from pellucid.server.lifecycle import MOST_FILES, allow_files
from tests.forked import Nursery
from tests.patience import PATIENCE, eventually
from tests.server.conftest import Running, running

LONG = {"prompt": "Once", "max_tokens": 3000, "ignore_eos": True}


class Client(threading.Thread):
    """Sends one request and keeps what comes back."""

    def __init__(self, server: Running, **changes: Any) -> None:
        super().__init__(daemon=True)
        self.url, self.body = server.url, {**LONG, **changes}
        self.has_begun = threading.Event()
        self.text, self.status, self.ended = "", 0, 0.0

    def run(self) -> None:
        try:
            headers = {"Authorization": "Bearer second"}
            with httpx.stream(
                "POST", f"{self.url}/v1/completions", json=self.body, timeout=PATIENCE, headers=headers
            ) as reply:
                self.status = reply.status_code
                for text in reply.iter_text():
                    self.text += text
                    self.has_begun.set()
        except httpx.HTTPError as error:
            self.text += repr(error)
        self.ended = time.monotonic()


def test_an_engine_that_dies_is_started_anew_once(capfd: pytest.CaptureFixture[str]) -> None:
    with running("--restart") as server:
        streams = [Client(server, stream=True) for _ in range(3)]
        whole = Client(server)
        for client in (*streams, whole):
            client.start()
        for client in streams:
            assert client.has_begun.wait(PATIENCE)
        eventually(lambda: server.metric("vllm:num_requests_running") == 4)
        httpx.post(f"{server.url}/pause?mode=keep", timeout=PATIENCE)
        server.engine.kill()
        for client in (*streams, whole):
            client.join(PATIENCE)
            assert "engine 0 has died (exit code -9)" in client.text
        assert whole.status == 500
        health = httpx.get(f"{server.url}/health", timeout=PATIENCE).status_code
        assert health == 503, "an error comes at once, long before another engine is ready"
        with pytest.raises(openai.InternalServerError) as refused:
            server.client().completions.create(model="sprout", prompt="Once", max_tokens=2)
        assert refused.value.status_code == 503

        eventually(lambda: httpx.get(f"{server.url}/health", timeout=PATIENCE).status_code == 200)
        patient = Client(server, max_tokens=2)
        patient.start()
        eventually(lambda: server.metric("vllm:num_requests_waiting") == 1)
        assert httpx.get(f"{server.url}/is_paused").json() == {"is_paused": True}, "as the one before"
        httpx.post(f"{server.url}/resume")
        patient.join(PATIENCE)
        assert patient.status == 200
        family = psutil.Process(server.process.pid).children(recursive=True)
        server.engine.kill()
        assert server.process.wait(PATIENCE) == 1
    # Python's own process for what others leave behind ends after them.
    assert not psutil.wait_procs(family, PATIENCE)[1]
    assert "leaked" not in capfd.readouterr().err


def test_a_guarded_server_drains(tmp_path: Path, nursery: Nursery) -> None:
    (tmp_path / "template").write_text("{% for m in messages %}{{ m.content }}!{% endfor %}")
    limits = ["--max-waiting", "2", "--max-body-mib", "0.01", "--max-output-tokens", "200"]
    limits += ["--drain-seconds", str(PATIENCE)]
    names = ["--served-model-name", "tree", "plant", "--allowed-origins", '["http://a.org"]']
    # The key that ps shows is not the only one.
    template = ["--chat-template", str(tmp_path / "template")]
    (tmp_path / "keys").write_text("alice: {key: hers, max_requests: 1}")
    limits += ["--api-key-file", str(tmp_path / "keys")]
    with running(
        *limits, *names, *template, "--api-key", "first", env={"PELLUCID_API_KEY": "second"}, forks=nursery
    ) as server:
        _check_keys(server)
        _check_sizes(server)
        _check_names(server)
        _check_template(server)
        _check_origins(server)
        _check_limits(server)
        _check_waiting(server)
        _check_drain(server)


def _check_keys(server: Running) -> None:
    for key in ("first", "second"):
        assert server.client(key).models.list().data
    for key in ("third", "firs", "ключ"):
        headers = {b"Authorization": f"Bearer {key}".encode()}
        reply = httpx.get(f"{server.url}/v1/models", headers=headers)
        assert (reply.status_code, reply.json()["error"]["type"]) == (401, "AuthenticationError")
        assert reply.headers["www-authenticate"] == "Bearer"
    assert httpx.get(f"{server.url}/v1/models", headers={"X-Api-Key": "first"}).status_code == 200
    both = {"Authorization": "Bearer third", "X-Api-Key": "first"}
    assert httpx.get(f"{server.url}/v1/models", headers=both).status_code == 200
    assert httpx.post(f"{server.url}/tokenize", json={"prompt": "a"}).status_code == 401
    assert httpx.get(f"{server.url}/health").status_code == 200


def _check_sizes(server: Running) -> None:
    headers = {"Authorization": "Bearer first", "Content-Type": "application/json"}
    large = b'{"prompt": "%b"}' % (b"a" * 20_000)

    def in_parts() -> Any:
        yield large

    for content in (large, in_parts()):
        reply = httpx.post(f"{server.url}/tokenize", content=content, headers=headers)
        assert reply.status_code == 413 and "10,485 bytes" in reply.json()["error"]["message"]
    usage = server.client("first").completions.create(model="tree", prompt="a", max_tokens=2).usage
    assert usage is not None and usage.completion_tokens == 2


def _check_names(server: Running) -> None:
    client = server.client("first")
    assert [card.id for card in client.models.list()] == ["tree", "plant"]
    assert client.completions.create(model="plant", prompt="a", max_tokens=1).model == "plant"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="sprout", prompt="a", max_tokens=1)


def _check_template(server: Running) -> None:
    headers = {"Authorization": "Bearer first"}
    body = {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}
    tokens = httpx.post(f"{server.url}/tokenize", json=body, headers=headers).json()["tokens"]
    plain = httpx.post(f"{server.url}/tokenize", json={"prompt": "a!b!"}, headers=headers).json()["tokens"]
    assert tokens == plain


def _check_origins(server: Running) -> None:
    headers = {"Origin": "http://a.org", "Access-Control-Request-Method": "POST"}
    reply = httpx.options(f"{server.url}/v1/completions", headers=headers)
    assert reply.headers["access-control-allow-origin"] == "http://a.org"
    reply = httpx.options(f"{server.url}/v1/completions", headers={**headers, "Origin": "http://b.org"})
    assert "access-control-allow-origin" not in reply.headers


def _check_limits(server: Running) -> None:
    """What goes on in the background is under way, too."""
    url, headers = f"{server.url}/v1/responses", {"Authorization": "Bearer hers"}
    asked = {"input": "a", "max_output_tokens": 150}

    def ask(**fields: object) -> int:
        return httpx.post(url, json=asked | fields, headers=headers, timeout=PATIENCE).status_code

    with server.held(lambda: ask(background=True) == 200):
        assert ask() == 429
    server.wait_until_idle()
    eventually(lambda: ask() == 200)


def _check_waiting(server: Running) -> None:
    """Sixteen run, two wait, and there is no room for more."""
    running_ones, waiting_ones = clients = [Client(server, n=16), Client(server, n=2)]
    running_ones.start()
    with server.held(lambda: server.metric("vllm:num_requests_running") == 16):
        waiting_ones.start()
    with server.held(lambda: server.metric("vllm:num_requests_waiting") == 2):
        headers = {"Authorization": "Bearer first"}
        url = f"{server.url}/v1/completions"
        reply = httpx.post(url, json={"prompt": "a"}, headers=headers, timeout=PATIENCE)
    assert reply.status_code == 503 and reply.headers["retry-after"] == "1"
    assert "2 completions wait for the engine, max_waiting is 2" in reply.json()["error"]["message"]
    for client in clients:
        client.join(PATIENCE)
        assert client.status == 200 and '"finish_reason":"length"' in client.text
    server.wait_until_idle()


def _check_drain(server: Running) -> None:
    running_one = Client(server, stream=True)
    idle = httpx.Client(base_url=server.url, timeout=PATIENCE)

    def refuses() -> bool:
        try:
            return idle.get("/health").is_error
        except httpx.TransportError as error:
            return not isinstance(error, httpx.TimeoutException)

    running_one.start()
    with server.held(lambda: server.metric("vllm:num_requests_running") == 1):
        assert not refuses()
        server.process.send_signal(signal.SIGTERM)
        eventually(refuses)
    running_one.join(PATIENCE)
    assert running_one.text.endswith("data: [DONE]\n\n") and '"finish_reason":"length"' in running_one.text
    assert server.process.wait(PATIENCE) == 0


def test_a_server_takes_as_many_connections_as_it_may() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[1] // 2, before[1]))
        allow_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(before[1], MOST_FILES)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_drain_ends_and_a_taken_port_is_told() -> None:
    with running("--drain-seconds", "0.5") as server:
        port = server.url.rpartition(":")[2]
        with pytest.raises(AssertionError, match="the server said ''"), running("--port", port):
            pass
        client, whole = Client(server, stream=True), Client(server)
        for each in (client, whole):
            each.start()
        assert client.has_begun.wait(PATIENCE)
        eventually(lambda: server.metric("vllm:num_requests_running") == 2)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0
        for each in (client, whole):
            each.join(PATIENCE)
            assert "the server is shutting down" in each.text and '"code":503' in each.text
        assert whole.status == 503


def test_an_engine_that_is_stopped_is_noticed_within_its_time(nursery: Nursery) -> None:
    with running("--worker-timeout", "2", forks=nursery) as server:
        stream = Client(server, stream=True)
        stream.start()
        assert stream.has_begun.wait(PATIENCE)
        server.engine.suspend()
        stopped = time.monotonic()
        stream.join(PATIENCE)
        assert "has said nothing for 2 s" in stream.text and "a signal has stopped it" in stream.text
        assert 1.5 < stream.ended - stopped < 10, "the time-out, and no grace of ten seconds beside it"
        assert server.process.wait(PATIENCE) == 1
