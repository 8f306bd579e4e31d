"""GET /v1/models: the one model, by all of its names, and its adapters."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from pellucid.server.context import Server, server_of
from pellucid.server.errors import unknown_model
from pellucid.server.protocol.openai_output import ModelCard, ModelList
from pellucid.server.respond import json_response

router = APIRouter()


@router.get("/v1/models", summary="List the models")
async def list_models(request: Request) -> Response:
    server = server_of(request)
    return json_response(ModelList([_card(server, name) for name in (*server.names, *server.adapters)]))


@router.get("/v1/models/{name:path}", summary="Describe a model")
async def show_model(name: str, request: Request) -> Response:
    server = server_of(request)
    if name not in server.names and name not in server.adapters:
        raise unknown_model(name)
    return json_response(_card(server, name))


def _card(server: Server, name: str) -> ModelCard:
    length = server.llm.max_model_len
    if name in server.names:
        return ModelCard(name, server.created, server.llm.resolved.user.model.model, length)
    return ModelCard(name, server.created, server.adapters[name].lora_path, length, parent=server.names[0])
