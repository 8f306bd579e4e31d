"""POST /v1/responses and what belongs to it: OpenAI's responses, chats whose past may be kept here."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from pellucid.server.answer import Answer, Piece, Usage
from pellucid.server.chat import ChatWork, message_of, open_answer
from pellucid.server.chat import prepare as prepare_chat
from pellucid.server.context import Server, client_of, server_of
from pellucid.server.errors import ApiError, named, users_fault
from pellucid.server.guard import go_on_counting
from pellucid.server.logprobs import Speller, chat_logprobs
from pellucid.server.options import ServeOptions
from pellucid.server.parsers.base import Content, Reasoning, ToolCallArguments, ToolCallStart
from pellucid.server.parsers.base import Event as Said
from pellucid.server.protocol.openai import ChatRequest, JsonObject
from pellucid.server.protocol.openai_output import TokenLogprob
from pellucid.server.protocol.responses import ResponsesRequest, input_items
from pellucid.server.protocol.responses_output import (
    ArgumentsDelta,
    ArgumentsDone,
    Completed,
    Created,
    Deleted,
    Event,
    Failed,
    FunctionCall,
    Incomplete,
    IncompleteDetails,
    InProgress,
    InputDetails,
    InputItems,
    InputTokens,
    Item,
    ItemAdded,
    ItemDone,
    Message,
    OutputDetails,
    OutputText,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    ReasoningItem,
    ReasoningText,
    ResponseBody,
    ResponseError,
    ResponseUsage,
    TextDelta,
    TextDone,
)
from pellucid.server.protocol.unserved import ALL, RESPONSES, check_served
from pellucid.server.renderer import Renderer
from pellucid.server.respond import json_response, respond
from pellucid.server.route import Route
from pellucid.server.stored_responses import StoredResponse
from pellucid.server.stream import Ending, encode
from pellucid.server.tokens import as_it_is

router = APIRouter()
PATH = "/v1/responses"
NAMES = {  # of a chat's fields, here
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text",
    "logprobs": "top_logprobs",
    "reasoning_effort": "reasoning",
}


@router.post(PATH, summary="Answer a conversation, as a response")
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    return await server_of(request).preprocessor.take(ROUTE, body, request)


@router.post(PATH + "/input_tokens", summary="Count the tokens of a conversation")
async def count_input_tokens(body: ResponsesRequest, request: Request) -> Response:
    return await server_of(request).preprocessor.take(COUNT, body, request)


@router.get(PATH + "/{id}", summary="A stored response")
async def show_response(id: str, request: Request) -> Response:
    if request.query_params.get("stream") == "true":
        raise ApiError(400, "a stored response is not streamed again; ask for it without stream")
    return json_response(_stored(id, request).body)


@router.delete(PATH + "/{id}", summary="Forget a stored response")
async def delete_response(id: str, request: Request) -> Response:
    server_of(request).responses.delete(id, owner_of(request))
    return json_response(Deleted(id))


@router.post(PATH + "/{id}/cancel", summary="End a response that is made in the background")
async def cancel_response(id: str, request: Request) -> Response:
    stored = _stored(id, request)
    if not stored.body.background:
        raise ApiError(400, "only a response with background: true can be cancelled; close the connection")
    if stored.close is not None and stored.task is not None:
        stored.close()
        await asyncio.wait([stored.task])
    return json_response(stored.body)


@router.get(PATH + "/{id}/input_items", summary="What a stored response answers")
async def list_input_items(
    id: str,
    request: Request,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    items = input_items(_stored(id, request).own, id)
    if order == "desc":
        items.reverse()
    names = [str(item["id"]) for item in items]
    if after is not None and after not in names:
        raise ApiError(400, f"after is {after!r}, which is no item of this response", param="after")
    begin = 0 if after is None else names.index(after) + 1
    shown = names[begin : begin + limit] or [None]
    has_more = begin + limit < len(items)
    return json_response(InputItems(items[begin : begin + limit], shown[0], shown[-1], has_more=has_more))


def owner_of(request: Request) -> str:
    """Whose a response is: those who bring the same key share theirs."""
    return client_of(request).partition(" ")[2]


def _stored(id: str, request: Request) -> StoredResponse:
    return server_of(request).responses.get(id, owner_of(request))


@dataclass(frozen=True, slots=True)
class ResponseWork:
    """A request, and the chat that it is; None if that goes on from what another process does not know."""

    body: ResponsesRequest
    messages: list[JsonObject]
    chat: ChatWork | None

    def slim(self) -> ResponseWork:
        return self if self.chat is None else replace(self, chat=self.chat.slim())


@dataclass(frozen=True, slots=True)
class Continued:
    """A request and what was said before it."""

    body: ResponsesRequest
    history: Sequence[JsonObject]


def prepare(body: ResponsesRequest, renderer: Renderer) -> ResponseWork:
    """All that needs no engine, nor a stored response."""
    renderer.check_model(body)
    with users_fault(ALL):
        check_served(body.model_extra or {}, RESPONSES)
    with users_fault(ResponsesRequest.model_fields):
        _check(body, renderer.facts.options)
        messages = body.messages()
    if body.previous_response_id is not None:
        return ResponseWork(body, messages, None)
    return ResponseWork(body, messages, prepare_continued(Continued(body, ()), renderer))


def prepare_continued(work: Continued, renderer: Renderer) -> ChatWork:
    """The chat that a request is."""
    with users_fault(ResponsesRequest.model_fields):
        chat = work.body.chat(work.history)
    with named(NAMES):
        return prepare_chat(chat, renderer)


def _check(body: ResponsesRequest, options: ServeOptions) -> None:
    if body.background and (body.stream or body.store is False):
        raise ValueError("background needs store to be true, and stream to be false")
    if body.background and not options.max_stored_responses:
        raise ValueError("background needs a server that stores responses (--max-stored-responses)")


async def answer(work: ResponseWork, request: Request) -> Response:
    """Hand a conversation to the engine."""
    server, body, history = server_of(request), work.body, list[JsonObject]()
    chat = work.chat
    if body.previous_response_id is not None:
        before = server.responses.get(
            body.previous_response_id, owner_of(request), param="previous_response_id"
        )
        if before.body.status == "in_progress":
            raise ApiError(400, f"the response {before.body.id!r} is still in progress; wait for its end")
        history = [*before.messages]
        chat = await server.preprocessor.in_thread(prepare_continued, Continued(body, history))
    assert chat is not None
    with named(NAMES):
        answer = await open_answer(chat, server, request)
    form = _ResponseForm(
        chat.body, answer, server, _body(body, chat), owner_of(request), history, work.messages
    )
    if body.background:
        begun, task = form.run()
        go_on_counting(request.scope, task, server)
        return json_response(begun)
    return await respond(request, body, answer, form, ending=Ending(form.failure, b""))


def counted(body: ResponsesRequest, renderer: Renderer) -> bytes:
    """How many tokens a request's conversation has, as JSON."""
    renderer.check_model(body)
    with users_fault(ALL):
        check_served(body.model_extra or {}, RESPONSES)
    with users_fault(ResponsesRequest.model_fields):
        if body.previous_response_id is not None:
            raise ValueError("previous_response_id is not looked up here; put the conversation in input")
        text = renderer.render(body.chat())
        return encode(InputTokens(len(renderer.tokenizer.encode(text, add_special_tokens=False))))


