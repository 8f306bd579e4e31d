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


async def run_batch(app: ASGIApp, lines: Iterable[str], *, at_once: int = MOST_AT_ONCE) -> AsyncIterator[str]:
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


async def _answer(app: ASGIApp, line: str) -> str:
    """A line of the output."""
    custom_id: object = None
    try:
        asked = json.loads(line)
        custom_id, method, url = asked.get("custom_id"), asked.get("method", "POST"), asked["url"]
        body = asked.get("body") or {}
        if body.get("stream"):
            raise ValueError("a batch has no streams; leave stream out")
        status, answer = await _call(app, method, url, json.dumps(body).encode())
        response = {"status_code": status, "request_id": f"batch-{uuid.uuid4().hex}", "body": answer}
        failure = None if status < 400 else answer
    except (ValueError, KeyError, AttributeError, TypeError) as error:
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
    return json.dumps(made, ensure_ascii=False)


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
