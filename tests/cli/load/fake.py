"""A server with known timings: it answers as its script says, in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
MODELS = {"object": "list", "data": [{"id": "fake", "max_model_len": 4096}]}

Writer = asyncio.StreamWriter
Request = dict[str, object]
Script = Callable[[Writer, Request], Awaitable[None]]


@dataclass
class Fake:
    """A running server."""

    url: str
    requests: list[Request] = field(default_factory=list)  # bodies, in the order of their coming
    headers: list[str] = field(default_factory=list)


def token(*ids: int, **more: object) -> bytes:
    """A chunk of a completion with some tokens."""
    choice = {"index": 0, "text": "x" * len(ids), "token_ids": list(ids), "finish_reason": None, **more}
    return event({"choices": [choice]})


def end(num_tokens: int, num_prompt: int = 4) -> bytes:
    """What comes after the last token."""
    usage = {"prompt_tokens": num_prompt, "completion_tokens": num_tokens}
    last = {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}
    return event(last) + event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n"


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def send(writer: Writer, *pieces: bytes | float) -> None:
    """Write a whole stream; numbers are seconds to wait."""
    writer.write(HEAD)
    for piece in pieces:
        if isinstance(piece, float):
            await asyncio.sleep(piece)
        else:
            writer.write(chunk(piece))
            await writer.drain()
    writer.write(chunk(b""))
    await writer.drain()


def refuse(writer: Writer, status: int, message: str) -> None:
    """An error of OpenAI's form; the connection stays."""
    body = json.dumps({"error": {"message": message, "code": status}}).encode()
    writer.write(b"HTTP/1.1 %d Nope\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body)


@contextmanager
def serving(script: Script) -> Iterator[Fake]:
    """Answer /v1/models, and every POST as `script` does."""
    started: threading.Event = threading.Event()
    fake = Fake("")
    stop: list[Callable[[], object]] = []

    async def answer(reader: asyncio.StreamReader, writer: Writer) -> None:
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                fake.headers.append(head)
                _, _, length = head.partition("Content-Length:")
                body = await reader.readexactly(int(length.split()[0]) if length else 0)
                if head.startswith("GET"):
                    data = json.dumps(MODELS).encode()
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
                else:
                    fake.requests.append(json.loads(body))
                    await script(writer, fake.requests[-1])
                if writer.is_closing():
                    break
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        writer.close()

    async def main() -> None:
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1024)
        fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        stop.append(lambda: loop.call_soon_threadsafe(over.set))
        started.set()
        await over.wait()
        server.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield fake
    finally:
        stop[0]()
        thread.join(10)
