"""Requests that are wrong as a whole, or far too large: each is refused quickly, in a sentence that helps."""

from __future__ import annotations

import base64
import gzip
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin, Subprotocol

from pellucid.server.errors import install_error_handlers
from pellucid.server.hosts import make_host_check
from pellucid.server.listener import bind, listen
from pellucid.server.options import ServeOptions
from tests.forked import Nursery
from tests.patience import PATIENCE, cpu_seconds
from tests.server.conftest import Running, running

JSON = {"Content-Type": "application/json"}


def ask(server: Running, content: bytes, headers: dict[str, str] = JSON) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", content=content, headers=headers, timeout=PATIENCE)


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


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_request_that_contradicts_itself_is_told_so(server: Running, is_streamed: bool) -> None:
    """It shows when the first token is chosen, and is no fault of the server's."""
    wish = {"allowed_token_ids": [1, 2, 3], "structured_outputs": {"regex": "a+"}, "stream": is_streamed}
    content = json.dumps({"prompt": "a", "max_tokens": 3, **wish}).encode()
    answer = ask(server, content)
    assert answer.status_code == (200 if is_streamed else 400)
    error = json.loads(answer.text.removeprefix("data: ").split("\n\n")[0])["error"]
    assert (error["code"], error["type"]) == (400, "BadRequestError")
    assert error["message"].startswith("no token is left that may come next")


@pytest.mark.parametrize("thought", [7, True, "text", {"text": "a"}])
def test_a_thought_in_a_history_has_parts(server: Running, thought: object) -> None:
    body = {"input": [{"role": "user", "content": "a"}, {"type": "reasoning", "content": thought}]}
    answer = httpx.post(f"{server.url}/v1/responses", json=body, timeout=PATIENCE)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "input has at 1 a content that is no list of parts"


def test_who_was_failed_by_a_bug_does_not_ask_on_the_same_line() -> None:
    """For the line is closed then, and says so."""
    app = FastAPI()
    install_error_handlers(app)

    @app.get("/bug")
    async def bug() -> None:
        raise AssertionError("a bug")

    answer = TestClient(app, raise_server_exceptions=False).get("/bug")
    assert answer.status_code == 500 and answer.headers["Connection"] == "close"


def test_a_compressed_body_is_told_so(server: Running) -> None:
    reply = ask(server, gzip.compress(b'{"prompt": "a"}'), {**JSON, "Content-Encoding": "gzip"})
    assert reply.status_code == 415 and "send it as it is" in reply.json()["error"]["message"]


def test_a_text_far_too_long_is_refused_before_it_is_tokenized(server: Running) -> None:
    owner = psutil.Process(server.process.pid)
    family = [owner, *owner.children(recursive=True)]
    began = cpu_seconds(family)
    reply = ask(server, b'{"prompt": "%b"}' % (b"a" * 5_000_000))
    spent = cpu_seconds(family) - began
    assert spent < 1, f"{spent} s; to tokenize it takes 2"
    error = reply.json()["error"]
    told = "contains at least 4097 input tokens, as it has 5,000,000 characters"
    assert error["param"] == "prompt" and told in error["message"]


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_long_stop_strings_and_bad_words_are_refused(server: Running, name: str) -> None:
    reply = ask(server, b'{"prompt": "a", "%b": ["%b"]}' % (name.encode(), b"a" * 5_000_000))
    error = reply.json()["error"]
    assert error["param"] == name and "5,000,000 characters, at most 1,000" in error["message"]


def longest_silence(server: Running, content: bytes) -> tuple[int, float]:
    """The status of a request, and how long the server says nothing to others because of it.

    In seconds of its processors' time: on a busy machine a server may be silent because others run.
    """
    reply: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: reply.append(ask(server, content)))
    owner = psutil.Process(server.process.pid)
    family = [owner, *owner.children(recursive=True)]
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as other:
        other.get("/ping")
        thread.start()
        longest = 0.0
        while thread.is_alive():
            began = cpu_seconds(family)
            other.get("/ping")
            longest = max(longest, cpu_seconds(family) - began)
    return reply[0].status_code, longest


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b'{"prompt": "a", "x": [%b]}' % b",".join([b"[[]]"] * 1_500_000), 413),
        (b'{"prompt": [%b]}' % b",".join([b'"a"'] * 1_500_000), 400),
        (b'{"prompt": "a", "stop": [%b]}' % b",".join([b'"a"'] * 1_500_000), 400),
        (b'{"prompt": "a", "allowed_token_ids": [%b]}' % b",".join([b"7"] * 3_000_000), 400),
        (b'{"prompt": [%b]}' % b",".join([b"1234"] * 1_500_000), 400),
    ],
)
def test_a_body_of_many_parts_does_not_hold_up_others(server: Running, content: bytes, status: int) -> None:
    found, silence = longest_silence(server, content)
    assert found == status and silence < 1, (found, silence)


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


