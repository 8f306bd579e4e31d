"""`pellucid route` before two servers: what one server says, and what becomes of who was at a lost one."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import psutil
import pytest

from pellucid.proxy.app import Proxy
from pellucid.proxy.servers import PIECE, Fleet, Server, digests_of, silence_in
from tests.forked import Nursery
from tests.patience import PATIENCE, eventually
from tests.processes import alive, member
from tests.server.conftest import Running, running

PROMPT = "Sort these: 5 1 4 2 9 7. " * 12
BODY = {"model": "sprout", "prompt": PROMPT, "temperature": 0, "max_tokens": 24}
QUESTION: list[Any] = [{"role": "user", "content": PROMPT}]


routers: list[subprocess.Popen[str]] = []  # that have been started


@contextmanager
def routing(*options: str) -> Generator[str, None, None]:
    """The router's address."""
    command = [sys.executable, "-m", "pellucid", "route", "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    routers.append(process)
    alarm = threading.Timer(PATIENCE, process.kill)
    alarm.start()
    assert process.stdout is not None
    ready = re.match(r"ready: (http://\S+) routes", process.stdout.readline())
    alarm.cancel()
    assert ready
    try:
        yield ready[1]
    finally:
        process.terminate()
        process.wait(PATIENCE)


def config(role: str) -> tuple[str, ...]:
    transfer = json.dumps({"kv_connector": "NixlConnector", "kv_role": role})
    return "--dtype", "float32", "--kv-transfer-config", transfer


@pytest.fixture(scope="module")
def servers(nursery: Nursery) -> Generator[tuple[Running, Running, str], None, None]:
    with (
        running(*config("kv_producer"), forks=nursery) as prefill,
        running(*config("kv_consumer"), forks=nursery) as decode,
        routing("--prefill", prefill.url, "--decode", decode.url) as url,
    ):
        yield prefill, decode, url


def complete(url: str, **changes: object) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=BODY | changes, timeout=PATIENCE)


def text(answer: httpx.Response) -> str:
    return answer.json()["choices"][0]["text"]


def test_an_answer_is_that_of_one_server(servers: tuple[Running, Running, str]) -> None:
    prefill, decode, url = servers
    expected = complete(prefill.url)
    before = decode.metric("vllm:prompt_tokens_total"), decode.metric("vllm:prefix_cache_hits_total")
    answer = complete(url)
    assert answer.status_code == 200 and text(answer) == text(expected)
    asked, found = (
        decode.metric(f"vllm:{name}_total") - old
        for name, old in zip(("prompt_tokens", "prefix_cache_hits"), before, strict=True)
    )
    assert found > 0.7 * asked > 0, "its KV has come along"
    assert "kv_transfer_params" not in answer.json()


