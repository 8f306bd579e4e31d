"""POST /tokenize and /detokenize: text to token ids and back, as the model sees them."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from pellucid.server.chat import render
from pellucid.server.context import Server, server_of
from pellucid.server.errors import ApiError, users_fault
from pellucid.server.protocol.openai import DetokenizeRequest, TokenizeRequest
from pellucid.server.protocol.openai_output import DetokenizeBody, TokenizeBody
from pellucid.server.protocol.unserved import UNSERVED, check_served
from pellucid.server.respond import json_response

router = APIRouter()


@router.post("/tokenize", summary="Text or messages to token ids")
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    server = server_of(request)
    server.check_model(body)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    with users_fault(UNSERVED):
        check_served(body.model_extra or {})
    with users_fault(TokenizeRequest.model_fields):
        tokens = await _tokens(body, server)
        names = (
            [server.llm.tokenizer.id_to_token(i) or "" for i in tokens] if body.return_token_strs else None
        )
    return json_response(TokenizeBody(len(tokens), server.llm.max_model_len, tokens, names))


@router.post("/detokenize", summary="Token ids to text")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    server = server_of(request)
    server.check_model(body)
    with users_fault(DetokenizeRequest.model_fields):
        for token in body.tokens:
            if not 0 <= token < server.llm.vocab_size:
                raise ValueError(f"tokens has {token}, must be in [0, {server.llm.vocab_size - 1}]")
        return json_response(DetokenizeBody(await server.llm.decode(body.tokens)))


async def _tokens(body: TokenizeRequest, server: Server) -> list[int]:
    if body.messages is None:
        adds = body.add_special_tokens is not False
        return await server.llm.encode(body.prompt or "", add_special_tokens=adds)
    text = await render(body, server)
    return await server.llm.encode(text, add_special_tokens=bool(body.add_special_tokens))