@pytest.mark.parametrize("size,num_parts", [(270_000, 1), (2_000, 200), (400_000, 1)])
def test_a_head_that_comes_whole_is_measured_too(server: Running, size: int, num_parts: int) -> None:
    headers = b"".join(b"X-%d: %b\r\n" % (i, b"a" * size) for i in range(num_parts))
    reply = reply_to(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + headers + b"\r\n")
    assert b" 400 " in reply and b"application/json" in reply
    assert b'"message":"the request\'s head is larger than 262,144 bytes"' in reply


def test_what_is_no_http_is_told_in_json(server: Running) -> None:
    reply = reply_to(server, b"HELLO\r\n\r\n")
    assert b" 400 " in reply and b'{"error":{"message":"Invalid HTTP request received."' in reply


def test_a_request_has_one_host(server: Running) -> None:
    reply = reply_to(
        server, b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    )
    assert b" 400 " in reply and b"2 headers Host" in reply


OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAA\r\n"
PROMPT = b'{"prompt": "a", "max_tokens": 1}'
WHOLE = b"Content-Length: %d\r\n\r\n%b" % (len(PROMPT), PROMPT)
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(PROMPT), PROMPT)


@pytest.mark.parametrize("body", [WHOLE, CHUNKED])
@pytest.mark.parametrize("size", [1, 150, 10_000])
def test_who_offers_http2_is_answered_in_http1(server: Running, body: bytes, size: int) -> None:
    """As Java's own client does, and with it Spring AI and LangChain4j."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    last = b"GET /ping HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    said = head + OFFER + body + head + body + last
    url = urlsplit(server.url)
    with socket.create_connection((url.hostname, url.port), timeout=10) as client:
        for start in range(0, len(said), size):
            client.sendall(said[start : start + size])
        answers = b"".join(iter(lambda: client.recv(4096), b""))
    assert answers.count(b"HTTP/1.1 200 OK") == 3 and answers.count(b'"completion_tokens":1') == 2, answers


def test_other_offers_change_nothing(server: Running) -> None:
    offer = {"Connection": "Upgrade", "Upgrade": "foo"}
    assert httpx.get(f"{server.url}/ping", headers=offer).status_code == 200
    assert httpx.request("CONNECT", f"{server.url}/ping", headers=offer).status_code >= 400


@pytest.fixture(scope="module")
def hasty(nursery: Nursery) -> Iterator[Running]:
    options = [
        "--request-seconds",
        "0.5",
        "--root-path",
        "/llm",
        "--api-key",
        "k",
        "--allowed-hosts",
        "a.org",
    ]
    with running(*options, forks=nursery) as server:
        yield server


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer k\r\n"
BODY = b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n"


def reply_to(server: Running, *parts: bytes, seconds: float = 5) -> bytes:
    """What comes back, up to the end of the connection, from a client that says so much and no more."""
    url = urlsplit(server.url)
    with socket.create_connection((url.hostname, url.port), timeout=seconds) as client:
        for part in parts:
            client.sendall(part)
            time.sleep(0.1)
        return b"".join(iter(lambda: client.recv(4096), b""))


@pytest.mark.parametrize(
    "parts,reply",
    [
        ((), b""),
        ((b"POST",), b"408 Request Timeout"),
        ((HEAD,), b"408 Request Timeout"),
        ((HEAD + BODY,), b"408 Request Timeout"),
        ((HEAD + BODY, b'{"prompt": "'), b"408 Request Timeout"),
        ((b"POST /nowhere HTTP/1.1\r\nAuthorization: Bearer k\r\n" + BODY, b"x"), b"404 Not Found"),
        ((b"GET /health HTTP/1.1\r\n\r\n", b"\r\n"), b"200 OK"),
        ((b"GET /health HTTP/1.1\r\n\r\n", b"GET"), b"408 Request Timeout"),
    ],
)
def test_half_a_request_holds_no_connection(hasty: Running, parts: tuple[bytes, ...], reply: bytes) -> None:
    for _ in range(3):  # what holds one does so each time, a busy machine now and then
        began = time.monotonic()
        answer = reply_to(hasty, *parts, seconds=PATIENCE)
        if time.monotonic() - began < 2:
            break
    else:
        raise AssertionError("it is held for longer than --request-seconds")
    assert reply in answer and (b"408" not in reply or b"--request-seconds" in answer), answer


def test_an_answer_may_take_longer_than_its_request(hasty: Running) -> None:
    body = b'{"prompt": "Once", "max_tokens": 600, "ignore_eos": true, "stream": true}'
    head = HEAD + b"Content-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    began = time.monotonic()
    assert b'"finish_reason":"length"' in reply_to(hasty, head % len(body) + body, seconds=30)
    assert time.monotonic() - began > 0.5


def test_a_watcher_is_no_request_that_never_ends(hasty: Running) -> None:
    url, key = hasty.url.replace("http", "ws"), base64.urlsafe_b64encode(b"k").decode().rstrip("=")
    with connect(f"{url}/xray", subprotocols=[Subprotocol(f"key.{key}")], max_size=None) as watcher:
        assert watcher.recv(5)
        time.sleep(1)
        assert watcher.ping().wait(5)


def test_behind_a_proxys_path_the_same_is_open(hasty: Running) -> None:
    assert httpx.get(f"{hasty.url}/health").status_code == 200
    assert httpx.post(f"{hasty.url}/v1/messages").json()["type"] == "error"


@pytest.mark.parametrize(
    "host,is_welcome",
    [
        ("evil.example", False),
        ("evil.example:8000", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("localhost:1234", True),
        ("LOCALHOST.", True),
        ("app.localhost", True),
        ("host.docker.internal:8000", True),
        (socket.gethostname(), True),
        ("127.0.0.1", True),
        ("[::1]:8000", True),
        ("192.168.1.5:8000", True),
        ("", True),
    ],
)
def test_a_name_that_was_bent_to_this_machine_is_refused(
    server: Running, host: str, is_welcome: bool
) -> None:
    for path in ("/health", "/v1/models", "/"):
        reply = httpx.get(server.url + path, headers={"Host": host})
        assert (reply.status_code == 200) == is_welcome
        assert is_welcome or reply.status_code == 403
        assert is_welcome or "--allowed-hosts" in reply.json()["error"]["message"]


def test_a_watcher_cannot_use_a_bent_name(server: Running) -> None:
    url = urlsplit(server.url)
    bent = f"evil.example:{url.port}"
    with (
        socket.create_connection((url.hostname, url.port)) as line,
        pytest.raises(InvalidStatus) as refused,
    ):
        connect(f"ws://{bent}/xray", sock=line, origin=Origin(f"http://{bent}"))
    assert refused.value.response.status_code == 403


@pytest.mark.parametrize(
    "options,host,is_welcome",
    [
        ({"allowed_hosts": ("a.org",)}, "a.org:80", True),
        ({"allowed_hosts": ("a.org",)}, "b.org", False),
        ({"allowed_hosts": ("a.org:8000", "::1")}, "a.org", True),
        ({"allowed_hosts": ("*",)}, "b.org", True),
        ({"allowed_origins": ("https://a.org",)}, "a.org", True),
        ({"allowed_origins": ("https://a.org",)}, "b.org", False),
        ({"allowed_origins": ("*",)}, "b.org", True),
        ({"host": "0.0.0.0"}, "b.org", True),
        ({"host": "0.0.0.0", "allowed_hosts": ("a.org",)}, "b.org", False),
        ({"host": "::1"}, "b.org", False),
        ({"host": "localhost"}, "b.org", False),
    ],
)
def test_hosts_can_be_named(options: dict[str, Any], host: str, is_welcome: bool) -> None:
    assert make_host_check(ServeOptions(**options))(host) == is_welcome


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
        ("api_key", ("good", "schlüssel")),
        ("api_key", ("a key",)),
        ("served_model_name", ("",)),
        ("ssl_certfile", __file__),
        ("ssl_keyfile", __file__),
        ("host", ""),
        ("max_logprobs", -1),
        ("drain_seconds", float("nan")),
        ("request_seconds", 0),
        ("allowed_hosts", ("",)),
        ("max_body_mib", float("nan")),
    ],
)
def test_options_that_make_no_server_are_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        ServeOptions(**{name: value})  # type: ignore[arg-type]
