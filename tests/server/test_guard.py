"""Whom the guard takes a request to be from; what it refuses is tested on running servers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.requests import HTTPConnection
from starlette.types import Message, Receive, Scope, Send

from pellucid.server.context import client_of
from pellucid.server.errors import ApiError
from pellucid.server.guard import Guard, go_on_counting
from pellucid.server.keys import Key, Keys, read_keys
from pellucid.server.options import ServeOptions

FIRST = {"authorization": "Bearer first"}


def client(keys: list[str], host: str, headers: dict[str, str]) -> str:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(client_of(HTTPConnection(scope)))

    server: Any = SimpleNamespace(options=ServeOptions(), is_draining=False, num_requests=0)
    raw = [(name.encode(), value.encode()) for name, value in {"host": "localhost", **headers}.items()]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": raw, "client": (host, 1)}
    never: Any = None
    known = Keys([Key(f"key {i}", key.encode()) for i, key in enumerate(keys)])
    asyncio.run(Guard(app, server, known)(scope, never, never))
    return seen[0]


def test_clients_are_told_apart_by_address_and_by_keys_that_are_right() -> None:
    keys = ["first", "second"]
    first = client(keys, "a", FIRST)
    assert first == client(keys, "a", {"x-api-key": "first"})
    assert len({first, client(keys, "b", FIRST), client(keys, "a", {"x-api-key": "second"})}) == 3
    assert "first" not in first, "a key is nobody else's to see"


@pytest.mark.parametrize("headers", [FIRST, {"x-api-key": "other"}, {}])
def test_where_no_keys_are_needed_none_makes_another_client(headers: dict[str, str]) -> None:
    assert client([], "a", headers) == client([], "a", {})


def test_a_key_may_have_limits() -> None:
    now = [0.0]
    key = Key("alice", b"a", max_requests=1, requests_per_minute=2)
    keys = Keys([key], clock=lambda: now[0])
    with keys.counted(key), pytest.raises(ApiError, match="max_requests is 1"), keys.counted(key):
        pass
    with keys.counted(key):
        pass
    now[0] = 20.0
    with pytest.raises(ApiError, match="2 requests a minute; the next in 40 s") as refused, keys.counted(key):
        pass
    assert refused.value.status == 429 and key.num_under_way == 0
    now[0] = 60.0
    with keys.counted(key):
        pass


@pytest.mark.parametrize("method,most", [("POST", 1), ("GET", 2)])
def test_what_a_key_has_under_way_is_counted_on_the_way_to_routes(method: str, most: int) -> None:
    """Of what is work: one more has a 429, and another key's has not."""
    under_way, statuses = [0], list[int]()
    mine, other = Key("alice", b"first", max_requests=1), Key("bob", b"second")
    server: Any = SimpleNamespace(options=ServeOptions(), is_draining=False, num_requests=0)

    async def send(message: Message) -> None:
        statuses.extend([message["status"]] if "status" in message else [])

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        under_way[0] += 1
        if under_way[0] == 1:  # within it, one more of each key
            await ask(FIRST)
            await ask({"authorization": "Bearer second"})

    guard = Guard(app, server, Keys([mine, other]))

    async def ask(headers: dict[str, str]) -> None:
        raw = [(name.encode(), value.encode()) for name, value in {"host": "localhost", **headers}.items()]
        scope = {"type": "http", "method": method, "path": "/v1/models", "headers": raw, "client": ("a", 1)}
        never: Any = None
        await guard(scope, never, send)

    asyncio.run(ask(FIRST))
    assert under_way == [most + 1] and statuses == [429] * (2 - most)
    assert mine.num_under_way == other.num_under_way == server.num_requests == 0


def test_while_a_server_drains_nothing_reaches_a_route() -> None:
    """Also on a connection from before."""
    statuses, never = list[int](), cast(Any, None)
    server: Any = SimpleNamespace(options=ServeOptions(), is_draining=True, num_requests=0)

    async def send(message: Message) -> None:
        statuses.extend([message["status"]] if "status" in message else [])

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("it is answered")

    headers = [(b"host", b"localhost")]
    for method, path in (("POST", "/v1/completions"), ("GET", "/health")):
        scope = {"type": "http", "method": method, "path": path, "headers": headers, "client": ("a", 1)}
        asyncio.run(Guard(app, server, Keys([]))(scope, never, send))
    assert statuses == [503, 503]


def test_what_goes_on_in_the_background_is_under_way_for_its_key() -> None:
    key, done = Key("alice", b"first", max_requests=1), asyncio.Event()
    server: Any = SimpleNamespace(options=ServeOptions(), is_draining=False, num_requests=0)

    async def ends() -> None:
        await done.wait()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.create_task(ends())
        go_on_counting(scope, task, server)
        begun.append(task)

    begun, never = list[asyncio.Task[None]](), cast(Any, None)
    headers = [(b"host", b"localhost"), (b"authorization", b"Bearer first")]
    scope = {
        "type": "http", "method": "POST", "path": "/v1/responses", "headers": headers, "client": ("a", 1)
    }  # fmt: skip

    async def run() -> None:
        await Guard(app, server, Keys([key]))(scope, never, never)
        assert key.num_under_way == server.num_requests == 1
        done.set()
        await begun[0]
        await asyncio.sleep(0)
        assert key.num_under_way == server.num_requests == 0

    asyncio.run(run())


def test_keys_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("alice: {key: secret, max_requests: 2}\nbob: other\n")
    alice, bob = read_keys(str(file))
    assert (alice.name, alice.secret, alice.max_requests, bob.secret) == ("alice", b"secret", 2, b"other")
    for text, message in [
        ("", "has no keys"),
        ("alice: {max_requests: 2}", "alice has no `key`"),
        ("alice: {key: a, max: 2}", "alice has 'max'"),
        ("alice: {key: a, max_requests: 0}", "max_requests 0, must be at least 1"),
        ("alice: {key: 'ä'}", "no header brings"),
        ("a: [", "api_key_file"),
    ]:
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_keys(str(file))
