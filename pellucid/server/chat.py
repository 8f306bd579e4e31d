"""POST /v1/chat/completions: a conversation to its next message."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import Response
from msgspec import UNSET

from pellucid.sampling_params import SamplingParams
from pellucid.server.answer import Answer, Piece
from pellucid.server.context import Server, server_of
from pellucid.server.errors import ApiError, named, users_fault
from pellucid.server.kv_transfer import kv_wish
from pellucid.server.limits import check_limits, check_small, most_tokens
from pellucid.server.logprobs import Speller, chat_logprobs, prompt_logprobs_of
from pellucid.server.parsers.base import (
    Content,
    Event,
    ParserSetting,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)
from pellucid.server.protocol.openai import ChatRequest
from pellucid.server.protocol.openai_output import (
    ChatBody,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    FunctionCall,
    ToolCall,
)
from pellucid.server.protocol.unserved import ALL, OPENAI_CHAT, check_served
from pellucid.server.renderer import Renderer, tools_of
from pellucid.server.respond import answer_id, respond, running_usage, usage_facts, usage_of_chunk
from pellucid.server.route import Route
from pellucid.server.stream import Envelope, event
from pellucid.server.structured import check_wish, thinking_in, wish_of, within_markup
from pellucid.server.tools import ToolUse, forced_calls, strict_calls
from pellucid.text.prompts import TokenPrompt
from pellucid.text.tokenizer import check_text

router = APIRouter()


@router.post("/v1/chat/completions", summary="Answer a conversation")
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    return await server_of(request).preprocessor.take(ROUTE, body, request)


@dataclass(frozen=True, slots=True)
class ChatWork:
    """A conversation that waits for the engine alone."""

    body: ChatRequest
    model: str
    use: ToolUse
    sampling: SamplingParams
    prompt: TokenPrompt

    def slim(self) -> ChatWork:
        """Without what only the prompt was made of: all messages but the last one's text."""
        body = self.body
        with users_fault(ChatRequest.model_fields):
            check_small(
                tools=body.tools,
                tool_choice=body.tool_choice,
                response_format=body.response_format,
            )
        content = body.messages[-1].get("content")
        last: dict[str, object] = {"content": content if isinstance(content, str) else None}
        kept = {"messages": [last], "chat_template_kwargs": None, "documents": None}
        body = body.model_copy(update=kept)
        body.__pydantic_extra__ = {}
        return replace(self, body=body)


def prepare(body: ChatRequest, renderer: Renderer) -> ChatWork:
    """All that needs no engine."""
    model = renderer.check_model(body)
    _check(body)
    with users_fault(ALL):
        check_served(body.model_extra or {}, OPENAI_CHAT, n=body.n or 1)
    with named(_names(body)), users_fault(ChatRequest.model_fields):
        use, sampling = tool_use(body, renderer), _sampling(body, renderer)
        check_limits(sampling, renderer.facts.options)
        return ChatWork(body, model, use, sampling, _tokenize(body, sampling, renderer))


async def answer(work: ChatWork, request: Request) -> Response:
    """Hand a conversation to the engine."""
    server, body = server_of(request), work.body
    answer = await open_answer(work, server, request)
    form = _ChatForm(body, answer, work.model, server, answer_id("chatcmpl", request, body))
    return await respond(request, body, answer, form)


ROUTE = Route(ChatRequest, prepare, answer)


async def open_answer(work: ChatWork, server: Server, request: Request) -> Answer:
    """The engine's answer, as it comes."""
    with named(_names(work.body)):
        return await _open(work, server, request)


def _names(body: ChatRequest) -> dict[str, str]:
    """What this request calls the fields that have two names."""
    names: dict[str, str] = {}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    if body.top_logprobs is not None:
        names["logprobs"] = "top_logprobs"
    return names


async def _open(work: ChatWork, server: Server, request: Request) -> Answer:
    body, use, sampling, prompt = work.body, work.use, work.sampling, work.prompt
    with users_fault(ChatRequest.model_fields):
        parser = server.parsers.tools
        forced, strict = forced_calls(use, parser), strict_calls(use, parser)
        wish = wish_of(body, forced=forced, strict=strict)
        if wish is not None:
            if wish.structural_tag is None or wish.structural_tag not in (forced, strict):
                wish = within_markup(wish, body, server)
            wish.thinking = thinking_in(prompt, body, server)
            sampling.structured_outputs = wish
    grammar = await check_wish(body, sampling, server, request)
    await server.llm.spell(sampling)
    mailbox = server.submit(
        [prompt],
        sampling,
        priority=body.priority,
        is_streamed=bool(body.stream),
        grammar=grammar,
        model=work.model,
        kv_transfer=kv_wish(body.kv_transfer_params, server),
    )
    # What a structural tag leaves free is text as any other.
    is_constrained = wish is not None and wish.structural_tag is None
    setting = _parser_setting(body, use, prompt, is_constrained=is_constrained)
    make_parser = partial(server.parsers.make, setting)
    count_calls = partial(server.metrics.parsed, is_streamed=bool(body.stream)) if use.tools else None
    return Answer(mailbox, [prompt], sampling.n, make_parser, count_calls, server.thoughts_end)


