"""While a large request is made ready, everybody else is served as if there were none."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from pellucid.sampling_params import SamplingParams
from pellucid.server.errors import SHUTTING_DOWN, ApiError
from pellucid.server.options import ServeOptions
from pellucid.server.preprocess import Preprocessor
from pellucid.server.reader import MAX_AT_ONCE
from pellucid.server.renderer import ModelFacts, Renderer
from tests.patience import PATIENCE
from tests.server.conftest import Running, eventually

JSON = {"Content-Type": "application/json"}
MOST_SECONDS = 0.25
NUM_TRIES = 3  # what holds up others does so each time, a busy machine now and then
BUSY = [sys.executable, "-c", "while True: pass"]
LINES = "the quick brown fox jumps.\nOver 12 dogs, it said! "
WORDS = [str(i) + " some words" * 30 for i in range(64)]
CHAT = {"role": "user", "content": "a"}
FACTS = ModelFacts(
    names=("m",), options=ServeOptions(), tokenizer_path=None, vocab_size=9, max_model_len=9,
    defaults=SamplingParams(),
)  # fmt: skip


def dumped(**fields: object) -> bytes:
    return json.dumps(fields).encode()


BODIES: dict[str, tuple[str, Callable[[], bytes], int]] = {
    "a text": ("/tokenize", lambda: dumped(prompt=LINES * 40_000), 200),
    "a text without lines": ("/tokenize", lambda: dumped(prompt="the quick " * 200_000), 200),
    "pieces": ("/tokenize", lambda: dumped(prompt=LINES * 20_000, return_token_strs=True), 200),
    "token ids": ("/detokenize", lambda: dumped(tokens=[1234] * 1_000_000), 200),
    "a prompt": ("/v1/completions", lambda: dumped(prompt="ab " * 2_400_000), 400),
    "a prompt of ids": ("/v1/completions", lambda: dumped(prompt=[7] * 1_000_000), 400),
    "fields": ("/v1/completions", lambda: dumped(prompt="a", max_tokens=1, **numbered(400_000)), 200),
    "wrong fields": ("/v1/completions", lambda: dumped(**numbered(400_000)), 400),
    "fields within": ("/v1/chat/completions", lambda: dumped(messages=[CHAT | numbered(100_000)]), 200),
    "messages": ("/v1/chat/completions", lambda: dumped(messages=[CHAT] * 60_000), 400),
    "too many messages": ("/v1/chat/completions", lambda: dumped(messages=[CHAT] * 400_000), 413),
    "others' messages": ("/v1/messages", lambda: dumped(max_tokens=1, messages=[CHAT] * 60_000), 400),
    "a count": ("/v1/messages/count_tokens", lambda: dumped(messages=[CHAT] * 40_000), 200),
    "bad words": ("/v1/completions", lambda: dumped(prompt=["a"] * 500, max_tokens=1, bad_words=WORDS), 200),
    "depth": ("/v1/completions", lambda: b"[" * 200_000, 400),
}


def numbered(number: int) -> dict[str, object]:
    return {f"field{i}": 1 for i in range(number)}


@pytest.mark.parametrize("name", BODIES)
def test_large_requests_hold_up_nobody(server: Running, name: str, in_a_busy_place: float) -> None:
    path, make, status = BODIES[name]
    body, most = make(), max(MOST_SECONDS, 2 * in_a_busy_place)
    silences: list[float] = []
    while not silences or (silences[-1] >= most and len(silences) < NUM_TRIES):
        reply, silence = silence_beside(server, path, body)
        assert reply.status_code == status, reply.text[:500]
        silences.append(silence)
    assert min(silences) < most


@pytest.fixture(scope="module")
def in_a_busy_place(server: Running) -> float:
    """The control: the longest wait beside other programs that are as busy, for seconds of the same kind."""
    assert tokenize(server, dumped(prompt="a " * 100_000)).status_code == 200
    hogs = [subprocess.Popen(["nice", "-n", "5", *BUSY]) for _ in range(2)]
    try:
        with watching(server) as waits:
            time.sleep(4)
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    return max(waits)


def tokenize(server: Running, body: bytes) -> httpx.Response:
    return httpx.post(f"{server.url}/tokenize", content=body, headers=JSON, timeout=60)


def silence_beside(server: Running, path: str, body: bytes) -> tuple[httpx.Response, float]:
    """The reply to a request, and the seconds that anybody else has waited at most for a word meanwhile."""
    with httpx.Client(base_url=server.url, timeout=120) as client, watching(server) as waits:
        reply = client.post(path, content=body, headers=JSON)
    return reply, max(waits)


@contextmanager
def watching(server: Running) -> Generator[list[float], None, None]:
    """Seconds that each question of another client's has taken."""
    waits: list[float] = []
    is_over = threading.Event()

    def watch() -> None:
        with httpx.Client(base_url=server.url, timeout=60) as other:
            while not is_over.is_set():
                began = time.monotonic()
                other.get("/health")
                waits.append(time.monotonic() - began)
                time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    eventually(lambda: bool(waits))
    try:
        yield waits
    finally:
        is_over.set()
        watcher.join()


