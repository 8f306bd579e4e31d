"""What operators ask: is it well, what is it, how much does it do?"""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from pellucid import __version__
from pellucid.server.context import server_of
from pellucid.server.errors import ApiError, overloaded
from pellucid.server.respond import json_response

router = APIRouter()
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@router.get("/health", summary="200 if requests can be served")
async def health(request: Request) -> Response:
    server = server_of(request)
    if server.llm.error is not None:
        raise overloaded(server.llm.error)
    return Response()


@router.get("/ping", summary="As /health")
@router.post("/ping", summary="As /health")
async def ping(request: Request) -> Response:
    return await health(request)


@router.get("/version", summary="This server's version")
async def version() -> Response:
    return json_response({"version": __version__})


@router.get("/load", summary="Requests under way")
async def load(request: Request) -> Response:
    return json_response({"server_load": server_of(request).num_requests})


@router.post("/reset_prefix_cache", summary="Forget all cached prefixes that no running request uses")
async def reset_prefix_cache(request: Request) -> Response:
    await server_of(request).llm.reset_prefix_cache()
    return Response()


@router.post("/pause", summary="Have the engine stand still; mode: abort (what runs) or keep")
async def pause(request: Request, mode: str = "abort") -> Response:
    server = server_of(request)
    if mode not in ("abort", "keep"):
        raise ApiError(
            400, f"mode is {mode!r}, must be abort or keep; to let requests end first, send no new ones"
        )
    if mode == "abort":
        server.llm.fail_all("the operator has paused the engine")
    server.llm.pause(is_on=True)
    server.is_paused = True
    return json_response({"status": "paused"})


@router.post("/resume", summary="Have the engine go on")
async def resume(request: Request) -> Response:
    server = server_of(request)
    server.llm.pause(is_on=False)
    server.is_paused = False
    return json_response({"status": "resumed"})


@router.get("/is_paused", summary="Does the engine stand still?")
async def is_paused(request: Request) -> Response:
    return json_response({"is_paused": server_of(request).is_paused})


@router.post("/sleep", summary="Not served: weights stay where they are")
@router.post("/wake_up", summary="As /sleep")
async def sleep() -> Response:
    raise ApiError(
        501,
        "this engine cannot give its memory back and take it again, for recorded steps hold its addresses; "
        "POST /pause stops the work, and a new process is ready in seconds",
    )


@router.get("/is_sleeping", summary="Never")
async def is_sleeping() -> Response:
    return json_response({"is_sleeping": False})


@router.get("/metrics", summary="For Prometheus")
async def metrics(request: Request) -> Response:
    return Response(server_of(request).metrics.text(), media_type=METRICS_TYPE)
