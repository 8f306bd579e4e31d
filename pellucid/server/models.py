"""GET /v1/models: the one model, by all of its names, its adapters; as OpenAI lists them, or Anthropic."""

from __future__ import annotations

from datetime import UTC, datetime

from fastapi import APIRouter, Request
from fastapi.responses import Response

from pellucid.server.context import Server, server_of
from pellucid.server.errors import unknown_model
from pellucid.server.protocol.anthropic_output import ModelInfo, ModelInfos
from pellucid.server.protocol.openai_output import ModelCard, ModelList
from pellucid.server.respond import json_response

router = APIRouter()


@router.get("/v1/models", summary="List the models")
async def list_models(request: Request) -> Response:
    server = server_of(request)
    names = (*server.names, *server.adapters)
    if _is_anthropics(request):
        return json_response(ModelInfos([_info(server, name) for name in names], names[0], names[-1]))
    return json_response(ModelList([_card(server, name) for name in names]))


@router.get("/v1/models/{name:path}", summary="Describe a model")
async def show_model(name: str, request: Request) -> Response:
    server = server_of(request)
    if name not in server.names and name not in server.adapters:
        raise unknown_model(name)
    return json_response(_info(server, name) if _is_anthropics(request) else _card(server, name))


def _is_anthropics(request: Request) -> bool:
    """Whether the client is one of Anthropic's API, which all name its version."""
    return "anthropic-version" in request.headers


def _info(server: Server, name: str) -> ModelInfo:
    created = datetime.fromtimestamp(server.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return ModelInfo(name, name, created, server.llm.max_model_len)


def _card(server: Server, name: str) -> ModelCard:
    length = server.llm.max_model_len
    if name in server.names:
        return ModelCard(name, server.created, server.llm.resolved.user.model.model, length)
    return ModelCard(name, server.created, server.adapters[name].lora_path, length, parent=server.names[0])