def test_streams_and_chats_pass_through(servers: tuple[Running, Running, str]) -> None:
    prefill, _, url = servers
    clients = [
        openai.OpenAI(base_url=f"{each}/v1", api_key="none", timeout=PATIENCE) for each in (prefill.url, url)
    ]
    texts = []
    for client in clients:
        whole = client.chat.completions.create(
            model="sprout", messages=QUESTION, temperature=0, max_tokens=20
        )
        chunks = client.chat.completions.create(
            model="sprout", messages=QUESTION, temperature=0, max_tokens=20, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        parts = list(chunks)
        assert parts[-1].usage is not None and parts[-1].usage.completion_tokens == 20
        texts.append(
            (whole.choices[0].message.content, "".join(c.choices[0].delta.content or "" for c in parts[:-1]))
        )
    assert texts[0] == texts[1]
    assert [model.id for model in clients[1].models.list()] == ["sprout"]


def test_what_is_wrong_with_a_request_is_told_by_the_server(servers: tuple[Running, Running, str]) -> None:
    _, _, url = servers
    answer = complete(url, temperature=-1)
    assert answer.status_code == 400 and "temperature" in answer.json()["error"]["message"]
    assert complete(url, model="nobody").status_code == 404
    told = complete(url, max_tokens=1, kv_transfer_params="whatever a client makes up")
    assert told.status_code == 200, "it is not told to any server"
    assert httpx.post(f"{url}/v1/completions", content=b"[", timeout=PATIENCE).status_code == 400
    nowhere = httpx.get(f"{url}/v1/nothing", timeout=PATIENCE)
    assert nowhere.status_code == 404 and "/v1/chat/completions" in nowhere.json()["error"]["message"]


def test_who_goes_away_has_nothing_computed(servers: tuple[Running, Running, str]) -> None:
    prefill, decode, url = servers

    def num_aborted() -> float:
        for each in (prefill, decode):
            each.wait_until_idle()
        return sum(
            each.metric("vllm:request_success_total", finished_reason="abort") for each in (prefill, decode)
        )

    before = num_aborted()
    body = BODY | {"max_tokens": 3000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as answer:
        next(answer.iter_lines())
    assert num_aborted() == before + 1
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{url}/v1/completions", json=body | {"stream": False, "n": 8}, timeout=0.4)
    assert num_aborted() > before + 1
    health = httpx.get(f"{url}/health", timeout=PATIENCE).json()
    assert [each["num_running"] for role in health.values() for each in role.values()] == [0, 0]


def test_a_server_and_a_router_that_are_stopped_keep_nobody_waiting(
    servers: tuple[Running, Running, str],
) -> None:
    prefill, decode, _ = servers
    expected = text(complete(prefill.url))
    body = BODY | {"max_tokens": 1500, "ignore_eos": True, "stream": True}
    roles = "--prefill", prefill.url, "--decode", decode.url
    with routing(*roles, "--server-timeout", "5") as url:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as answer:
            lines = answer.iter_lines()
            next(lines)
            decode.process.send_signal(signal.SIGSTOP)
            try:
                said = [*lines]
                assert text(complete(url)) == expected, "the other one goes on"
            finally:
                decode.process.send_signal(signal.SIGCONT)
        assert any("was lost: it has said nothing for" in line for line in said)
        eventually(lambda: httpx.get(f"{url}/health", timeout=PATIENCE).json()["decode"][decode.url]["is_up"])
        engine = psutil.Process(member("engine 0", decode.process.pid))
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as answer:
            next(lines := answer.iter_lines())
            engine.suspend()
            try:
                said = [*lines]
                assert text(complete(url)) == expected, "the other one goes on here, too"
            finally:
                engine.resume()
        assert any("was lost: its engine has said nothing for" in line for line in said)
        eventually(lambda: httpx.get(f"{url}/health", timeout=PATIENCE).json()["decode"][decode.url]["is_up"])
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as answer:
            next(lines := answer.iter_lines())
            router = psutil.Process(routers[-1].pid)
            (warden,) = router.children()
            router.suspend()
            with pytest.raises(httpx.RemoteProtocolError):
                for _ in lines:
                    pass
        assert routers[-1].wait(PATIENCE) == -signal.SIGKILL
        eventually(lambda: not warden.is_running())
    for server in (prefill, decode):
        server.wait_until_idle()
    with routing(*roles) as url:
        assert text(complete(url)) == expected


def test_while_one_server_is_left_requests_are_answered(servers: tuple[Running, Running, str]) -> None:
    """The last test: nobody is left behind it, neither engines nor what reads and compiles for servers."""
    prefill, decode, url = servers
    expected = text(complete(prefill.url))
    told = complete(decode.url, structured_outputs={"regex": "a+"})
    assert told.status_code == 200
    family = [
        child.pid
        for each in (prefill, decode)
        for child in psutil.Process(each.process.pid).children(recursive=True)
    ]
    assert len(family) >= 5, "two engines, two readers, and what compiles grammars"
    decode.process.kill()
    assert text(complete(url)) == expected, "the server for prompts goes on itself"
    eventually(
        lambda: httpx.get(f"{url}/health", timeout=PATIENCE).json()["decode"][decode.url]["is_up"] is False
    )
    prefill.process.kill()
    assert complete(url).status_code == 503
    eventually(lambda: httpx.get(f"{url}/health", timeout=PATIENCE).status_code == 503)
    eventually(lambda: not alive(family))


def test_a_server_may_not_say_how_long_its_engine_is_silent() -> None:
    assert silence_in(b'{"server_load": 1, "engine_silence": 3.5}') == 3.5
    for load in (b"", b"[]", b'{"server_load": 1}', b'{"engine_silence": null}'):
        assert silence_in(load) == 0


def test_prompts_go_where_their_beginning_is_known_while_nobody_has_less_to_do() -> None:
    fleet = Fleet([Server("http://127.0.0.1:1"), Server("http://127.0.0.1:2")], [])
    first, second = fleet.prefill
    digests = digests_of({"prompt": "x" * 5 * PIECE})
    second.known.add(digests)
    assert fleet.for_prompt(digests) == [second, first]
    second.load = len(digests)
    assert fleet.for_prompt(digests) == [second, first]
    second.load += 1
    assert fleet.for_prompt(digests) == [first, second]
    second.is_up = False
    assert fleet.for_prompt(digests) == [first]


class Held(Server):
    """Answers when it may."""

    gate: asyncio.Event
    num_asked = 0

    async def whole(
        self, method: str, route: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        self.num_asked += 1
        await self.gate.wait()
        return 200, b"{}"


def test_prompts_that_begin_alike_are_spread_when_they_come_together() -> None:
    """By the work that a router itself reckons."""

    async def run() -> None:
        Held.gate = gate = asyncio.Event()
        servers = Held("http://127.0.0.1:1"), Held("http://127.0.0.1:2")
        body = {"prompt": "x" * 5 * PIECE}
        proxy = Proxy(Fleet([*servers], []))
        work = [asyncio.create_task(proxy._prefill("/v1/completions", body, {})) for _ in range(6)]
        await asyncio.sleep(0)
        assert [server.num_asked for server in servers] == [3, 3]
        assert [server.load for server in servers] == [3 * len(digests_of(body))] * 2
        gate.set()
        await asyncio.gather(*work)
        assert [server.load for server in servers] == [0, 0]
        assert all(server.known.num_leading(digests_of(body)) == 6 for server in servers)

    asyncio.run(run())
