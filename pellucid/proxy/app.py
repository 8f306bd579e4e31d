"""The router over HTTP: a prompt to one server, and its KV's whereabouts with the request to another one.

What vLLM's proxies do, with their `kv_transfer_params`.  A server that is lost before it has said anything
costs a computation; one that is lost in the middle of a stream ends it with an error, in the stream.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from pellucid.proxy.servers import Answer, Fleet, Gone, Server, digests_of

logger = logging.getLogger(__name__)
KEEP = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
}
LOOK_SECONDS = 0.5  # between two looks whether the client is still there
CLIENT_GONE = 499  # nginx's word for it; nobody reads it
JSON, EVENTS = "application/json", "text/event-stream"
PASSED_ON = ("authorization", "x-request-id", "traceparent")
ANSWERED = ("/v1/chat/completions", "/v1/completions")
SHOWN = ("/v1/models", "/version")  # which any server answers
ERRORS = {404: "NotFoundError", 503: "ServiceUnavailableError"}
COUNTED = ("/tokenize", "/detokenize", "/v1/embeddings", "/v1/messages/count_tokens")


class Proxy:
    """Answers requests by two servers each."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet

    async def answer(self, request: Request) -> Response:
        """Chats and completions."""
        try:
            body = json.loads(await request.body())
            if not isinstance(body, dict):
                raise ValueError("it is no object")
        except ValueError as error:
            return failure(400, f"the body is not the JSON of a request: {error}")
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        body.pop("kv_transfer_params", None)  # clients have no say in where KV is read
        work = asyncio.create_task(self._answer(request.url.path, body, headers))
        while not (await asyncio.wait([work], timeout=LOOK_SECONDS))[0]:
            if await request.is_disconnected():
                work.cancel()
                return Response(status_code=CLIENT_GONE)
        return work.result()

    async def _answer(self, route: str, body: dict[str, Any], headers: Mapping[str, str]) -> Response:
        kept = await self._prefill(route, body, headers)
        if isinstance(kept, Response):
            return kept
        if kept is not None:
            body["kv_transfer_params"] = kept
        return await self._decode(route, body, headers)

    async def _prefill(
        self, route: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> Mapping[str, Any] | Response | None:
        """Where the prompt's KV is now; None: nowhere; or an answer, if there is no more to say."""
        if body.get("max_tokens") == 1 or body.get("max_completion_tokens") == 1:
            return None  # that would be all
        digests = digests_of(body)
        work = len(digests)
        for server in self.fleet.for_prompt(digests):
            server.load += work
            server.known.add(digests)
            try:
                status, said = await server.whole("POST", route, first_token(body), headers)
            except Gone as error:
                logger.warning("%s has not computed a prompt: %s", server.url, error)
                server.note(is_up=False)
                continue
            finally:
                server.load -= work
            if 400 <= status < 500 and status != 429:
                return Response(said, status, media_type=JSON)  # the request's own fault
            if status == 200:
                return json.loads(said).get("kv_transfer_params")
        return None

    async def _decode(self, route: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Response:
        """The answer of the first server that has one; a 503 of the last, if none has."""
        wants_stream, sent = bool(body.get("stream")), json.dumps(body).encode()
        refusal = failure(503, "no server is left that could answer")
        for server in self.fleet.for_decode():
            server.num_running += 1
            try:
                answer, first = await self._begin(server, route, sent, headers, is_stream=wants_stream)
            except BaseException as error:
                server.num_running -= 1
                if not isinstance(error, Gone):
                    raise
                logger.warning("%s has not answered: %s", server.url, error)
                server.note(is_up=False)
                continue
            if answer.status >= 500:
                server.num_running -= 1
                refusal = Response(first, answer.status, media_type=JSON)
                continue
            is_stream = wants_stream and answer.status == 200
            rest = self._rest(server, answer, first, is_stream=is_stream)
            return StreamingResponse(rest, answer.status, media_type=EVENTS if is_stream else JSON)
        return refusal

    async def _begin(
        self, server: Server, route: str, sent: bytes, headers: Mapping[str, str], *, is_stream: bool
    ) -> tuple[Answer, bytes]:
        """The beginning of a stream, or a whole answer: until that has come, another server may be asked."""
        answer, first = await server.ask("POST", route, sent, headers)
        if is_stream and answer.status == 200:
            return answer, first
        try:
            first += b"".join([piece async for piece in answer.pieces()])
        except BaseException:
            answer.cancel()
            raise
        return answer, first

    async def _rest(
        self, server: Server, answer: Answer, first: bytes, *, is_stream: bool
    ) -> AsyncIterator[bytes]:
        try:
            yield first
            if is_stream:
                async for piece in answer.pieces():
                    yield piece
        except Gone as gone:
            server.note(is_up=False)
            error = {
                "message": f"{server.url} was lost: {gone}",
                "type": "ServiceUnavailableError",
                "code": 503,
            }
            yield b"data: " + json.dumps({"error": error}).encode() + b"\n\ndata: [DONE]\n\n"
        finally:
            answer.cancel()  # who reads no more has the server told
            server.num_running -= 1

    async def pass_on(self, request: Request) -> Response:
        """What any server can answer."""
        body = await request.body()
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        for server in self.fleet.for_decode():
            try:
                status, said = await server.whole(request.method, request.url.path, body, headers)
            except Gone:
                server.note(is_up=False)
                continue
            return Response(said, status, media_type=JSON)
        return failure(503, "no server is left that could answer")

    async def health(self, request: Request) -> Response:
        """200 while somebody can answer."""
        servers = {
            role: {server.url: {"is_up": server.is_up, "num_running": server.num_running} for server in each}
            for role, each in (("prefill", self.fleet.prefill), ("decode", self.fleet.decode))
        }
        is_up = any(server.is_up for server in self.fleet.all)
        return JSONResponse(servers, 200 if is_up else 503)


def first_token(body: Mapping[str, Any]) -> bytes:
    """The same request, for the prompt's KV alone."""
    part = {**body, "stream": False, "n": 1, "max_tokens": 1, "kv_transfer_params": KEEP}
    for name in ("stream_options", "logprobs", "top_logprobs", "prompt_logprobs", "echo", "best_of"):
        part.pop(name, None)
    if "max_completion_tokens" in part:
        part["max_completion_tokens"] = 1
    if part.get("min_tokens"):
        part["min_tokens"] = 1
    return json.dumps(part).encode()


def failure(status: int, message: str) -> Response:
    """In OpenAI's form."""
    kind = ERRORS.get(status, "BadRequestError")
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": status}}, status)


def build_app(fleet: Fleet) -> Starlette:
    """The router, as an ASGI application."""
    proxy = Proxy(fleet)

    @asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        watch = asyncio.create_task(fleet.watch())
        yield
        watch.cancel()
        for server in fleet.all:
            server.close()

    routes = [Route(path, proxy.answer, methods=["POST"]) for path in ANSWERED]
    routes += [Route(path, proxy.pass_on, methods=["GET"]) for path in SHOWN]
    routes += [Route(path, proxy.pass_on, methods=["POST"]) for path in COUNTED]
    routes.append(Route("/health", proxy.health))

    def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        paths = ", ".join(route.path for route in routes)
        message = f"{request.method} {request.url.path}: {error.detail}; the router has {paths}"
        return failure(error.status_code, message)

    return Starlette(routes=routes, lifespan=life, exception_handlers={HTTPException: refuse})
