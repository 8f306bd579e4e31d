"""Anthropic's requests, and what they are as chats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from pellucid.server.protocol.openai import ApiRequest, ChatRequest, Integer, JsonObject, Number

BILLING = "x-anthropic-billing-header:"


class TextPart(ApiRequest):
    type: Literal["text"]
    text: str


def _shape(content: object) -> str:
    return "parts" if isinstance(content, list) else "text"


Text = Annotated[Annotated[str, Tag("text")] | Annotated[list[TextPart], Tag("parts")], Discriminator(_shape)]


class ThinkingPart(ApiRequest):
    """Earlier thinking; a template shows it where the model wants it."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None  # nobody here has signed it


class RedactedPart(ApiRequest):
    """Thinking that only Anthropic can read."""

    type: Literal["redacted_thinking"]


class ToolUsePart(ApiRequest):
    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonObject


class ToolResultPart(ApiRequest):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Text | None = None
    is_error: bool | None = None


def _kind(part: object) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else None
    return kind if isinstance(kind, str) else None


Part = Annotated[
    Annotated[TextPart, Tag("text")]
    | Annotated[ThinkingPart, Tag("thinking")]
    | Annotated[RedactedPart, Tag("redacted_thinking")]
    | Annotated[ToolUsePart, Tag("tool_use")]
    | Annotated[ToolResultPart, Tag("tool_result")],
    Discriminator(
        _kind,
        custom_error_type="unknown_part",
        custom_error_message="only parts of type text, thinking, tool_use and tool_result are supported",
    ),
]


class InputMessage(ApiRequest):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[str, Tag("text")] | Annotated[list[Part], Tag("parts")], Discriminator(_shape)
    ]


def _own_kind(kind: object) -> object:
    if kind in (None, "custom"):
        return kind
    raise PydanticCustomError(
        "server_tool",
        "this server runs no tools of its own, such as '{kind}'; give tools with an input_schema, and run "
        "them yourself",
        {"kind": str(kind)[:100]},
    )


class CustomTool(ApiRequest):
    type: Annotated[Literal["custom"] | None, BeforeValidator(_own_kind)] = None
    name: str
    description: str | None = None
    input_schema: JsonObject
    strict: bool | None = None


class ToolChoice(ApiRequest):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = False


class Thinking(ApiRequest):
    """budget_tokens is read and has no effect."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Integer | None = None


class CountRequest(ApiRequest):
    """POST /v1/messages/count_tokens."""

    model: str | None = None
    messages: list[InputMessage] = Field(min_length=1)
    system: Text | None = None
    tools: list[CustomTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: JsonObject | None = None
    chat_template_kwargs: JsonObject | None = None

    def chat(self) -> ChatRequest:
        """The same as a chat.

        Who does not ask for thinking gets none.  A last message of the assistant's is continued.
        """
        is_begun = self.messages[-1].role == "assistant"
        thinks = self.thinking is not None and self.thinking.type != "disabled"
        instructions = _instructions(self.system)
        system = [{"role": "system", "content": instructions}] if instructions else []
        return ChatRequest.model_construct(
            model=self.model,
            messages=[*system, *(each for message in self.messages for each in _messages(message))],
            tools=[_tool(tool) for tool in self.tools] if self.tools else None,
            tool_choice=_choice(self.tool_choice),
            parallel_tool_calls=not (self.tool_choice and self.tool_choice.disable_parallel_tool_use),
            chat_template_kwargs={"enable_thinking": thinks, **(self.chat_template_kwargs or {})},
            continue_final_message=is_begun,
        )


class MessagesRequest(CountRequest):
    """POST /v1/messages."""

    max_tokens: Integer
    stream: bool | None = False
    stop_sequences: list[str] | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Integer | None = None
    metadata: JsonObject | None = None
    service_tier: str | None = None

    def chat(self) -> ChatRequest:
        wishes = {
            "max_tokens": self.max_tokens,
            "stream": self.stream,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "response_format": self._format(),
        }
        return super().chat().model_copy(update=wishes)

    def _format(self) -> JsonObject | None:
        """As OpenAI writes it."""
        wish = (self.output_config or {}).get("format")
        if not isinstance(wish, dict):
            return None
        if wish.get("type") != "json_schema":
            raise ValueError("output_config has a format that is not of type json_schema")
        return {"type": "json_schema", "json_schema": {"name": "output", "schema": wish.get("schema")}}


def _instructions(system: str | list[TextPart] | None) -> str:
    """Without the line that Claude Code begins with for Anthropic's accounts.

    It is another for every session, in some versions for every request, and all that follows it would have to
    be computed anew.
    """
    if isinstance(system, list):
        system = [part for part in system if not part.text.startswith(BILLING)]
    return _text(system)


def _text(content: str | Sequence[TextPart] | None) -> str:
    return content or "" if isinstance(content, str | None) else "\n".join(part.text for part in content)


def _messages(message: InputMessage) -> Iterator[JsonObject]:
    """A chat's messages: results of tools are messages of their own, in the order of the parts."""
    parts = message.content
    if isinstance(parts, str):
        yield {"role": message.role, "content": parts}
        return
    if message.role == "assistant":
        yield _assistant(parts)
        return
    texts: list[str] = []
    for part in parts:
        if isinstance(part, ToolResultPart):
            if texts:
                yield {"role": message.role, "content": "\n".join(texts)}
                texts = []
            yield {"role": "tool", "tool_call_id": part.tool_use_id, "content": _text(part.content)}
        elif isinstance(part, TextPart):
            texts.append(part.text)
        else:
            raise ValueError(f"messages has a part of type {part.type!r} of the {message.role}'s")
    if texts or not parts:
        yield {"role": message.role, "content": "\n".join(texts)}


def _assistant(parts: Sequence[Part]) -> JsonObject:
    result: JsonObject = {"role": "assistant", "content": ""}
    for part in parts:
        match part:
            case TextPart():
                result["content"] = "\n".join(filter(None, [str(result["content"]), part.text]))
            case ThinkingPart():
                thoughts = result.get("reasoning_content")
                result["reasoning_content"] = f"{thoughts}\n{part.thinking}" if thoughts else part.thinking
            case ToolUsePart():
                function: JsonObject = {"name": part.name, "arguments": part.input}
                calls = result.setdefault("tool_calls", [])
                assert isinstance(calls, list)
                calls.append({"id": part.id, "type": "function", "function": function})
            case ToolResultPart():
                raise ValueError("messages has a tool_result that is not the user's")
            case RedactedPart():
                pass
    return result


def _tool(tool: CustomTool) -> JsonObject:
    function: JsonObject = {"name": tool.name, "description": tool.description or ""}
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": {**function, "parameters": tool.input_schema}}


def _choice(choice: ToolChoice | None) -> Literal["auto", "none", "required"] | JsonObject | None:
    match choice:
        case None:
            return None
        case ToolChoice(type="tool"):
            if choice.name is None:
                raise ValueError("tool_choice of type 'tool' needs a name")
            return {"type": "function", "function": {"name": choice.name}}
        case ToolChoice(type="any"):
            return "required"
        case ToolChoice(type="none"):
            return "none"
        case _:
            return "auto"
