"""Whom the guard takes a request to be from; what it refuses is tested on running servers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import HTTPConnection
from starlette.types import Receive, Scope, Send

from pellucid.server.context import client_of
from pellucid.server.guard import Guard
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
    asyncio.run(Guard(app, server, keys)(scope, never, never))
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