def test_a_large_request_is_answered_as_a_small_one(server: Running) -> None:
    small = {"prompt": "Once upon a time", "max_tokens": 5, "temperature": 0, "echo": True, "seed": 1}
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "temperature": 0}
    other = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "temperature": 0}
    for path, body in (("/v1/completions", small), ("/v1/chat/completions", chat), ("/v1/messages", other)):
        large = body | {"nobody_knows": "x" * 100_000}
        assert said(server, path, large) == said(server, path, body)


def said(server: Running, path: str, body: dict[str, Any]) -> Any:
    reply = httpx.post(server.url + path, json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    found = reply.json()
    return {name: value for name, value in found.items() if name not in ("id", "created", "usage")}


@pytest.mark.parametrize(
    "path,fields,message",
    [
        ("/v1/completions", {"prompt": "a", "model": "x"}, "the model 'x' does not exist"),
        ("/v1/completions", {"prompt": "a", "temperature": -1}, "temperature is -1.0, must be at least 0"),
        ("/v1/completions", {"prompt": 7}, "prompt: Input should be a valid string"),
        ("/v1/completions", {"prompt": "a", "best_of": 3}, "best_of is not supported"),
        ("/v1/completions", {"prompt": "\ud800"}, "half of a character"),
        (
            "/v1/chat/completions",
            {"messages": [CHAT], "max_completion_tokens": -1},
            "max_completion_tokens is",
        ),
        (
            "/v1/chat/completions",
            {"messages": [CHAT], "response_format": {"type": "json_schema", "x": "a" * 2**20}},
            "response_format has 1,048,6",
        ),
    ],
)
def test_a_large_request_is_refused_as_a_small_one(
    server: Running, path: str, fields: dict[str, Any], message: str
) -> None:
    reply = httpx.post(
        server.url + path, content=dumped(pad="x" * 100_000, **fields), headers=JSON, timeout=60
    )
    assert reply.status_code in (400, 404) and message in reply.json()["error"]["message"]


def test_the_reader_is_replaced_when_it_dies(server: Running) -> None:
    body = dumped(prompt=LINES * 4000)
    assert tokenize(server, body).status_code == 200
    (reader,) = readers(server)
    reader.suspend()
    replies: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: replies.append(tokenize(server, body)))
    asking.start()
    time.sleep(0.5)
    reader.kill()
    asking.join()
    assert replies[0].status_code == 503 and "has died" in replies[0].text
    assert tokenize(server, body).status_code == 200


def readers(server: Running) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children()
    return [child for child in children if "pellucid.server.reader" in " ".join(child.cmdline())]


def test_a_large_request_whose_client_has_gone_is_not_read(server: Running) -> None:
    body = dumped(prompt="a", pad="x" * 200_000)
    assert tokenize(server, body).status_code == 200
    (reader,) = readers(server)
    process, num_abandoned = psutil.Process(server.process.pid), 3 * MAX_AT_ONCE
    num_read = bytes_read(reader)
    reader.suspend()
    try:
        clients = [asking(server, body) for _ in range(num_abandoned)]
        ports = {client.getsockname()[1] for client in clients}
        eventually(lambda: ports <= peers(process))
        time.sleep(0.5)
        for client in clients:
            client.close()
        eventually(lambda: not ports & peers(process))
    finally:
        reader.resume()
    assert tokenize(server, body).status_code == 200
    assert bytes_read(reader) - num_read < (MAX_AT_ONCE + 2) * len(body)