def tool_use(body: ChatRequest, renderer: Renderer) -> ToolUse:
    """The tools that the answer may call.  Raises ValueError if it cannot."""
    use, facts = tools_of(body), renderer.facts
    use.check_parser(facts.parsers.tools, is_auto_enabled=facts.options.enable_auto_tool_choice)
    return use


def _check(body: ChatRequest) -> None:
    """Refuse what would be answered wrongly."""
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError(400, "prompt_logprobs cannot be streamed", param="prompt_logprobs")


def _sampling(body: ChatRequest, renderer: Renderer) -> SamplingParams:
    defaults, options = renderer.facts.defaults, renderer.facts.options
    wishes = (body.max_completion_tokens, body.max_tokens, defaults.max_tokens)
    wish = next((wish for wish in wishes if wish is not None), None)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = body.sampling(defaults, max_tokens=most_tokens(wish, options), logprobs=logprobs)
    return sampling.clone(skip_special_tokens=False) if renderer.shows_special_tokens else sampling


def _tokenize(body: ChatRequest, sampling: SamplingParams, renderer: Renderer) -> TokenPrompt:
    text = renderer.render(body)
    asked: Mapping[str, object] = {"prompt": text}
    if body.truncate_prompt_tokens is not None:
        most = renderer.most_prompt_tokens(body.truncate_prompt_tokens, sampling)
        asked = renderer.truncated(asked, most, add_special_tokens=False)
    (prompt,) = renderer.tokenize([asked], add_special_tokens=False)  # the template has put them in
    prompt = replace(prompt, text=text)  # parsers look at its end
    check_text("cache_salt", body.cache_salt or "")
    return replace(prompt, cache_salt=body.cache_salt)


def _parser_setting(
    body: ChatRequest, use: ToolUse, prompt: TokenPrompt, *, is_constrained: bool
) -> ParserSetting:
    last = body.messages[-1].get("content") if body.continue_final_message else None
    return ParserSetting(
        prompt=prompt.text or "",
        continued=last if isinstance(last, str) else "",
        tools=use.tools,
        is_forced=use.is_forced,
        is_parallel=use.is_parallel,
        is_constrained=is_constrained,
    )


