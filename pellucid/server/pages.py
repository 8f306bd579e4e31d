"""The pages: / to chat and to look at the engine, /docs.  Plain files, which ask nobody else for anything."""

from __future__ import annotations

import mimetypes
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import Response

from pellucid.server.errors import ApiError

router = APIRouter(include_in_schema=False)
FOLDER = Path(__file__).parent / "page"
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
FILES = {path.name: path for path in FOLDER.iterdir()}


@router.get("/")
async def page() -> Response:
    return _file("index.html")


@router.get("/docs")
async def docs() -> Response:
    return _file("docs.html")


@router.get("/page/{name}")
async def part(name: str) -> Response:
    return _file(name)


def _file(name: str) -> Response:
    if name not in FILES:
        raise ApiError(404, f"the page has no {name!r}")
    kind, _ = mimetypes.guess_type(name)
    return Response(FILES[name].read_bytes(), media_type=kind, headers=HEADERS)