def asking(server: Running, body: bytes) -> socket.socket:
    """A client that has sent a request and has not read the answer."""
    url = httpx.URL(server.url)
    client = socket.create_connection((url.host, url.port))
    head = f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    client.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
    return client


def peers(process: psutil.Process) -> set[int]:
    """The ports of those it is connected with."""
    return {connection.raddr.port for connection in process.net_connections("tcp") if connection.raddr}


def bytes_read(process: psutil.Process) -> int:
    text = Path(f"/proc/{process.pid}/io").read_text()
    return int(text.split("rchar: ")[1].split()[0])


def test_large_requests_are_held_up_to_a_limit() -> None:
    asyncio.run(in_turn(Preprocessor(Renderer(FACTS, None), max_large_bytes=100)))


async def in_turn(preprocessor: Preprocessor) -> None:
    first = asyncio.create_task(preprocessor.read("/detokenize", b"x" * 60))
    await asyncio.sleep(0)
    assert await refused(preprocessor, 60) == (
        503,
        "large requests of 60 bytes are read or wait for it, this one has 60, at most 100 are taken; "
        "try again later",
    )
    assert (await refused(preprocessor, 40))[0] == 400, "both have room, and are then read as no JSON"
    with pytest.raises(ApiError):
        await first
    leaving = asyncio.create_task(preprocessor.read("/detokenize", b"x" * 100))
    await asyncio.sleep(0)
    leaving.cancel()
    with suppress(asyncio.CancelledError):
        await leaving
    assert (await refused(preprocessor, 101))[0] == 400, "one alone is read, however large"
    await preprocessor.shutdown()
    assert await refused(preprocessor, 1) == (503, SHUTTING_DOWN), "no process is started any more"


def test_nobody_waits_for_a_reader_that_a_signal_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it goes on; and with more to send than pipes hold."""
    monkeypatch.setattr("pellucid.server.preprocess.MOST_STOPPED", 0.6)

    async def run() -> None:
        preprocessor = Preprocessor(Renderer(FACTS, None))
        assert (await refused(preprocessor, 60))[0] == 400
        reader = preprocessor._reader
        assert reader is not None
        process = psutil.Process(reader._process.pid)
        process.suspend()
        asyncio.get_running_loop().call_later(0.1, process.resume)
        assert (await refused(preprocessor, 60))[0] == 400 and not reader.is_gone
        process.suspend()
        num = 2 * MAX_AT_ONCE
        answers = await asyncio.wait_for(
            asyncio.gather(*(refused(preprocessor, 5 << 20) for _ in range(num))), PATIENCE
        )
        assert sorted(status for status, _ in answers) == [400] * (num - MAX_AT_ONCE) + [503] * MAX_AT_ONCE
        await preprocessor.shutdown()

    asyncio.run(run())


async def refused(preprocessor: Preprocessor, num_bytes: int) -> tuple[int, str]:
    with pytest.raises(ApiError) as caught:
        await preprocessor.read("/detokenize", b"x" * num_bytes)
    return caught.value.status, caught.value.message


def test_what_a_long_text_took_is_given_back(server: Running) -> None:
    """Freed memory would stay with each thread of the reader that has done some work."""

    def reader_memory() -> int:
        family = psutil.Process(server.process.pid).children(recursive=True)
        (reader,) = [each for each in family if "pellucid.server.reader" in each.cmdline()]
        return reader.memory_info().rss

    def tokenize(size: int) -> None:
        body = dumped(prompt=f"{time.time_ns()} the quick " * size)
        assert httpx.post(f"{server.url}/tokenize", content=body, headers=JSON, timeout=PATIENCE).is_success

    tokenize(5_000)  # the reader's first
    before = reader_memory()
    threads = [threading.Thread(target=tokenize, args=(30_000,)) for _ in range(MAX_AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    eventually(lambda: reader_memory() < before + (64 << 20))
