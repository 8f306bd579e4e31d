"""The websocket /xray of a real server: who may watch, what is seen, and how often."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import httpx
import openai
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.sync.connection import Connection
from websockets.typing import Origin, Subprotocol

from pellucid.lora.request import AdapterRef
from pellucid.observe.statistics import EngineStats
from pellucid.observe.xray import Frame, StepView
from pellucid.server.xray import Gaps, Requests, Sight, Viewers, Wait, Watcher, encode
from pellucid.types import FinishReason, SeqUpdate
from tests.forked import Nursery
from tests.patience import PATIENCE
from tests.schedule.device import make_request
from tests.server.conftest import Running, eventually, running

PROTOCOL = Subprotocol("pellucid.xray")


def watch(server: Running, key: str | None = None, **options: Any) -> ClientConnection:
    protocols = [PROTOCOL]
    if key is not None:
        encoded = base64.urlsafe_b64encode(key.encode()).decode().rstrip("=")
        protocols.append(Subprotocol(f"key.{encoded}"))
    url = server.url.replace("http", "ws") + "/xray"
    return connect(url, subprotocols=protocols, max_size=None, **options)


def sights(socket: Connection, num_tokens: int, before: int = 0) -> Iterator[dict[str, Any]]:
    """Messages, up to the one by which the engine has sampled so many more tokens and has nothing to do."""
    while True:
        seen = json.loads(socket.recv(PATIENCE))
        yield seen
        is_idle = not seen["frame"]["num_running"] + seen["frame"]["num_waiting"]
        if is_idle and seen["stats"]["num_sampled_tokens"] - before == num_tokens:
            return


def ask(client: openai.OpenAI, **options: Any) -> None:
    client.completions.create(
        model="sprout", prompt="Once upon a time", max_tokens=40, extra_body={"ignore_eos": True}, **options
    )


def test_a_watcher_sees_a_request_from_its_first_token_to_its_last_block(
    server: Running, client: openai.OpenAI
) -> None:
    with watch(server) as socket:
        assert socket.subprotocol == PROTOCOL
        first = json.loads(socket.recv(10))
        assert first["frame"]["is_first"] and (first["engine"], first["num_engines"]) == (0, 1)
        ask(client, n=3)
        seen = list(sights(socket, 120, first["stats"]["num_sampled_tokens"]))
    frames = [sight["frame"] for sight in seen]
    assert max(frame["num_running"] for frame in frames) == 3
    assert any(max(frame["pages"][1::4], default=-1) >= 0 for frame in frames), "pages are owned"
    assert not frames[-1]["running"]
    assert sum(sum(rows[3::4]) for frame in frames for _, rows, *_ in frame["steps"]) == 120, (
        "every token of every step"
    )
    waits = [wait for sight in seen for wait in sight["requests"]["waits"]]
    assert len(waits) == 3 and all(0 <= in_queue < whole < 30 for in_queue, whole in waits)
    assert not any(sight["requests"]["gaps"]["num"] for sight in seen), "nobody reads along"


def test_a_watcher_learns_the_times_between_a_streams_tokens(server: Running, client: openai.OpenAI) -> None:
    def num_between() -> float:
        return server.metric("vllm:inter_token_latency_seconds_count")

    before = num_between()
    with watch(server) as socket:
        socket.recv(10)
        began = time.monotonic()
        stream = client.completions.create(
            model="sprout", prompt="Once", max_tokens=40, stream=True, extra_body={"ignore_eos": True}
        )
        assert len(list(stream)) > 1
        spent = time.monotonic() - began
        expected = num_between() - before  # fewer than 39 if the first tokens have come together
        gaps: list[dict[str, Any]] = []
        while sum(gap["num"] for gap in gaps) < expected:
            gaps.append(json.loads(socket.recv(PATIENCE))["requests"]["gaps"])
    assert sum(gap["num"] for gap in gaps) == expected and 0 < expected <= 39
    assert 0 < sum(gap["sum"] for gap in gaps) < spent
    assert max(gap["longest"] for gap in gaps) >= sum(gap["sum"] for gap in gaps) / expected


def test_times_between_tokens_that_come_together_first_are_not_known() -> None:
    llm: Any = SimpleNamespace(watch=lambda _: None, view=lambda _: None, stats_per_engine=[None])
    viewers = Viewers(llm)
    with viewers.watching() as watcher:
        viewers.begins(make_request("a", 5))
        viewers.advances(SeqUpdate("a", [1, 2], num_steps=2), None)
        viewers.advances(SeqUpdate("a", [3, 4, 5], num_steps=3), FinishReason.LENGTH)
        viewers.show(0, sight(random.Random(0), 0).frame)
        told = json.loads(asyncio.run(watcher.get()))["requests"]
        assert told["gaps"]["num"] == 3 and len(told["waits"]) == 1 and told["num_failed"] == 0
        for _ in range(2):
            viewers.advances(SeqUpdate("b"), FinishReason.ERROR)
            viewers.show(0, sight(random.Random(0), 0).frame)
        assert json.loads(asyncio.run(watcher.get()))["requests"]["num_failed"] == 2, "all, since the start"


def test_each_adapter_has_its_requests() -> None:
    """Those under way, and those that have ended, also while nobody watched."""
    llm: Any = SimpleNamespace(watch=lambda _: None, view=lambda _: None, stats_per_engine=[None])
    served = {"mine": 1, "idle": 2}
    viewers = Viewers(llm, served)

    def told() -> list[list[object]]:
        with viewers.watching() as watcher:
            viewers.show(0, sight(random.Random(0), 0).frame)
            return json.loads(asyncio.run(watcher.get()))["requests"]["adapters"]

    for name in ("mine", "gone"):
        lora = AdapterRef(name, "/folder", "1").encode()
        for number in range(2):
            viewers.begins(replace(make_request(f"{name}{number}", 5), lora=lora))
    viewers.begins(make_request("plain", 5))
    assert told() == [["mine", 2, 0], ["idle", 0, 0], ["gone", 2, 0]]
    for name in ("mine0", "gone0", "gone1", "plain"):
        viewers.advances(SeqUpdate(name, [1]), None)
        viewers.advances(SeqUpdate(name, [1]), FinishReason.STOP)
    assert told() == [["mine", 1, 1], ["idle", 0, 0]], "what is not served and has no request is not shown"
    del served["mine"]
    assert told() == [["idle", 0, 0], ["mine", 1, 1]]


def test_frames_come_no_more_than_twenty_times_a_second(server: Running, client: openai.OpenAI) -> None:
    with watch(server) as socket:
        first = json.loads(socket.recv(PATIENCE))
        load = threading.Thread(target=ask, args=(client,), kwargs={"n": 4})
        load.start()
        seen = [first, *sights(socket, 160, first["stats"]["num_sampled_tokens"])]
        load.join()
    seconds = [sight["frame"]["seconds"] for sight in seen]
    gaps = [later - earlier for earlier, later in zip(seconds, seconds[1:], strict=False)]
    assert gaps and min(gaps) >= 0.05


def test_a_second_watcher_has_both_begin_anew(server: Running) -> None:
    with watch(server) as one:
        assert json.loads(one.recv(10))["frame"]["is_first"]
        with watch(server) as other:
            assert json.loads(other.recv(10))["frame"]["is_first"]
            assert json.loads(one.recv(10))["frame"]["is_first"]


def test_no_page_of_another_host_may_watch(server: Running) -> None:
    with pytest.raises(InvalidStatus) as refused:
        watch(server, origin=Origin("http://evil.example"))
    assert refused.value.response.status_code == 403
    with watch(server, origin=Origin(server.url)) as socket:
        assert socket.recv(10)


def test_a_watcher_that_stands_still_holds_up_nobody(server: Running, client: openai.OpenAI) -> None:
    with watch(server, max_queue=1, close_timeout=1) as slow:  # it would wait ten seconds to read the end
        ask(client, n=4)
        time.sleep(0.2)
        with watch(server) as other:
            assert json.loads(other.recv(10))["frame"]["is_first"]
        assert slow.recv(10)


def test_no_more_than_sixteen_watch(server: Running) -> None:
    with ExitStack() as stack:
        for _ in range(16):
            stack.enter_context(watch(server)).recv(10)
        with watch(server) as late, pytest.raises(ConnectionClosed) as closed:
            late.recv(10)
        assert closed.value.rcvd is not None
        assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1013, "16 watch already")
    with watch(server) as later:
        assert later.recv(10)


def sight(rng: random.Random, number: int, *, is_first: bool = False) -> Sight:
    views = {rng.randrange(20): [rng.randrange(-1, 3), 1, 0] for _ in range(rng.randrange(5))}
    frame = Frame(
        is_first=is_first, seconds=number, block_size=16, num_pages=20, max_num_tokens=64,
        num_running=number, num_waiting=0, running=[], waiting=[],
        steps=[StepView(number, [0, 1, 0, 1] * 200, 200, 0.01)],
        pages=[each for page, view in views.items() for each in (page, *view)],
    )  # fmt: skip
    requests = Requests(number, [Wait(0.0, float(number))], Gaps(1, 0.5, float(number)))
    return Sight(0, 1, cast(EngineStats, None), requests, frame)


def owners(messages: Iterable[bytes]) -> dict[int, list[int]]:
    """What who reads all these messages knows of each page."""
    known: dict[int, list[int]] = {}
    for message in messages:
        frame = json.loads(message)["frame"]
        if frame["is_first"]:
            known.clear()
        flat = frame["pages"]
        known.update({flat[i]: flat[i + 1 : i + 4] for i in range(0, len(flat), 4)})
    return known


@pytest.mark.parametrize("seed", range(8))
def test_who_reads_too_slowly_learns_the_same_from_fewer_messages(seed: int) -> None:
    rng = random.Random(seed)
    sights = [sight(rng, i, is_first=i in (0, rng.randrange(1, 40))) for i in range(40)]
    written = [encode(each) for each in sights]

    async def read_some() -> list[bytes]:
        watcher, read = Watcher(), list[bytes]()
        for each, message in zip(sights, written, strict=True):
            watcher.put(each, message)
            if rng.random() < 0.2:
                read.append(await watcher.get())
        watcher.put(sights[-1], written[-1])
        return [*read, await watcher.get()]

    read = asyncio.run(read_some())
    assert len(read) < 20 and owners(read) == owners(written)
    last = json.loads(read[-1])
    assert last["frame"]["num_running"] == 39
    assert len(last["frame"]["steps"]) <= 2, "rows are bounded"
    told = [json.loads(message)["requests"] for message in read]
    assert {wait for each in told for _, wait in each["waits"]} == set(range(40))
    assert sum(each["gaps"]["num"] for each in told) == 41 and told[-1]["num_failed"] == 39
    assert max(each["gaps"]["longest"] for each in told) == 39


def end_of(socket: Connection) -> tuple[int, str]:
    """How the server closes a websocket, and why."""
    with pytest.raises(ConnectionClosed) as closed:
        while True:
            socket.recv(10)
    assert closed.value.rcvd is not None
    return closed.value.rcvd.code, closed.value.rcvd.reason


def test_a_key_is_needed_where_keys_are_and_a_death_is_told(nursery: Nursery) -> None:
    with running("--api-key", "schluessel+/", "--restart", forks=nursery) as server:
        for key in (None, "", "wrong"):
            with pytest.raises((InvalidStatus, ConnectionClosed)):
                watch(server, key=key)
        with watch(server, key="schluessel+/") as socket:
            assert socket.recv(10)
            server.engine.kill()
            assert end_of(socket) == (1011, "engine 0 has died (exit code -9)")
        with watch(server, key="schluessel+/") as again:  # as the page does
            assert end_of(again) == (1011, "engine 0 has died (exit code -9)")
        eventually(lambda: httpx.get(f"{server.url}/health").status_code == 200, 60)
        with watch(server, key="schluessel+/") as socket:
            assert json.loads(socket.recv(10))["frame"]["is_first"]
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(10) == 0, "who watches does not hold the server up"
