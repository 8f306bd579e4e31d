"""Requests that are wrong as a whole, or far too large: each is refused quickly, in a sentence that helps."""

from __future__ import annotations

import socket
import time
from urllib.parse import urlsplit

import httpx
import pytest

from pellucid.server.listener import bind, listen
from pellucid.server.options import ServeOptions
from tests.server.conftest import Running

JSON = {"Content-Type": "application/json"}


def ask(server: Running, content: bytes, headers: dict[str, str] = JSON) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", content=content, headers=headers, timeout=60)


@pytest.mark.parametrize(
    ("content", "headers", "message"),
    [
        (b"", JSON, "the request has no body, must have JSON"),
        (b'{"prompt": }', JSON, "the body is no JSON: Expecting value at character 11"),
        (b"[]", JSON, "the body is no JSON object"),
        (b'{"prompt": "a"}', {}, "send JSON, with the header 'Content-Type: application/json'"),
        (b'{"prompt": "a"}', {"Content-Type": "text/plain"}, "the body is of type 'text/plain'"),
    ],
)
def test_a_body_that_is_no_request_is_told_why(
    server: Running, content: bytes, headers: dict[str, str], message: str
) -> None:
    reply = ask(server, content, headers)
    assert reply.status_code == 400 and message in reply.json()["error"]["message"]


def test_a_text_far_too_long_is_refused_before_it_is_tokenized(server: Running) -> None:
    began = time.monotonic()
    reply = ask(server, b'{"prompt": "%b"}' % (b"a" * 5_000_000))
    assert time.monotonic() - began < 5
    error = reply.json()["error"]
    assert (
        error["param"] == "prompt" and "5,000,000 characters, which are more than 4,096 t" in error["message"]
    )


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_long_stop_strings_and_bad_words_are_refused(server: Running, name: str) -> None:
    reply = ask(server, b'{"prompt": "a", "%b": ["%b"]}' % (name.encode(), b"a" * 5_000_000))
    error = reply.json()["error"]
    assert error["param"] == name and "5,000,000 characters, at most 1,000" in error["message"]


def test_an_error_quotes_no_more_than_a_page(server: Running) -> None:
    reply = ask(server, b'{"prompt": "a", "model": "%b"}' % (b"x" * 1_000_000))
    assert reply.status_code == 404 and len(reply.content) < 5000


def test_a_head_does_not_grow_without_end(server: Running) -> None:
    url = urlsplit(server.url)
    with socket.create_connection((url.hostname, url.port), timeout=10) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nX: ")
        with pytest.raises(OSError):
            for _ in range(1000):
                client.sendall(b"a" * 100_000)
    usual = httpx.get(f"{server.url}/health", headers={"X": "a" * 30_000})
    assert usual.status_code == 200


def test_only_one_of_two_that_took_an_address_may_listen() -> None:
    options = ServeOptions(port=0)
    first = bind(options)
    options = ServeOptions(port=first.getsockname()[1])
    with first, bind(options) as second:
        listen(first, options, 5)
        with pytest.raises(ValueError, match="cannot listen on 127.0.0.1 port .*; choose another --port"):
            listen(second, options, 5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("api_key", ("",)),
        ("served_model_name", ("",)),
        ("ssl_certfile", __file__),
        ("ssl_keyfile", __file__),
        ("host", ""),
        ("max_logprobs", -1),
        ("drain_seconds", float("nan")),
        ("max_body_mib", float("nan")),
    ],
)
def test_options_that_make_no_server_are_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        ServeOptions(**{name: value})  # type: ignore[arg-type]
