"""POST /tokenize and /detokenize: text to token ids and back, as the model sees them."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from pellucid.server.context import server_of
from pellucid.server.errors import ApiError, users_fault
from pellucid.server.protocol.openai import DetokenizeRequest, TokenizeRequest
from pellucid.server.protocol.openai_output import DetokenizeBody, TokenizeBody
from pellucid.server.protocol.unserved import ALL, check_served
from pellucid.server.renderer import Renderer
from pellucid.server.respond import JSON
from pellucid.server.route import Route
from pellucid.server.stream import encode

router = APIRouter()


@router.post("/tokenize", summary="Text or messages to token ids")
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    return await server_of(request).preprocessor.take(TOKENIZE, body, request)


@router.post("/detokenize", summary="Token ids to text")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    return await server_of(request).preprocessor.take(DETOKENIZE, body, request)


def tokenized(body: TokenizeRequest, renderer: Renderer) -> bytes:
    """The answer, as JSON."""
    renderer.check_model(body)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    with users_fault(ALL):
        check_served(body.model_extra or {})
    with users_fault(TokenizeRequest.model_fields):
        tokens = _tokens(body, renderer)
        tokenizer = renderer.tokenizer
    names = [tokenizer.id_to_token(i) or "" for i in tokens] if body.return_token_strs else None
    return encode(TokenizeBody(len(tokens), renderer.facts.max_model_len, tokens, names))


def detokenized(body: DetokenizeRequest, renderer: Renderer) -> bytes:
    """The answer, as JSON."""
    renderer.check_model(body)
    most = renderer.facts.vocab_size - 1
    with users_fault(DetokenizeRequest.model_fields):
        wrong = next((token for token in body.tokens if not 0 <= token <= most), None)
        if wrong is not None:
            raise ValueError(f"tokens has {wrong}, must be in [0, {most}]")
        return encode(DetokenizeBody(renderer.tokenizer.decode(body.tokens, skip_special_tokens=False)))


def _tokens(body: TokenizeRequest, renderer: Renderer) -> list[int]:
    if body.messages is None:
        adds = body.add_special_tokens is not False
        return renderer.tokenizer.encode(body.prompt or "", add_special_tokens=adds)
    return renderer.tokenizer.encode(renderer.render(body), add_special_tokens=bool(body.add_special_tokens))


async def as_it_is(work: bytes, request: Request) -> Response:
    """An answer that is whole before any engine is asked."""
    return Response(work, media_type=JSON)


TOKENIZE = Route(TokenizeRequest, tokenized, as_it_is, needs_engine=False)
DETOKENIZE = Route(DetokenizeRequest, detokenized, as_it_is, needs_engine=False)
