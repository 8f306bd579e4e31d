"""Requests for vectors and scores, with OpenAI's, vLLM's, Jina's and Cohere's fields, and their answers."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from pydantic import Field

from pellucid.server.protocol.openai import ApiRequest, Integer, ManyTokenIds, Texts, TokenIds


class PooledRequest(ApiRequest):
    """What these routes have in common."""

    model: str | None = None
    user: str | None = None
    request_id: str | None = None
    priority: Integer | None = None
    truncate_prompt_tokens: Integer | None = None
    add_special_tokens: bool | None = None


class EmbeddingRequest(PooledRequest):
    """POST /v1/embeddings."""

    input: str | TokenIds | Texts | ManyTokenIds
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: Annotated[Integer, Field(ge=1)] | None = None
    normalize: bool | None = None  # as the checkpoint says


class JudgedRequest(PooledRequest):
    """Texts in pairs; with two words, as ["no", "yes"], how likely the second one is behind a pair."""

    classifier_from_token: Texts | None = None


class ScoreRequest(JudgedRequest):
    """POST /v1/score: one text with each of others, or pairs."""

    text_1: str | Texts
    text_2: str | Texts

    def pairs(self) -> tuple[list[str], list[str]]:
        """Both sides as lists."""
        first, second = self.text_1, self.text_2
        return [first] if isinstance(first, str) else first, [second] if isinstance(second, str) else second


class TextDocument(ApiRequest):
    """A document as some clients send it."""

    text: str


class RerankRequest(JudgedRequest):
    """POST /v1/rerank."""

    query: str
    documents: Annotated[list[str | TextDocument], Field(max_length=2**17)]
    top_n: Annotated[Integer, Field(ge=0)] | None = None  # 0: all

    def texts(self) -> list[str]:
        """The documents'."""
        return [each if isinstance(each, str) else each.text for each in self.documents]


class EmbeddingUsage(msgspec.Struct):
    """Tokens."""

    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct):
    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingBody(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage
    object: str = "list"


class Score(msgspec.Struct):
    index: int
    score: float
    object: str = "score"


class ScoreBody(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage
    object: str = "list"


class Result(msgspec.Struct):
    index: int
    document: dict[str, str]
    relevance_score: float


class RerankBody(msgspec.Struct):
    id: str
    model: str
    usage: EmbeddingUsage
    results: list[Result]
