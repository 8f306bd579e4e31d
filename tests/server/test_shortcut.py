"""The short way takes all JSON, and says what is wrong with it; all else goes the framework's way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from pellucid.sampling_params import SamplingParams
from pellucid.server.errors import ApiError
from pellucid.server.options import ServeOptions
from pellucid.server.preprocess import Preprocessor
from pellucid.server.protocol.openai import DetokenizeRequest
from pellucid.server.renderer import ModelFacts, Renderer
from pellucid.server.route import Route
from pellucid.server.shortcut import Shortcut

JSON = b"application/json"


def prepare(body: DetokenizeRequest, renderer: Renderer) -> list[int]:
    if 0 in body.tokens:
        raise ApiError(404, "there is no 0", param="tokens")
    return body.tokens


async def answer(work: list[int], request: Request) -> Response:
    return PlainTextResponse(f"the short way: {work}")


ROUTES = {"/in": Route(DetokenizeRequest, prepare, answer, needs_engine=False)}
FACTS = ModelFacts(
    names=("m",), options=ServeOptions(), tokenizer_path=None, vocab_size=9, max_model_len=9,
    defaults=SamplingParams(),
)  # fmt: skip


def shortcut() -> Shortcut:
    return Shortcut(long_way, ROUTES, Preprocessor(Renderer(FACTS, None)))


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

    asyncio.run(shortcut()(scope, receive, send))
    return messages[0]["status"], b"".join([message.get("body", b"") for message in messages])


@pytest.mark.parametrize("kind", [JSON, b"Application/JSON; charset=utf-8", b"application/a+json"])
@pytest.mark.parametrize("root", ["", "/behind/a/proxy"])
def test_what_is_as_described_takes_the_short_way(kind: bytes, root: str) -> None:
    assert sent([b'{"tokens"', b": [1, 2]}"], kind=kind, root=root) == (200, b"the short way: [1, 2]")


@pytest.mark.parametrize(
    "parts,message",
    [
        ([b'{"tokens": ["a"]}'], "tokens.0: Input should be a valid integer"),
        ([b'{"tok', b'ens": [1}'], "the body is no JSON: Expecting ',' delimiter at character 13"),
        ([b""], "the request has no body, must have JSON"),
        ([b"[]"], "the body is no JSON object"),
        ([b'{"tokens": "\xff"}'], "the body is no JSON: it is not in UTF-8"),
        ([b"[" * 1000], "the body is nested too deeply"),
        ([b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}"], "the body is nested too deeply"),
        ([b'{"request_id": "\\ud800"}'], "the body has half of a character"),
        ([b'{"request_id": "\xed\xa0\x80"}'], "the body has half of a character"),
    ],
)
def test_what_is_not_as_described_is_told_why(parts: list[bytes], message: str) -> None:
    status, text = sent(parts)
    assert status == 400 and message in text.decode()


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
    asyncio.run(shortcut()(scope, gone, send))
