"""What operators ask: is it well, what is it, how much does it do?"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from pellucid import __version__
from pellucid.async_llm import EngineDeadError
from pellucid.server.context import server_of
from pellucid.server.errors import PAUSED, PUT_TO_SLEEP, ApiError, overloaded, users_fault
from pellucid.server.respond import json_response
from pellucid.sleep.state import check_level, check_tags

router = APIRouter()
WAIT_SECONDS = 0.05  # between two looks at what still runs
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
    server = server_of(request)
    return json_response({"server_load": server.num_requests, "engine_silence": server.llm.silence})


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
        server.llm.fail_all(PAUSED)
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


@router.post("/sleep", summary="Give memory away; level: 1 (weights go to the host) or 2 (for good)")
async def sleep(request: Request, level: int = 1, mode: str = "abort") -> Response:
    server = server_of(request)
    if mode not in ("abort", "wait"):
        raise ApiError(400, f"mode is {mode!r}, must be abort or wait (what runs); KV is not kept")
    with users_fault({"level": level}):
        check_level(level)
    server.falls_asleep = True
    try:
        if mode == "abort":
            server.llm.fail_all(PUT_TO_SLEEP)
        while server.llm.num_completions:
            await asyncio.sleep(WAIT_SECONDS)
        await _followed(server.llm.sleep(level))
    finally:
        server.falls_asleep = False
    return Response()


@router.post("/wake_up", summary="Take memory back; tags: weights, kv_cache, or both")
async def wake_up(request: Request, tags: Annotated[list[str] | None, Query()] = None) -> Response:
    with users_fault({"tags": tags}):
        check_tags(tags)
    await _followed(server_of(request).llm.wake_up(tags))
    return Response()


async def _followed(order: Awaitable[None]) -> None:
    """Wait for an order to the engine.  Raises a 409 if it was refused."""
    try:
        await order
    except ValueError as error:
        raise ApiError(409, str(error)) from None
    except EngineDeadError as error:
        raise overloaded(str(error)) from None


@router.get("/is_sleeping", summary="Has the engine given memory away?")
async def is_sleeping(request: Request) -> Response:
    return json_response({"is_sleeping": server_of(request).llm.is_sleeping})


@router.get("/metrics", summary="For Prometheus")
async def metrics(request: Request) -> Response:
    return Response(server_of(request).metrics.text(), media_type=METRICS_TYPE)
