"""The short way takes what is as described; all else goes the framework's way, and finds its body whole."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from pellucid.server.errors import ApiError
from pellucid.server.protocol.openai import DetokenizeRequest
from pellucid.server.shortcut import Route, Shortcut

JSON = b"application/json"


async def answer(body: DetokenizeRequest, request: Request) -> Response:
    if 0 in body.tokens:
        raise ApiError(404, "there is no 0", param="tokens")
    return PlainTextResponse(f"the short way: {body.tokens}")


async def long_way(scope: Scope, receive: Receive, send: Send) -> None:
    body = await Request(scope, receive).body()
    await PlainTextResponse(b"the long way: " + body)(scope, receive, send)


def sent(
    parts: list[bytes], *, method: str = "POST", path: str = "/in", kind: bytes = JSON, root: str = ""
) -> tuple[int, bytes]:
    """Status and body of the response to a request whose body comes in parts."""
    scope: dict[str, Any] = {
        "type": "http", "method": method, "path": root + path, "root_path": root, "query_string": b"",
        "headers": [(b"host", b"here"), (b"content-type", kind)], "app": FastAPI(), "server": ("here", 80),
        "scheme": "http",
    }  # fmt: skip
    coming: list[Message] = [
        {"type": "http.request", "body": part, "more_body": i < len(parts) - 1}
        for i, part in enumerate(parts)
    ]
    messages: list[Message] = []

    async def receive() -> Message:
        if coming and coming[0]["body"] == b"too large":
            raise HTTPException(413, "it is too large")
        return coming.pop(0) if coming else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        messages.append(message)

    asyncio.run(Shortcut(long_way, {"/in": Route(DetokenizeRequest, answer)})(scope, receive, send))
    return messages[0]["status"], b"".join([message.get("body", b"") for message in messages])


@pytest.mark.parametrize("kind", [JSON, b"Application/JSON; charset=utf-8"])
@pytest.mark.parametrize("root", ["", "/behind/a/proxy"])
def test_what_is_as_described_takes_the_short_way(kind: bytes, root: str) -> None:
    assert sent([b'{"tokens"', b": [1, 2]}"], kind=kind, root=root) == (200, b"the short way: [1, 2]")


@pytest.mark.parametrize(
    "parts", [[b'{"tokens": ["a"]}'], [b'{"tok', b'ens": [1}'], [b""], [b"\xff\xfe"], [b"[" * 1000]]
)
def test_what_is_not_goes_the_long_way_with_its_body(parts: list[bytes]) -> None:
    assert sent(parts) == (200, b"the long way: " + b"".join(parts))


def test_other_requests_are_let_pass() -> None:
    body = [b'{"tokens": [1]}']
    for other in ({"method": "GET"}, {"path": "/else"}, {"kind": b"text/plain"}):
        assert sent(body, **other) == (200, b'the long way: {"tokens": [1]}')  # type: ignore[arg-type]


def test_refusals_have_the_form_of_all_errors() -> None:
    status, text = sent([b'{"tokens": [0]}'])
    assert status == 404 and b'"message":"there is no 0"' in text and b'"param":"tokens"' in text
    status, text = sent([b'{"tok', b"too large"])
    assert status == 413 and b'"message":"POST /in: it is too large"' in text


def test_a_client_that_goes_away_before_its_request_is_whole_is_not_answered() -> None:
    async def gone() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        raise AssertionError(message)

    scope = {"type": "http", "method": "POST", "path": "/in", "headers": [(b"content-type", JSON)]}
    asyncio.run(Shortcut(long_way, {"/in": Route(DetokenizeRequest, answer)})(scope, gone, send))
