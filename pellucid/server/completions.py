"""POST /v1/completions: prompts, text or token ids, to their continuations."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import cast

from fastapi import APIRouter, Request
from fastapi.responses import Response
from msgspec import UNSET

from pellucid.server.answer import Answer, Piece
from pellucid.server.context import Server, server_of
from pellucid.server.errors import ApiError, users_fault
from pellucid.server.limits import most_tokens
from pellucid.server.logprobs import Speller, completion_logprobs, prompt_logprobs_of
from pellucid.server.protocol.openai import CompletionRequest
from pellucid.server.protocol.openai_output import CompletionBody, CompletionChoice, UsageFacts
from pellucid.server.protocol.unserved import UNSERVED, check_served
from pellucid.server.respond import answer_id, respond, running_usage, usage_facts, usage_of_chunk
from pellucid.server.stream import Envelope, event
from pellucid.server.structured import check_wish, wish_of
from pellucid.server.truncate import most_prompt_tokens, truncated
from pellucid.text.prompts import TokenPrompt
from pellucid.types import SamplingParams

router = APIRouter()


@router.post("/v1/completions", summary="Complete prompts")
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    server = server_of(request)
    model = server.check_model(body)
    _check(body)
    with users_fault(UNSERVED):
        check_served(body.model_extra or {}, n=body.n or 1)
    with users_fault(CompletionRequest.model_fields):
        sampling, given = _sampling(body, server), _prompts(body)
    server.check_room(len(given) * sampling.n)  # before they are tokenized
    with users_fault(CompletionRequest.model_fields):
        prompts = await _tokenize(given, body, sampling, server)
        texts = [await _text(prompt, server) for prompt in prompts] if body.echo else None
    await check_wish(body, sampling, server)
    mailbox = server.submit(prompts, sampling, priority=body.priority, is_streamed=bool(body.stream))
    answer = Answer(mailbox, prompts, sampling.n)
    form = _CompletionForm(body, answer, model, server, texts, answer_id("cmpl", request, body))
    return await respond(request, body, answer, form)


def _check(body: CompletionRequest) -> None:
    """Refuse what would be answered wrongly."""
    if body.suffix:
        raise ApiError(
            400, "suffix is not supported: the text always goes on behind the prompt", param="suffix"
        )
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError(400, "prompt_logprobs cannot be streamed", param="prompt_logprobs")
    if body.stream and body.echo and body.logprobs is not None and (body.n or 1) > 1:
        raise ApiError(400, "logprobs with echo and n cannot be streamed", param="logprobs")
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens is 0, must be at least 1 (or use echo)", param="max_tokens")


def _sampling(body: CompletionRequest, server: Server) -> SamplingParams:
    defaults = server.llm.default_sampling_params()
    wish = body.max_tokens if "max_tokens" in body.model_fields_set else defaults.max_tokens
    changes: dict[str, object] = {
        "structured_outputs": wish_of(body),
        "max_tokens": 1 if wish == 0 else most_tokens(wish, server.options),
        "logprobs": body.logprobs,
    }
    if body.echo and body.logprobs is not None:
        changes["prompt_logprobs"] = body.logprobs
    return body.sampling(defaults, **changes)


async def _tokenize(
    prompts: list[dict[str, object]], body: CompletionRequest, sampling: SamplingParams, server: Server
) -> list[TokenPrompt]:
    adds = body.add_special_tokens is not False
    if body.truncate_prompt_tokens is not None:
        most = most_prompt_tokens(body.truncate_prompt_tokens, sampling, server)
        prompts = [await truncated(each, most, server, add_special_tokens=adds) for each in prompts]
    return await server.llm.tokenize(prompts, add_special_tokens=adds)


def _prompts(body: CompletionRequest) -> list[dict[str, object]]:
    prompt = body.prompt
    single = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
    prompts = [prompt] if single else list(cast("list[str | list[int]]", prompt))
    if not prompts:
        raise ValueError("prompt is empty; give at least one")
    return [_one_prompt(cast("str | list[int]", each), body.cache_salt) for each in prompts]


def _one_prompt(prompt: str | list[int], cache_salt: str | None) -> dict[str, object]:
    key = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    return {key: prompt} if cache_salt is None else {key: prompt, "cache_salt": cache_salt}


async def _text(prompt: TokenPrompt, server: Server) -> str:
    return prompt.text if prompt.text is not None else await server.llm.decode(prompt.token_ids)


@dataclass(slots=True)
class _CompletionForm:
    """Writes an answer in this route's form."""

    body: CompletionRequest
    answer: Answer
    model: str
    server: Server
    prompt_texts: list[str] | None  # shown before the answers
    id: str
    created: int = field(default_factory=lambda: int(time.time()))
    offsets: dict[int, int] = field(default_factory=dict[int, int])  # characters of each choice that are out
    is_plain: bool = field(init=False)  # is a text all that is new in most chunks, but for the usage?
    envelopes: dict[int, Envelope] = field(default_factory=dict[int, Envelope])  # of each choice

    def __post_init__(self) -> None:
        body = self.body
        shows_more = body.return_token_ids or body.logprobs is not None
        self.is_plain = not shows_more and self.prompt_texts is None

    def begin(self) -> bytes:
        return b""

    def events(self, pieces: list[Piece]) -> bytes:
        return b"".join([self._event(piece) for piece in pieces])

    def end(self) -> bytes:
        if not self.body.wants_usage:
            return b""
        return event(CompletionBody(self.id, self.created, self.model, [], self._usage()))

    async def whole(self) -> CompletionBody:
        choices = [self._choice(piece) for piece in await self.answer.whole()]
        return CompletionBody(self.id, self.created, self.model, choices, self._usage())

    def _usage(self) -> UsageFacts:
        usage = self.answer.usage
        return usage_facts(replace(usage, num_completion_tokens=0) if self.is_silent else usage)

    def _speller(self) -> Speller:
        return Speller(self.server.llm.tokenizer, bool(self.body.return_tokens_as_token_ids))

    @property
    def is_silent(self) -> bool:
        """Is only the prompt asked for?  One token has to be generated all the same."""
        return self.body.max_tokens == 0

    def _event(self, piece: Piece) -> bytes:
        if not self.is_plain or piece.finish_reason is not None:
            return event(self._body([self._choice(piece)]))
        envelope, usage = self.envelopes.get(piece.index), running_usage(self.body, self.answer.usage)
        if envelope is None:
            envelope = self.envelopes[piece.index] = Envelope(
                lambda text: self._body([CompletionChoice(piece.index, text, None, None)]), usage
            )
        return envelope.of(piece.text, usage)

    def _body(self, choices: list[CompletionChoice]) -> CompletionBody:
        usage = usage_of_chunk(self.body, self.answer.usage)
        return CompletionBody(self.id, self.created, self.model, choices, usage)

    def _choice(self, piece: Piece) -> CompletionChoice:
        body = self.body
        text, token_ids, new_logprobs = piece.text, piece.token_ids, piece.logprobs
        if self.is_silent:
            text, token_ids, new_logprobs = "", [], [] if new_logprobs is not None else None
        is_echoed = piece.is_first and self.prompt_texts is not None
        prompt = self.answer.prompt_of(piece.index)
        logprobs = None
        if new_logprobs is not None:
            entries = [*(piece.prompt_logprobs or ()), *new_logprobs] if is_echoed else new_logprobs
            ids = [*prompt.token_ids, *token_ids] if is_echoed else token_ids
            offset = self.offsets.get(piece.index, 0)
            logprobs = completion_logprobs(ids, entries, self._speller(), offset=offset)
        if is_echoed and self.prompt_texts is not None:
            text = (
                self.prompt_texts[piece.index // (self.answer.num_choices // len(self.prompt_texts))] + text
            )
        self.offsets[piece.index] = self.offsets.get(piece.index, 0) + len(text)
        wants_ids = bool(body.return_token_ids)
        wants_prompt_logprobs = body.prompt_logprobs is not None and piece.prompt_logprobs is not None
        return CompletionChoice(
            index=piece.index,
            text=text,
            logprobs=logprobs,
            finish_reason="length" if self.is_silent and piece.finish_reason else piece.finish_reason,
            stop_reason=piece.stop_reason if piece.finish_reason else UNSET,
            token_ids=token_ids if wants_ids else UNSET,
            prompt_token_ids=prompt.token_ids if wants_ids and piece.is_first else UNSET,
            prompt_logprobs=prompt_logprobs_of(piece) if wants_prompt_logprobs else UNSET,
        )
