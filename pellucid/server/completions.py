"""POST /v1/completions: prompts, text or token ids, to their continuations."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import cast

from fastapi import APIRouter, Request
from fastapi.responses import Response
from msgspec import UNSET

from pellucid.sampling_params import SamplingParams
from pellucid.server.answer import Answer, Piece
from pellucid.server.context import Server, server_of
from pellucid.server.errors import ApiError, users_fault
from pellucid.server.infill import infilled
from pellucid.server.kv_transfer import kv_wish
from pellucid.server.limits import check_limits, check_small, most_tokens
from pellucid.server.logprobs import Speller, completion_logprobs, prompt_logprobs_of
from pellucid.server.protocol.openai import CompletionRequest
from pellucid.server.protocol.openai_output import CompletionBody, CompletionChoice, UsageFacts
from pellucid.server.protocol.unserved import ALL, COMPLETION, check_served
from pellucid.server.renderer import Renderer
from pellucid.server.respond import answer_id, respond, running_usage, usage_facts, usage_of_chunk
from pellucid.server.route import Route
from pellucid.server.stream import Envelope, event
from pellucid.server.structured import check_wish, wish_of
from pellucid.text.prompts import TokenPrompt

router = APIRouter()


@router.post("/v1/completions", summary="Complete prompts")
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    return await server_of(request).preprocessor.take(ROUTE, body, request)


@dataclass(frozen=True, slots=True)
class CompletionWork:
    """A request that waits for the engine alone.  texts: of the prompts, if they are to be shown."""

    body: CompletionRequest
    model: str
    sampling: SamplingParams
    prompts: list[TokenPrompt]
    texts: list[str] | None

    def slim(self) -> CompletionWork:
        """Without what only the prompts were made of."""
        with users_fault(CompletionRequest.model_fields):
            check_small(response_format=self.body.response_format)
        body = self.body.model_copy(update={"prompt": ""})
        body.__pydantic_extra__ = {}
        return replace(self, body=body)


def prepare(body: CompletionRequest, renderer: Renderer) -> CompletionWork:
    """All that needs no engine."""
    model = renderer.check_model(body)
    _check(body)
    with users_fault(ALL):
        check_served(body.model_extra or {}, COMPLETION, n=body.n or 1)
    with users_fault(CompletionRequest.model_fields):
        sampling, given = _sampling(body, renderer), _prompts(body, renderer)
        check_limits(sampling, renderer.facts.options)
        prompts = _tokenize(given, body, sampling, renderer)
        texts = [_text(prompt, renderer) for prompt in prompts] if body.echo else None
    return CompletionWork(body, model, sampling, prompts, texts)


async def answer(work: CompletionWork, request: Request) -> Response:
    """Hand prompts to the engine."""
    server, body, sampling = server_of(request), work.body, work.sampling
    grammar = await check_wish(body, sampling, server, request)
    await server.llm.spell(sampling)
    mailbox = server.submit(
        work.prompts,
        sampling,
        priority=body.priority,
        is_streamed=bool(body.stream),
        grammar=grammar,
        model=work.model,
        kv_transfer=kv_wish(body.kv_transfer_params, server),
    )
    answer = Answer(mailbox, work.prompts, sampling.n)
    form = _CompletionForm(body, answer, work.model, server, work.texts, answer_id("cmpl", request, body))
    return await respond(request, body, answer, form)


ROUTE = Route(CompletionRequest, prepare, answer)


def _check(body: CompletionRequest) -> None:
    """Refuse what would be answered wrongly."""
    if body.suffix and body.echo:
        raise ApiError(
            400, "suffix cannot be had with echo: the prompt is not what it stands behind", param="suffix"
        )
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError(400, "prompt_logprobs cannot be streamed", param="prompt_logprobs")
    if body.stream and body.echo and body.logprobs is not None and (body.n or 1) > 1:
        raise ApiError(400, "logprobs with echo and n cannot be streamed", param="logprobs")
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens is 0, must be at least 1 (or use echo)", param="max_tokens")


def _sampling(body: CompletionRequest, renderer: Renderer) -> SamplingParams:
    defaults = renderer.default_sampling_params()
    wish = body.max_tokens if "max_tokens" in body.model_fields_set else defaults.max_tokens
    changes: dict[str, object] = {
        "structured_outputs": wish_of(body),
        "max_tokens": 1 if wish == 0 else most_tokens(wish, renderer.facts.options),
        "logprobs": body.logprobs,
    }
    if body.echo and body.logprobs is not None:
        changes["prompt_logprobs"] = body.logprobs
    return body.sampling(defaults, **changes)


def _tokenize(
    prompts: list[dict[str, object]], body: CompletionRequest, sampling: SamplingParams, renderer: Renderer
) -> list[TokenPrompt]:
    adds = body.add_special_tokens is not False
    if body.truncate_prompt_tokens is not None:
        most = renderer.most_prompt_tokens(body.truncate_prompt_tokens, sampling)
        prompts = [renderer.truncated(each, most, add_special_tokens=adds) for each in prompts]
    return renderer.tokenize(prompts, add_special_tokens=adds)


def _prompts(body: CompletionRequest, renderer: Renderer) -> list[dict[str, object]]:
    prompt = body.prompt
    single = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
    prompts = [prompt] if single else list(cast("list[str | list[int]]", prompt))
    if not prompts:
        raise ValueError("prompt is empty; give at least one")
    if body.suffix:
        if not all(isinstance(each, str) for each in prompts):
            raise ValueError("suffix needs a prompt that is text")
        prompts = [infilled(str(each), body.suffix, renderer.tokenizer) for each in prompts]
    return [_one_prompt(cast("str | list[int]", each), body.cache_salt) for each in prompts]


def _one_prompt(prompt: str | list[int], cache_salt: str | None) -> dict[str, object]:
    key = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    return {key: prompt} if cache_salt is None else {key: prompt, "cache_salt": cache_salt}


def _text(prompt: TokenPrompt, renderer: Renderer) -> str:
    if prompt.text is not None:
        return prompt.text
    return renderer.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)


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
        kept = self.answer.kv_transfer_params or UNSET
        return CompletionBody(self.id, self.created, self.model, choices, self._usage(), kept)

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
