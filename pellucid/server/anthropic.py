"""POST /v1/messages and /v1/messages/count_tokens: chats as Anthropic's clients have them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from pellucid.server.answer import Answer, Piece, Usage
from pellucid.server.chat import ChatWork, open_answer
from pellucid.server.chat import prepare as prepare_chat
from pellucid.server.context import server_of
from pellucid.server.errors import ApiError, encode_messages_error, named, users_fault
from pellucid.server.parsers.base import Content, Reasoning, ToolCallArguments, ToolCallStart, joined
from pellucid.server.parsers.base import Event as Said
from pellucid.server.protocol.anthropic import CountRequest, MessagesRequest
from pellucid.server.protocol.anthropic_output import (
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    End,
    Event,
    InputDelta,
    MessageBody,
    MessageDelta,
    MessageStart,
    MessageStop,
    Ping,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    TokenCount,
    TokenCounts,
    ToolUseBlock,
)
from pellucid.server.protocol.unserved import ALL, check_served
from pellucid.server.protocol.unserved import MESSAGES as OF_OTHERS
from pellucid.server.renderer import Renderer
from pellucid.server.respond import respond
from pellucid.server.route import Route
from pellucid.server.stream import Ending, encode
from pellucid.server.tokens import as_it_is

router = APIRouter()
NAMES = {"stop": "stop_sequences", "response_format": "output_config"}  # of a chat's fields, here
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


@router.post("/v1/messages", summary="Answer a conversation, as Anthropic does")
async def create_message(body: MessagesRequest, request: Request) -> Response:
    return await server_of(request).preprocessor.take(MESSAGES, body, request)


@router.post("/v1/messages/count_tokens", summary="Count the tokens of a conversation")
async def count_tokens(body: CountRequest, request: Request) -> Response:
    return await server_of(request).preprocessor.take(COUNT, body, request)


def prepare(body: MessagesRequest, renderer: Renderer) -> ChatWork:
    """The same as a chat's."""
    renderer.check_model(body)
    with users_fault(ALL):
        check_served(body.model_extra or {}, OF_OTHERS)
        chat = body.chat()
    with named(NAMES):
        return prepare_chat(chat, renderer)


async def answer(work: ChatWork, request: Request) -> Response:
    """Hand a conversation to the engine."""
    with named(NAMES):
        answer = await open_answer(work, server_of(request), request)
    return await respond(request, work.body, answer, _MessageForm(answer, work.model), ending=ENDING)


def counted(body: CountRequest, renderer: Renderer) -> bytes:
    """The answer, as JSON."""
    renderer.check_model(body)
    with users_fault(ALL):
        check_served(body.model_extra or {})
        text = renderer.render(body.chat())
        tokens = renderer.tokenizer.encode(text, add_special_tokens=False)
    return encode(TokenCount(len(tokens)))


MESSAGES = Route(MessagesRequest, prepare, answer)
COUNT = Route(CountRequest, counted, as_it_is, needs_engine=False)


@dataclass(slots=True)
class _MessageForm:
    """Writes an answer in this route's form."""

    answer: Answer
    model: str
    id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex[:24]}")
    num_blocks: int = 0  # of the stream, begun
    open: type[Block] | None = None  # what the last of them is, until it has ended

    def begin(self) -> bytes:
        start = MessageStart(MessageBody(self.id, self.model, [], _counts(self.answer.usage)))
        return _event(start) + _event(Ping())

    def events(self, pieces: list[Piece]) -> bytes:
        return b"".join([_event(each) for piece in pieces for each in self._events(piece)])

    def end(self) -> bytes:
        return b""

    async def whole(self) -> MessageBody | None:
        pieces = await self.answer.whole()
        if not pieces:
            return None
        end = _end(pieces[0])
        return MessageBody(
            id=self.id,
            model=self.model,
            content=list(_blocks(pieces[0].events)),
            usage=_counts(self.answer.usage),
            stop_reason=end.stop_reason,
            stop_sequence=end.stop_sequence,
        )

    def _events(self, piece: Piece) -> Iterator[Event]:
        for each in piece.events:
            match each:
                case Content(text):
                    if self.open is not TextBlock:
                        yield from self._begin(TextBlock())
                    yield self._delta(TextDelta(text))
                case Reasoning(text):
                    if self.open is not ThinkingBlock:
                        yield from self._begin(ThinkingBlock())
                    yield self._delta(ThinkingDelta(text))
                case ToolCallStart(id, name):
                    yield from self._begin(ToolUseBlock(id, name))
                case ToolCallArguments(text):
                    yield self._delta(InputDelta(text))
        if piece.finish_reason is not None:
            yield from self._close()
            yield MessageDelta(_end(piece), _counts(self.answer.usage))
            yield MessageStop()

    def _begin(self, block: Block) -> Iterator[Event]:
        yield from self._close()
        self.num_blocks += 1
        self.open = type(block)
        yield BlockStart(self.num_blocks - 1, block)

    def _delta(self, delta: TextDelta | ThinkingDelta | InputDelta) -> Event:
        return BlockDelta(self.num_blocks - 1, delta)

    def _close(self) -> Iterator[Event]:
        if self.open is not None:
            self.open = None
            yield BlockStop(self.num_blocks - 1)


def _blocks(events: list[Said]) -> Iterator[Block]:
    """All events of an answer as blocks."""
    call: ToolUseBlock | None = None
    for each in joined(events):
        match each:
            case Content(text):
                yield TextBlock(text)
            case Reasoning(text):
                yield ThinkingBlock(text)
            case ToolCallStart(id, name):
                call = ToolUseBlock(id, name)
                yield call
            case ToolCallArguments(text):
                assert call is not None
                call.input = _input(text)


def _input(text: str) -> dict[str, object]:
    """The arguments; none, if they were cut off."""
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.DecodeError, RecursionError):
        return {}


def _end(piece: Piece) -> End:
    reason = REASONS.get(piece.finish_reason or "", piece.finish_reason)
    if reason == "end_turn" and isinstance(piece.stop_reason, str):
        return End("stop_sequence", piece.stop_reason)
    return End(reason, None)


def _counts(usage: Usage) -> TokenCounts:
    num_new = usage.num_prompt_tokens - usage.num_cached_tokens
    return TokenCounts(num_new, usage.num_completion_tokens, usage.num_cached_tokens)


def _event(value: Event) -> bytes:
    name = value.__struct_config__.tag
    assert isinstance(name, str)
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode(value))


def _failure(error: ApiError) -> bytes:
    return b"event: error\ndata: %b\n\n" % encode_messages_error(error)


ENDING = Ending(_failure, b"")
