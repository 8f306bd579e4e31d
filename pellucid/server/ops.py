"""What operators ask: is it well, what is it, how much does it do?"""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from pellucid import __version__
from pellucid.server.context import server_of
from pellucid.server.errors import overloaded
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


@router.get("/metrics", summary="For Prometheus")
async def metrics(request: Request) -> Response:
    return Response(server_of(request).metrics.text(), media_type=METRICS_TYPE)
