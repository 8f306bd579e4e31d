"""A file of requests in OpenAI's batch form, answered without a network: each goes to the application."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncIterator, Iterable

from starlette.types import ASGIApp, Message

logger = logging.getLogger(__name__)
# Requests are handed over as fast as the engine has room for some more, and no faster.
MOST_AT_ONCE = 1024
# Who wrote the file gives no orders to the engine: one to sleep or forget an adapter would fail other lines.
ROUTES = ("/v1/", "/v2/rerank", "/rerank", "/score", "/tokenize", "/detokenize")
ORDERS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")  # of these


async def run_batch(
    app: ASGIApp, lines: Iterable[bytes], *, at_once: int = MOST_AT_ONCE
) -> AsyncIterator[str]:
    """The answer to each line that is not empty, as a line, in the order of the lines."""
    running: list[asyncio.Task[str]] = []
    for line in lines:
        if not line.strip():
            continue
        running.append(asyncio.create_task(_answer(app, line)))
        while len(running) >= at_once:
            yield await running.pop(0)
    for task in running:
        yield await task


async def _answer(app: ASGIApp, line: bytes) -> str:
    """A line of the output."""
    custom_id: object = None
    try:
        asked = json.loads(line)
        if not isinstance(asked, dict):
            raise ValueError("it must be an object with custom_id, method, url and body")
        custom_id = asked.get("custom_id")
        status, answer = await _call(app, *_request(asked))
        response = {"status_code": status, "request_id": f"batch-{uuid.uuid4().hex}", "body": answer}
        failure = None if status < 400 else answer
    except ValueError as error:
        response, failure = None, {"message": f"the line is no request: {error}", "type": "BadRequestError"}
    except Exception as error:
        logger.exception("request %r has had no answer", custom_id)
        failure = {"message": f"the server has failed: {error}", "type": "InternalServerError"}
        response = None
    made = {
        "id": f"pellucid-{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": response,
        "error": failure,
    }
    text = json.dumps(made, ensure_ascii=False)
    return text if _is_text(text) else json.dumps(made)


def _request(asked: dict[str, object]) -> tuple[str, str, bytes]:
    """Method, path and body that a line asks for.  Raises ValueError."""
    method, url, body = asked.get("method", "POST"), asked.get("url"), asked.get("body") or {}
    if not isinstance(method, str) or not isinstance(url, str) or not isinstance(body, dict):
        raise ValueError("its method and url must be texts, its body an object")
    if not url.startswith(ROUTES) or url.startswith(ORDERS):
        raise ValueError(f"its url is {url!r}, must be a route such as /v1/chat/completions")
    for name in ("stream", "background"):
        if body.get(name):
            raise ValueError(f"a batch waits for whole answers; leave {name} out")
    return method.upper(), url, json.dumps(body).encode()


def _is_text(text: str) -> bool:
    """Can it be written?  Half of a pair of UTF-16's, which JSON can name, cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


async def _call(app: ASGIApp, method: str, path: str, body: bytes) -> tuple[int, object]:
    """Status and JSON of the answer to one request."""
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "method": method,
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "client": None,
        "server": None, "headers": [(b"content-type", b"application/json")],
    }  # fmt: skip
    received, parts, status = iter([{"type": "http.request", "body": body}]), list[bytes](), 500
    ended = asyncio.Event()

    async def receive() -> Message:
        message = next(received, None)
        if message is None:
            await ended.wait()
        return message or {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        parts.append(message.get("body", b""))

    try:
        await app(scope, receive, send)
    except Exception:  # a framework answers, and raises for whoever logs it
        if not parts:
            raise
        logger.exception("%s %s has failed", method, path)
    ended.set()
    return status, json.loads(b"".join(parts) or b"null")
