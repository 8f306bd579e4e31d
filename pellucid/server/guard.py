"""What every request passes before any route: host, key, size, and whether the server takes any more."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pellucid.server.context import CLIENT, Server
from pellucid.server.errors import SHUTTING_DOWN, ApiError, error_response, overloaded, route_path
from pellucid.server.hosts import make_host_check
from pellucid.server.keys import Key, Keys
from pellucid.server.lives import CALLER

# What probes and dashboards read, and what shows nothing of any request.
OPEN_PATHS = {"/", "/docs", "/openapi.json", "/health", "/ping", "/version", "/load", "/metrics"}
PAGE = "/page/"  # below it are files that everybody has
# Lists and objects are the most work to read, and no stream goes on meanwhile.  What texts have counts, too.
MOST_BRACKETS = 2**18
TOO_MANY_PARTS = f"the body has more than {MOST_BRACKETS:,} opening brackets"
TRACED = (b"traceparent", b"tracestate")
KEY = "pellucid.key"  # in a scope: the `Key` that a request has brought, or None
PROTOCOL_KEY = "key."  # how a browser, which cannot set headers, brings a key to a websocket: in base64


class Guard:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, server: Server, keys: Keys) -> None:
        self._app, self._server = app, server
        self._keys = keys
        self._most_bytes = int(server.options.max_body_mib * 2**20)
        options = server.options
        self._tells = options.enable_log_requests or options.otlp_traces_endpoint is not None
        self._is_host_welcome = make_host_check(server.options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        scope = _plain(scope)
        refusal = self._refusal(scope)
        if refusal is not None:
            await self._refuse(refusal, scope, receive, send)
            return
        key = self._key_of(Headers(scope=scope))
        host, _ = scope.get("client") or ("", 0)
        # Many clients may share either.
        scope = {**scope, CLIENT: f"{host} {key.name if key else ''}".strip(), KEY: key}
        if self._tells:
            CALLER.set(_caller(scope))
        is_work = scope["type"] == "http" and scope["method"] == "POST"
        try:
            with self._keys.counted(key if is_work else None), self._counted(is_work):
                await self._app(scope, self._measured(receive), send)
        except ApiError as refusal:
            await self._refuse(refusal, scope, receive, send)

    @contextmanager
    def _counted(self, is_work: bool) -> Iterator[None]:
        self._server.num_requests += is_work
        try:
            yield
        finally:
            self._server.num_requests -= is_work

    async def _refuse(self, refusal: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": refusal.message})
            return
        # The body is not read, so the connection is of no further use.
        await error_response(route_path(scope), refusal, {"Connection": "close"})(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers, path = Headers(scope=scope), route_path(scope)
        if len(hosts := headers.getlist("host")) > 1:
            return ApiError(400, f"the request has {len(hosts)} headers Host, may have one")
        if not self._is_host_welcome(host := headers.get("host")):
            return ApiError(
                403, f"this server is not called {host!r}; start it with --allowed-hosts to allow that"
            )
        is_open = path in OPEN_PATHS or path.startswith(PAGE)
        if self._keys and not is_open and self._key_of(headers) is None:
            return ApiError(401, "a valid API key is needed, as 'Authorization: Bearer KEY'")
        if self._server.is_draining:
            return overloaded(SHUTTING_DOWN)
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self._most_bytes:
            return ApiError(413, self._too_large())
        if (coding := headers.get("content-encoding", "")) not in ("", "identity"):
            return ApiError(415, f"the body is compressed ({coding!r}); send it as it is")
        return None

    def _key_of(self, headers: Headers) -> Key | None:
        """Which key is brought."""
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        brought = [
            bearer.strip() if kind.lower() == "bearer" else "",
            headers.get("x-api-key", ""),
            _protocol_key(headers),
        ]
        return self._keys.find(brought)

    def _measured(self, receive: Receive) -> Receive:
        """`receive`, as long as the body is not too large."""
        left, brackets_left = self._most_bytes, MOST_BRACKETS

        async def measured() -> Message:
            nonlocal left, brackets_left
            message = await receive()
            body = message.get("body", b"")
            left -= len(body)
            brackets_left -= body.count(b"[") + body.count(b"{")
            if left < 0:
                raise HTTPException(413, self._too_large(), {"Connection": "close"})
            if brackets_left < 0:
                raise HTTPException(413, TOO_MANY_PARTS, {"Connection": "close"})
            return message

        return measured

    def _too_large(self) -> str:
        return f"the body is larger than {self._most_bytes:,} bytes, this server's --max-body-mib"


def go_on_counting(scope: Scope, task: asyncio.Task[None], server: Server) -> None:
    """What a request has begun is under way until this ends, though it has had its answer."""

    def ended(_: asyncio.Task[None]) -> None:
        server.num_requests -= 1

    server.num_requests += 1
    task.add_done_callback(ended)
    key: Key | None = scope.get(KEY)
    if key is not None:
        key.num_under_way += 1
        task.add_done_callback(lambda _: key.end())


def _caller(scope: Scope) -> dict[str, str]:
    """What is told of who asks."""
    found = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in TRACED}
    return {**found, "client": scope[CLIENT]}


def _plain(scope: Scope) -> Scope:
    """The request that a route knows: a slash at the end means nothing, and HEAD is a GET without the body.

    The connection still knows that it was a HEAD, and leaves the body out.
    """
    changes: dict[str, str] = {}
    if route_path(scope) not in ("", "/") and scope["path"].endswith("/"):
        changes["path"] = scope["path"].rstrip("/")
    if scope.get("method") == "HEAD":
        changes["method"] = "GET"
    return {**scope, **changes} if changes else scope


def _protocol_key(headers: Headers) -> str:
    """The key among the protocols of a websocket, or none."""
    protocols = [name.strip() for name in headers.get("sec-websocket-protocol", "").split(",")]
    key = next((name.removeprefix(PROTOCOL_KEY) for name in protocols if name.startswith(PROTOCOL_KEY)), "")
    try:
        return base64.urlsafe_b64decode(key + "=" * (-len(key) % 4)).decode()
    except ValueError:
        return ""
