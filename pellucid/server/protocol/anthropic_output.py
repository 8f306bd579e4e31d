"""Anthropic's answers, whole and as the events of a stream."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType


class Typed(msgspec.Struct, tag_field="type"):
    """A struct that names its type."""


class TextBlock(Typed, tag="text"):
    text: str = ""


class ThinkingBlock(Typed, tag="thinking"):
    """signature: nobody signs here, but clients expect one."""

    thinking: str = ""
    signature: str = ""


class ToolUseBlock(Typed, tag="tool_use"):
    id: str
    name: str
    input: dict[str, object] = msgspec.field(default_factory=dict[str, object])


Block = TextBlock | ThinkingBlock | ToolUseBlock


class TokenCounts(msgspec.Struct):
    """input_tokens: those that the cache did not have."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class MessageBody(Typed, tag="message"):
    id: str
    model: str
    content: list[Block]
    usage: TokenCounts
    stop_reason: str | None = None
    stop_sequence: str | None = None
    role: str = "assistant"


class TokenCount(msgspec.Struct):
    input_tokens: int


class ModelInfo(msgspec.Struct):
    """A model; created_at in RFC 3339, max_input_tokens with those of the answer."""

    id: str
    display_name: str
    created_at: str
    max_input_tokens: int
    type: str = "model"


class ModelInfos(msgspec.Struct):
    data: list[ModelInfo]
    first_id: str
    last_id: str
    has_more: bool = False


class MessageStart(Typed, tag="message_start"):
    message: MessageBody


class Ping(Typed, tag="ping"):
    pass


class BlockStart(Typed, tag="content_block_start"):
    index: int
    content_block: Block


class TextDelta(Typed, tag="text_delta"):
    text: str


class ThinkingDelta(Typed, tag="thinking_delta"):
    thinking: str


class InputDelta(Typed, tag="input_json_delta"):
    partial_json: str


class BlockDelta(Typed, tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | InputDelta


class BlockStop(Typed, tag="content_block_stop"):
    index: int


class End(msgspec.Struct):
    stop_reason: str | None
    stop_sequence: str | None


class MessageDelta(Typed, tag="message_delta"):
    delta: End
    usage: TokenCounts


class MessageStop(Typed, tag="message_stop"):
    pass


Event = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


class Failure(msgspec.Struct):
    type: str
    message: str


class ErrorBody(Typed, tag="error"):
    error: Failure
    request_id: str | None | UnsetType = UNSET