@dataclass(slots=True)
class _ChatForm:
    """Writes an answer in this route's form."""

    body: ChatRequest
    answer: Answer
    model: str
    server: Server
    id: str
    created: int = field(default_factory=lambda: int(time.time()))
    num_calls: dict[int, int] = field(default_factory=dict[int, int])  # tool calls begun, of each choice
    is_plain: bool = field(init=False)  # is a text all that is new in most chunks, but for the usage?
    envelopes: dict[tuple[int, type[Event]], Envelope] = field(
        default_factory=dict[tuple[int, type[Event]], Envelope]
    )  # of each choice

    def __post_init__(self) -> None:
        body = self.body
        self.is_plain = not (body.return_token_ids or body.logprobs)

    def begin(self) -> bytes:
        return b""

    def events(self, pieces: list[Piece]) -> bytes:
        return b"".join([chunk for piece in pieces for chunk in self._chunks(piece)])

    def end(self) -> bytes:
        if not self.body.wants_usage:
            return b""
        return event(ChatChunk(self.id, self.created, self.model, [], usage_facts(self.answer.usage)))

    async def whole(self) -> ChatBody:
        pieces = await self.answer.whole()
        body = ChatBody(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[self._choice(piece) for piece in pieces],
            usage=usage_facts(self.answer.usage),
            kv_transfer_params=self.answer.kv_transfer_params or UNSET,
        )
        if self.body.return_token_ids:
            body.prompt_token_ids = self.answer.prompts[0].token_ids
        if self.body.prompt_logprobs is not None and pieces:
            body.prompt_logprobs = prompt_logprobs_of(pieces[0])
        return body

    def _choice(self, piece: Piece) -> ChatChoice:
        message = message_of(piece.events, wants_reasoning=self.body.include_reasoning is not False)
        if self.body.echo and message.content is not None:
            message.content = self._echo() + message.content
        return ChatChoice(
            index=piece.index,
            message=message,
            logprobs=self._logprobs(piece),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=piece.token_ids if self.body.return_token_ids else UNSET,
        )

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        if piece.logprobs is None:
            return None
        speller = Speller(self.server.llm.tokenizer, bool(self.body.return_tokens_as_token_ids))
        return chat_logprobs(piece, self.body.top_logprobs or 0, speller)

    def _echo(self) -> str:
        """The last message, if it is text: what the answer may be the continuation of."""
        content = self.body.messages[-1].get("content")
        return content if isinstance(content, str) else ""

    def _chunks(self, piece: Piece) -> list[bytes]:
        """The events of one piece; logprobs, ids and the end go with the last delta."""
        if self.is_plain and not piece.is_first and piece.finish_reason is None:
            return [self._chunk(piece.index, each) for each in self._shown(piece.events)]
        deltas = self._deltas(piece)
        if not deltas:
            return []
        choices = [ChatChunkChoice(piece.index, delta) for delta in deltas]
        last = choices[-1]
        if piece.logprobs is not None:
            last.logprobs = self._logprobs(piece)
        if self.body.return_token_ids:
            last.token_ids = piece.token_ids
        if piece.finish_reason is not None:
            last.finish_reason, last.stop_reason = piece.finish_reason, piece.stop_reason
        usage = usage_of_chunk(self.body, self.answer.usage)
        chunks = [ChatChunk(self.id, self.created, self.model, [choice], usage) for choice in choices]
        if self.body.return_token_ids and piece.is_first:
            chunks[0].prompt_token_ids = self.answer.prompts[0].token_ids
        return [event(chunk) for chunk in chunks]

    def _chunk(self, index: int, each: Event) -> bytes:
        """The event that carries nothing but this."""

        def make(shown: Event) -> ChatChunk:
            choice = ChatChunkChoice(index, self._delta(index, shown))
            usage = usage_of_chunk(self.body, self.answer.usage)
            return ChatChunk(self.id, self.created, self.model, [choice], usage)

        if not isinstance(each, Content | Reasoning):
            return event(make(each))
        kind, usage = type(each), running_usage(self.body, self.answer.usage)
        envelope = self.envelopes.get((index, kind))
        if envelope is None:
            envelope = self.envelopes[index, kind] = Envelope(lambda text: make(kind(text)), usage)
        return envelope.of(each.text, usage)

    def _shown(self, events: list[Event]) -> list[Event]:
        if self.body.include_reasoning is False:
            return [each for each in events if not isinstance(each, Reasoning)]
        return events

    def _deltas(self, piece: Piece) -> list[ChatDelta]:
        deltas: list[ChatDelta] = []
        if piece.is_first:
            deltas.append(ChatDelta("assistant", self._echo() if self.body.echo else ""))
        deltas += [self._delta(piece.index, each) for each in self._shown(piece.events)]
        needs_one = piece.finish_reason is not None or piece.logprobs or self.body.return_token_ids
        if not deltas and not needs_one:
            return []
        return deltas or [ChatDelta()]

    def _delta(self, index: int, each: Event) -> ChatDelta:
        match each:
            case Content(text):
                return ChatDelta(content=text)
            case Reasoning(text):
                return ChatDelta(reasoning=text, reasoning_content=text)
            case ToolCallStart(id, name):
                number = self.num_calls[index] = self.num_calls.get(index, -1) + 1
                function = FunctionCall(name, "")
                return ChatDelta(tool_calls=[ToolCall(id, "function", number, function)])
            case ToolCallArguments(text):
                function = FunctionCall(arguments=text)
                return ChatDelta(tool_calls=[ToolCall(index=self.num_calls[index], function=function)])


def message_of(events: list[Event], *, wants_reasoning: bool) -> ChatMessage:
    """All events of a choice as one message."""
    content = "".join([each.text for each in events if isinstance(each, Content)])
    reasoning = "".join([each.text for each in events if isinstance(each, Reasoning)])
    calls: list[ToolCall] = []
    arguments: list[str] = []
    for each in events:
        if isinstance(each, ToolCallStart):
            calls.append(ToolCall(each.id, "function", function=FunctionCall(each.name, "")))
            arguments.append("")
        elif isinstance(each, ToolCallArguments):
            arguments[-1] += each.text
    for call, text in zip(calls, arguments, strict=True):
        assert isinstance(call.function, FunctionCall)
        call.function.arguments = text
    message = ChatMessage("assistant", content if content or not calls else None)
    if reasoning and wants_reasoning:
        message.reasoning = message.reasoning_content = reasoning
    if calls:
        message.tool_calls = calls
    return message
