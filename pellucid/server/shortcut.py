"""The way of all requests that bring JSON: from bytes to a route's two halves.

FastAPI finds a route, and what it depends on, in about the time that all else of a request takes, and parses
bodies while all streams wait.  So it is left to describe these routes, and to answer requests that are none.
"""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from pellucid.server.context import server_of
from pellucid.server.errors import ApiError, refusal, route_path
from pellucid.server.parse import parse
from pellucid.server.preprocess import LARGE, Preprocessor
from pellucid.server.route import Route
from pellucid.server.stream import while_there


class Shortcut:
    """ASGI middleware.  routes: by path."""

    def __init__(self, app: ASGIApp, routes: Mapping[str, Route], preprocessor: Preprocessor) -> None:
        self._app, self._routes, self._preprocessor = app, routes, preprocessor

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        path = route_path(scope)
        if not is_post or path not in self._routes or not _is_json(scope):
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            if self._routes[path].needs_engine:
                server_of(request).check_room(1)
            work = await self._prepare(path, request)
            response = await self._routes[path].answer(work, request)
        except ClientDisconnect:
            return
        except (ApiError, HTTPException) as error:
            response = refusal(request, error)
        await response(scope, receive, send)

    async def _prepare(self, path: str, request: Request) -> object:
        body = await request.body()
        if len(body) >= LARGE:
            return await while_there(request, self._preprocessor.read(path, body))
        route = self._routes[path]
        return await self._preprocessor.prepare(route, parse(route.body, body), len(body))


def _is_json(scope: Scope) -> bool:
    """Does the request say so?  By its first header, as FastAPI reads it."""
    kinds = [value for name, value in scope["headers"] if name == b"content-type"]
    kind, _, subtype = (kinds or [b""])[0].partition(b";")[0].strip().lower().partition(b"/")
    return kind == b"application" and (subtype == b"json" or subtype.endswith(b"+json"))
