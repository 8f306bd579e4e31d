"""The short way for the requests that come by the hundred: from JSON to a route's own function.

FastAPI finds a route, and what it depends on, in about the time that all else of a request takes.  So it is
left to describe these routes, and to say what is wrong with the requests that are not as described.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pellucid.server.errors import ApiError, refusal, route_path

JSON = b"application/json"
MOST_BYTES = 2**18


class Route(NamedTuple):
    """What a POST brings, and who answers it."""

    body: type[BaseModel]
    answer: Callable[[Any, Request], Awaitable[Response]]


class Shortcut:
    """ASGI middleware.  routes: by path."""

    def __init__(self, app: ASGIApp, routes: Mapping[str, Route]) -> None:
        self._app, self._routes = app, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        route = self._routes.get(route_path(scope)) if is_post else None
        if route is None or not _is_json(scope):
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            text = await request.body()
            body = _understood(text, route.body)
            if body is None:
                await self._app(scope, _again(text, receive), send)
                return
            response = await route.answer(body, request)
        except ClientDisconnect:
            return
        except (ApiError, HTTPException) as error:
            response = refusal(request, error)
        await response(scope, receive, send)


def _is_json(scope: Scope) -> bool:
    """Does the request say so?"""
    kinds = [value for name, value in scope["headers"] if name == b"content-type"]
    return len(kinds) == 1 and kinds[0].partition(b";")[0].strip().lower() == JSON


def _understood(text: bytes, kind: type[BaseModel]) -> BaseModel | None:
    """A body that is as described, unless it is so large that to find a fault in it twice would take long."""
    if len(text) > MOST_BYTES:
        return None
    try:
        return kind.model_validate_json(text)
    except ValidationError:
        return None


def _again(body: bytes, receive: Receive) -> Receive:
    """`receive`, for somebody who has not heard the body yet."""
    unheard: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def heard_again() -> Message:
        return unheard.pop() if unheard else await receive()

    return heard_again
