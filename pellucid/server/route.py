"""A route in two halves: what makes a request ready, in any thread or process, and what answers it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel

from pellucid.server.renderer import Renderer


class Route(NamedTuple):
    """What a POST brings, what is made of it, and who answers that.

    prepare: all that needs no engine: checks, sampling parameters, prompts.  What it returns can be sent to
    another process.  Raises ApiError.
    """

    body: type[BaseModel]
    prepare: Callable[[Any, Renderer], object]
    answer: Callable[[Any, Request], Awaitable[Response]]
    needs_engine: bool = True
