"""POST /v1/embeddings, /v1/score and /v1/rerank: vectors of texts, and how near texts are by them."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response
from numpy.typing import NDArray

from pellucid.judging import chance, joined, judgements
from pellucid.pooling import PoolingParams, recipe_of, vector_of
from pellucid.sampling_params import SamplingParams
from pellucid.server.context import server_of
from pellucid.server.errors import CLIENT_GONE, AnswerFailedError, ApiError, users_fault
from pellucid.server.protocol.embeddings import (
    Embedding,
    EmbeddingBody,
    EmbeddingRequest,
    EmbeddingUsage,
    JudgedRequest,
    PooledRequest,
    RerankBody,
    RerankRequest,
    Result,
    Score,
    ScoreBody,
    ScoreRequest,
)
from pellucid.server.protocol.unserved import ALL, check_served
from pellucid.server.renderer import Renderer
from pellucid.server.respond import answer_id, json_response
from pellucid.server.route import Route
from pellucid.server.stream import closing
from pellucid.text.prompts import TokenPrompt
from pellucid.types import RequestOutput

router = APIRouter()
ONE_TOKEN = SamplingParams(max_tokens=1)  # behind a text, whatever is made of it
Vectors = list[NDArray[np.float32]]


@router.post("/v1/embeddings", summary="Vectors of texts")
async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
    return await server_of(request).preprocessor.take(EMBEDDINGS, body, request)


@router.post("/v1/score", summary="How near texts are")
@router.post("/score", summary="As /v1/score")
async def score(body: ScoreRequest, request: Request) -> Response:
    return await server_of(request).preprocessor.take(SCORE, body, request)


@router.post("/v1/rerank", summary="Documents, the nearest to a query first")
@router.post("/v2/rerank", summary="As /v1/rerank")
@router.post("/rerank", summary="As /v1/rerank")
async def rerank(body: RerankRequest, request: Request) -> Response:
    return await server_of(request).preprocessor.take(RERANK, body, request)


@dataclass(frozen=True, slots=True)
class PooledWork:
    """A request that waits for the engine alone."""

    body: PooledRequest
    model: str
    prompts: list[TokenPrompt]
    judgements: tuple[SamplingParams, ...] = ()  # to ask behind each prompt, which is a pair then

    @property
    def usage(self) -> EmbeddingUsage:
        num = sum(len(prompt.token_ids) for prompt in self.prompts)
        return EmbeddingUsage(num, num)


def prepare_embeddings(body: EmbeddingRequest, renderer: Renderer) -> PooledWork:
    """All that needs no engine."""
    given = body.input
    is_single = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
    texts = cast("list[str | list[int]]", [given] if is_single else given)
    return _prepare(body, texts, "input", renderer)


def prepare_scores(body: ScoreRequest, renderer: Renderer) -> PooledWork:
    first, second = body.pairs()
    if len(first) not in (1, len(second)):
        raise ApiError(
            400,
            f"text_1 has {len(first)} texts for {len(second)} of text_2; give one, or as many",
            param="text_1",
        )
    work = _prepare(body, [*first, *second], "text_2", renderer)
    return work if body.classifier_from_token is None else _judged(work, body, len(first), second, renderer)


def prepare_rerank(body: RerankRequest, renderer: Renderer) -> PooledWork:
    texts = body.texts()
    work = _prepare(body, [body.query, *texts] if texts else [], "documents", renderer)
    return work if body.classifier_from_token is None else _judged(work, body, 1, texts, renderer)


def _judged(
    work: PooledWork, body: JudgedRequest, num_first: int, second: list[str], renderer: Renderer
) -> PooledWork:
    """The same work in pairs, each one prompt: the first text's tokens, then the second's."""
    with users_fault(type(body).model_fields):
        if body.truncate_prompt_tokens is not None:
            raise ValueError("truncate_prompt_tokens cuts no pairs; leave out it or classifier_from_token")
        asked = judgements(body.classifier_from_token or (), renderer.tokenizer)
        right = renderer.tokenize([{"prompt": text} for text in second], add_special_tokens=False)
        prompts = renderer.tokenize(joined(work.prompts[:num_first], right))
        return replace(work, prompts=prompts, judgements=tuple(asked))


def _prepare(
    body: PooledRequest, given: Sequence[str | list[int]], name: str, renderer: Renderer
) -> PooledWork:
    model = renderer.check_model(body)
    if not given:
        raise ApiError(400, f"{name} is empty; give at least one", param=name)
    with users_fault(ALL):
        check_served(body.model_extra or {})
    with users_fault(type(body).model_fields):
        prompts: list[dict[str, object]] = [
            {"prompt" if isinstance(each, str) else "prompt_token_ids": each} for each in given
        ]
        adds = body.add_special_tokens is not False
        if body.truncate_prompt_tokens is not None:
            most = renderer.most_prompt_tokens(body.truncate_prompt_tokens, ONE_TOKEN)
            prompts = [renderer.shortened(each, most, add_special_tokens=adds) for each in prompts]
        return PooledWork(body, model, renderer.tokenize(prompts, add_special_tokens=adds))


async def answer_embeddings(work: PooledWork, request: Request) -> Response:
    body = cast("EmbeddingRequest", work.body)
    params = PoolingParams(dimensions=body.dimensions, normalize=body.normalize)
    vectors = await _vectors(work, request, params)
    if vectors is None:
        return Response(status_code=CLIENT_GONE)
    data = [Embedding(i, _spelled(vector, body.encoding_format)) for i, vector in enumerate(vectors)]
    name = answer_id("embd", request, body)
    return json_response(EmbeddingBody(name, int(time.time()), work.model, data, work.usage))


async def answer_scores(work: PooledWork, request: Request) -> Response:
    scores = await _scores(work, request, len(cast("ScoreRequest", work.body).pairs()[0]))
    if scores is None:
        return Response(status_code=CLIENT_GONE)
    data = [Score(i, score) for i, score in enumerate(scores)]
    name = answer_id("score", request, work.body)
    return json_response(ScoreBody(name, int(time.time()), work.model, data, work.usage))


async def answer_rerank(work: PooledWork, request: Request) -> Response:
    scores = await _scores(work, request, 1)
    if scores is None:
        return Response(status_code=CLIENT_GONE)
    body = cast("RerankRequest", work.body)
    order = np.argsort(-np.array(scores), kind="stable").tolist()[: body.top_n or None]
    texts = body.texts()
    results = [Result(i, {"text": texts[i]}, scores[i]) for i in order]
    name = answer_id("rerank", request, body)
    return json_response(RerankBody(name, work.model, work.usage, results))


async def _scores(work: PooledWork, request: Request, num_first: int) -> list[float] | None:
    """Of each pair: what the model says, or the cosine of their vectors; None: the client has gone."""
    if work.judgements:
        sides = [await _outputs(work, request, sampling) for sampling in work.judgements]
        against, for_it = sides
        if against is None or for_it is None:
            return None
        return [chance(a, b) for a, b in zip(against, for_it, strict=True)]
    vectors = await _vectors(work, request, PoolingParams(normalize=True))
    if vectors is None:
        return None
    second = vectors[num_first:]
    left = vectors[:num_first] * (len(second) // num_first)
    return [float(a @ b) for a, b in zip(left, second, strict=True)]


async def _vectors(work: PooledWork, request: Request, params: PoolingParams) -> Vectors | None:
    """Of each text; None: the client has gone."""
    with users_fault():
        sampling, normalizes = recipe_of(server_of(request).llm.resolved.checkpoint.path)
    outputs = await _outputs(work, request, sampling)
    if outputs is None:
        return None
    with users_fault({"dimensions": None}):
        return [vector_of(output, params, normalizes=normalizes) for output in outputs]


async def _outputs(
    work: PooledWork, request: Request, sampling: SamplingParams
) -> list[RequestOutput] | None:
    """The answer to each prompt; None: the client has gone."""
    server = server_of(request)
    mailbox = server.submit(
        work.prompts, sampling, priority=work.body.priority, is_streamed=False, model=work.model
    )
    names, found = list(mailbox.request_ids), dict[str, RequestOutput]()
    async with closing(request.receive, mailbox.close):
        async for output in mailbox:
            if output.error is not None:
                raise AnswerFailedError(output.error)
            found[output.request_id] = output
    return None if len(found) < len(names) else [found[name] for name in names]


def _spelled(vector: NDArray[np.float32], encoding: str | None) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()


EMBEDDINGS = Route(EmbeddingRequest, prepare_embeddings, answer_embeddings)
SCORE = Route(ScoreRequest, prepare_scores, answer_scores)
RERANK = Route(RerankRequest, prepare_rerank, answer_rerank)
