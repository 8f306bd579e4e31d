"""OpenAI's responses, whole and as the events of a stream."""

from __future__ import annotations

import msgspec

from pellucid.server.protocol.openai_output import TokenLogprob


class Typed(msgspec.Struct, tag_field="type"):
    """A struct that names its type."""


class OutputText(Typed, tag="output_text"):
    text: str = ""
    annotations: list[object] = msgspec.field(default_factory=list[object])
    logprobs: list[TokenLogprob] = msgspec.field(default_factory=list[TokenLogprob])


class ReasoningText(Typed, tag="reasoning_text"):
    text: str = ""


Part = OutputText | ReasoningText


class Message(Typed, tag="message"):
    id: str
    content: list[OutputText] = msgspec.field(default_factory=list[OutputText])
    status: str = "in_progress"
    role: str = "assistant"


class ReasoningItem(Typed, tag="reasoning"):
    id: str
    content: list[ReasoningText] = msgspec.field(default_factory=list[ReasoningText])
    summary: list[object] = msgspec.field(default_factory=list[object])
    status: str = "in_progress"
    encrypted_content: str | None = None


class FunctionCall(Typed, tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: str = "in_progress"


Item = Message | ReasoningItem | FunctionCall


class InputDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    reason: str


class ResponseError(msgspec.Struct):
    code: str
    message: str


class ResponseBody(msgspec.Struct):
    """What the request said, and the answer to it."""

    id: str
    created_at: int
    model: str
    status: str = "in_progress"
    output: list[Item] = msgspec.field(default_factory=list[Item])
    usage: ResponseUsage | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    completed_at: int | None = None
    background: bool = False
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, object] = msgspec.field(default_factory=dict[str, object])
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: dict[str, object] = msgspec.field(default_factory=dict[str, object])
    store: bool = True
    temperature: float | None = None
    text: dict[str, object] = msgspec.field(default_factory=dict[str, object])
    tool_choice: object = "auto"
    tools: list[dict[str, object]] = msgspec.field(default_factory=list[dict[str, object]])
    top_logprobs: int | None = None
    top_p: float | None = None
    truncation: str = "disabled"
    user: str | None = None
    object: str = "response"


class Event(msgspec.Struct, tag_field="type", kw_only=True):
    """sequence_number: of the event in its stream, from 0."""

    sequence_number: int = 0


class Created(Event, tag="response.created", kw_only=True):
    response: ResponseBody


class InProgress(Event, tag="response.in_progress", kw_only=True):
    response: ResponseBody


class Completed(Event, tag="response.completed", kw_only=True):
    response: ResponseBody


class Incomplete(Event, tag="response.incomplete", kw_only=True):
    response: ResponseBody


class Failed(Event, tag="response.failed", kw_only=True):
    response: ResponseBody


class ItemAdded(Event, tag="response.output_item.added", kw_only=True):
    output_index: int
    item: Item


class ItemDone(Event, tag="response.output_item.done", kw_only=True):
    output_index: int
    item: Item


class PartEvent(Event, kw_only=True):
    """Of one part of an item's content."""

    item_id: str
    output_index: int
    content_index: int = 0


class PartAdded(PartEvent, tag="response.content_part.added", kw_only=True):
    part: Part


class PartDone(PartEvent, tag="response.content_part.done", kw_only=True):
    part: Part


class TextDelta(PartEvent, tag="response.output_text.delta", kw_only=True):
    delta: str
    logprobs: list[TokenLogprob] = msgspec.field(default_factory=list[TokenLogprob])


class TextDone(PartEvent, tag="response.output_text.done", kw_only=True):
    text: str
    logprobs: list[TokenLogprob] = msgspec.field(default_factory=list[TokenLogprob])


class ReasoningDelta(PartEvent, tag="response.reasoning_text.delta", kw_only=True):
    delta: str


class ReasoningDone(PartEvent, tag="response.reasoning_text.done", kw_only=True):
    text: str


class ArgumentsDelta(Event, tag="response.function_call_arguments.delta", kw_only=True):
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(Event, tag="response.function_call_arguments.done", kw_only=True):
    item_id: str
    output_index: int
    name: str
    arguments: str


class Deleted(msgspec.Struct):
    id: str
    object: str = "response"
    deleted: bool = True


class InputTokens(msgspec.Struct):
    """How long a request is."""

    input_tokens: int
    object: str = "response.input_tokens"


class InputItems(msgspec.Struct):
    """What a response answers; its items have names only in such a list."""

    data: list[dict[str, object]]
    first_id: str | None
    last_id: str | None
    object: str = "list"
    has_more: bool = False