ROUTE = Route(ResponsesRequest, prepare, answer)
COUNT = Route(ResponsesRequest, counted, as_it_is, needs_engine=False)


def _body(body: ResponsesRequest, chat: ChatWork) -> ResponseBody:
    """What a response repeats of its request."""
    return ResponseBody(
        id=f"resp_{uuid.uuid4().hex}",
        created_at=int(time.time()),
        model=chat.model,
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        reasoning={"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        store=body.store is not False,
        temperature=chat.sampling.temperature,
        text={"format": (body.text.format if body.text else None) or {"type": "text"}},
        tool_choice=body.tool_choice or "auto",
        tools=[{"parameters": None, "strict": None, **tool} for tool in body.tools or ()],
        top_logprobs=body.top_logprobs,
        top_p=chat.sampling.top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
    )


@dataclass(slots=True)
class _ResponseForm:
    """Writes an answer in this route's form, and keeps it."""

    chat: ChatRequest
    answer: Answer
    server: Server
    body: ResponseBody
    owner: str
    history: list[JsonObject]
    messages: list[JsonObject]
    said: list[Said] = field(default_factory=list[Said])
    num_events: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])

    def begin(self) -> bytes:
        return self._written([Created(response=self.body), InProgress(response=self.body)])

    def events(self, pieces: list[Piece]) -> bytes:
        return b"".join([self._written(self._read(piece)) for piece in pieces])

    def end(self) -> bytes:
        return b""

    async def whole(self) -> ResponseBody:
        for piece in await self.answer.whole():
            for _ in self._read(piece):
                pass
        return self.body

    def run(self) -> tuple[ResponseBody, asyncio.Task[None]]:
        """Go on in the background; what there is now, and what goes on."""
        begun = msgspec.structs.replace(self.body)
        stored = self._keep()
        stored.close = self.answer.close
        stored.task = asyncio.create_task(self._run(stored))
        return begun, stored.task

    def failure(self, error: ApiError) -> bytes:
        """The event that ends a stream too early."""
        self._fail(error)
        return self._written([Failed(response=self.body)])

    async def _run(self, stored: StoredResponse) -> None:
        try:
            await self.whole()
        except ApiError as error:
            self._fail(error)
        if self.body.status == "in_progress":
            self.body.status = "cancelled"
        stored.close = None
        self.server.responses.end(stored)

    def _fail(self, error: ApiError) -> None:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        self.body.status, self.body.error = "failed", ResponseError(code, error.message)

    # From what a parser says to items, and the events that tell of them.

    def _read(self, piece: Piece) -> Iterator[Event]:
        logprobs = self._logprobs(piece)
        for said in piece.events:
            self.said.append(said)
            match said:
                case Content(text):
                    yield from self._say(text, logprobs)
                    logprobs = []
                case Reasoning(text):
                    yield from self._think(text)
                case ToolCallStart(id, name):
                    yield from self._begin(FunctionCall(_id("fc"), id, name))
                case ToolCallArguments(text):
                    call = self.body.output[-1]
                    assert isinstance(call, FunctionCall)
                    call.arguments += text
                    yield ArgumentsDelta(item_id=call.id, output_index=self._index, delta=text)
        if piece.finish_reason is not None:
            yield from self._finish(piece)

    def _say(self, text: str, logprobs: list[TokenLogprob]) -> Iterator[Event]:
        item = self._open
        if not isinstance(item, Message):
            item = Message(_id("msg"))
            yield from self._begin(item)
            item.content.append(OutputText())
            yield PartAdded(item_id=item.id, output_index=self._index, part=OutputText())
        item.content[0].text += text
        item.content[0].logprobs += logprobs
        yield TextDelta(item_id=item.id, output_index=self._index, delta=text, logprobs=logprobs)

    def _think(self, text: str) -> Iterator[Event]:
        item = self._open
        if not isinstance(item, ReasoningItem):
            item = ReasoningItem(_id("rs"))
            yield from self._begin(item)
            item.content.append(ReasoningText())
            yield PartAdded(item_id=item.id, output_index=self._index, part=ReasoningText())
        item.content[0].text += text
        yield ReasoningDelta(item_id=item.id, output_index=self._index, delta=text)

    def _begin(self, item: Item) -> Iterator[Event]:
        yield from self._close("completed")
        self.body.output.append(item)
        yield ItemAdded(output_index=self._index, item=item)

    def _close(self, status: str) -> Iterator[Event]:
        item, index = self._open, self._index
        if item is None:
            return
        item.status = status
        match item:
            case Message(id, [part]):
                yield TextDone(item_id=id, output_index=index, text=part.text, logprobs=part.logprobs)
                yield PartDone(item_id=id, output_index=index, part=part)
            case ReasoningItem(id, [part]):
                yield ReasoningDone(item_id=id, output_index=index, text=part.text)
                yield PartDone(item_id=id, output_index=index, part=part)
            case FunctionCall(id, _, name, arguments):
                yield ArgumentsDone(item_id=id, output_index=index, name=name, arguments=arguments)
            case _:
                pass
        yield ItemDone(output_index=index, item=item)

    def _finish(self, piece: Piece) -> Iterator[Event]:
        is_whole = piece.finish_reason != "length"
        if not self.body.output:  # clients look for a message
            yield from self._say("", [])
        yield from self._close("completed" if is_whole else "incomplete")
        self.body.usage = self._usage(self.answer.usage)
        self.body.completed_at = int(time.time())
        self.body.status = "completed" if is_whole else "incomplete"
        if not is_whole:
            self.body.incomplete_details = IncompleteDetails("max_output_tokens")
        if self.body.store:
            self._keep()
        yield Completed(response=self.body) if is_whole else Incomplete(response=self.body)

    @property
    def _open(self) -> Item | None:
        """The item that goes on."""
        last = self.body.output[-1] if self.body.output else None
        return last if last is not None and last.status == "in_progress" else None

    @property
    def _index(self) -> int:
        return len(self.body.output) - 1

    def _written(self, events: Iterator[Event] | list[Event]) -> bytes:
        return b"".join([self._event(event) for event in events])

    def _event(self, event: Event) -> bytes:
        event.sequence_number, self.num_events = self.num_events, self.num_events + 1
        name = event.__struct_config__.tag
        assert isinstance(name, str)
        return b"event: %b\ndata: %b\n\n" % (name.encode(), encode(event))

    def _usage(self, usage: Usage) -> ResponseUsage:
        num_prompt, num_new = usage.num_prompt_tokens, usage.num_completion_tokens
        return ResponseUsage(
            input_tokens=num_prompt,
            input_tokens_details=InputDetails(usage.num_cached_tokens),
            output_tokens=num_new,
            output_tokens_details=OutputDetails(usage.num_reasoning_tokens),
            total_tokens=num_prompt + num_new,
        )

    def _logprobs(self, piece: Piece) -> list[TokenLogprob]:
        speller = Speller(self.server.llm.tokenizer, False)
        found = chat_logprobs(piece, self.chat.top_logprobs or 0, speller)
        return [] if found is None else found.content

    def _keep(self) -> StoredResponse:
        messages = [*self.history, *self.messages, *self._answered()]
        stored = StoredResponse(body=self.body, owner=self.owner, messages=messages, own=self.messages)
        self.server.responses.put(stored)
        return stored

    def _answered(self) -> list[JsonObject]:
        """The answer, as the message that a conversation goes on behind."""
        if not self.said:
            return []
        message = message_of(self.said, wants_reasoning=True)
        message.content = message.content or ""
        return [msgspec.to_builtins(message)]


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
