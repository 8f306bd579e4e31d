"""Counts answers by route and status, whoever has given them, the guard among them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pellucid.server.errors import route_path
from pellucid.server.metrics import Metrics

NO_ROUTE = "none"  # for paths that nobody serves, of which there may be any number
NO_STATUS = 499  # the client went before there was an answer


class HttpMetrics:
    """ASGI middleware.  paths: of the routes, as they are written."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: Iterable[str]) -> None:
        self._app, self._metrics = app, metrics
        self._plain = {path for path in paths if "{" not in path}
        self._patterns = [(_pattern(path), path) for path in paths if "{" in path]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, began = NO_STATUS, time.monotonic()

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            seconds = time.monotonic() - began
            self._metrics.answered(scope["method"], self._handler(route_path(scope)), status, seconds)

    def _handler(self, path: str) -> str:
        """The route as it is written, so that there are only so many."""
        path = path.rstrip("/") or "/"
        if path in self._plain:
            return path
        return next((name for pattern, name in self._patterns if pattern.fullmatch(path)), NO_ROUTE)


def _pattern(path: str) -> re.Pattern[str]:
    """What a route's path matches; `{name:path}` has slashes, too."""
    parts = re.split(r"(\{[^}]*\})", path)
    ways = {True: ".+", False: "[^/]+"}
    return re.compile(
        "".join(ways[part.endswith(":path}")] if part.startswith("{") else re.escape(part) for part in parts)
    )
