"""POST /v1/load_lora_adapter, /v1/unload_lora_adapter: what else than the model requests may name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import BaseModel

from pellucid.async_llm import AsyncLLM
from pellucid.lora.request import LoRARequest
from pellucid.sampling_params import SamplingParams
from pellucid.server.context import Server, server_of
from pellucid.server.errors import AnswerFailedError, ApiError, users_fault

router = APIRouter()


class LoadRequest(BaseModel):
    """An adapter's name and its folder on the server's machine."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False  # in the place of one of that name


class UnloadRequest(BaseModel):
    """An adapter's name."""

    lora_name: str


def named(llm: AsyncLLM, modules: Sequence[str], names: Sequence[str]) -> dict[str, LoRARequest]:
    """Adapters that are there from the start, by name.  Raises ValueError for one that is not served."""
    found: dict[str, LoRARequest] = {}
    for module in modules:
        name, path = _said(module)
        if name in found or name in names:
            raise ValueError(f"lora_modules names {name!r}, which is another one's name already")
        found[name] = LoRARequest(name, len(found) + 1, path)
        llm.adapter(found[name])
    return found


@router.post("/v1/load_lora_adapter", summary="Have requests name an adapter as their model")
async def load(body: LoadRequest, request: Request) -> Response:
    server = server_of(request)
    if not body.lora_name:
        raise ApiError(400, "lora_name is empty", param="lora_name")
    _check_name(server, body)
    adapter = LoRARequest(body.lora_name, len(server.adapters) + 1, body.lora_path)
    await _try(server, adapter)
    _check_name(server, body)  # another one may have come first
    server.adapters[body.lora_name] = adapter
    return PlainTextResponse(f"Success: LoRA adapter {body.lora_name!r} added.")


@router.post("/v1/unload_lora_adapter", summary="Forget an adapter")
async def unload(body: UnloadRequest, request: Request) -> Response:
    if server_of(request).adapters.pop(body.lora_name, None) is None:
        raise ApiError(404, f"there is no adapter {body.lora_name!r}; /v1/models lists those that there are")
    return PlainTextResponse(f"Success: LoRA adapter {body.lora_name!r} removed.")


def _said(module: str) -> tuple[str, str]:
    """Name and folder of NAME=FOLDER, or of vLLM's other form, JSON."""
    name, _, path = module.partition("=")
    if module.startswith("{"):
        with suppress(ValueError):
            said = json.loads(module)
            name, path = said.get("name"), said.get("path")
    if isinstance(name, str) and isinstance(path, str) and name and path:
        return name, path
    raise ValueError(f'lora_modules has {module!r}, must be NAME=FOLDER or {{"name": .., "path": ..}}')


def _check_name(server: Server, body: LoadRequest) -> None:
    if body.lora_name in server.names or (body.lora_name in server.adapters and not body.load_inplace):
        raise ApiError(400, f"there is a model {body.lora_name!r} already; unload it, or take another name")


async def _try(server: Server, adapter: LoRARequest) -> None:
    """Have the engine read it, and run a token with it.  Raises a 400 if it does not fit the model."""
    with users_fault(_FIELDS):
        lora = await asyncio.to_thread(server.llm.adapter, adapter)  # reads all of it
    server.check_room(1)
    (prompt,) = await server.llm.tokenize([{"prompt_token_ids": [0]}])
    mailbox = server.llm.open([prompt], SamplingParams(max_tokens=1, temperature=0), lora=lora)
    try:
        async for output in mailbox:
            if output.error is not None:
                failure = AnswerFailedError(output.error)
                if failure.status == 503:  # says nothing of the adapter
                    raise failure
                raise ApiError(400, output.error, param="lora_path")
    finally:
        mailbox.close()


_FIELDS: Mapping[str, object] = LoadRequest.model_fields
