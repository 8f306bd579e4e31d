"""OpenAI's requests for responses, and what they are as chats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal, cast

from pydantic import Field

from pellucid.server.protocol.openai import ApiRequest, ChatRequest, Integer, JsonObject, Number, Words

TEXT_PARTS = ("input_text", "output_text", "text", "refusal")
LOGPROBS = "message.output_text.logprobs"


class ReasoningWish(ApiRequest):
    effort: str | None = None
    summary: str | None = None  # thoughts are shown as they are


class TextWish(ApiRequest):
    format: JsonObject | None = None
    verbosity: str | None = None


class ResponsesRequest(ApiRequest):
    """POST /v1/responses."""

    model: str | None = None
    input: str | Annotated[list[JsonObject], Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = True
    background: bool | None = False
    stream: bool | None = False
    stream_options: JsonObject | None = None
    max_output_tokens: Integer | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_logprobs: Integer | None = None
    include: list[str] | None = None
    reasoning: ReasoningWish | None = None
    text: TextWish | None = None
    tools: list[JsonObject] | None = None
    tool_choice: Literal["auto", "none", "required"] | JsonObject | None = None
    parallel_tool_calls: bool | None = True
    truncation: Literal["auto", "disabled"] | None = "disabled"
    metadata: JsonObject | None = None
    user: str | None = None
    request_id: str | None = None
    # Beyond OpenAI's.
    top_k: Integer | None = None
    min_p: Number | None = None
    seed: Integer | None = None
    stop: str | Words | None = None
    ignore_eos: bool | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    priority: Integer | None = None
    cache_salt: str | None = None
    chat_template_kwargs: JsonObject | None = None

    @property
    def wants_logprobs(self) -> bool:
        return self.top_logprobs is not None or LOGPROBS in (self.include or ())

    def messages(self) -> list[JsonObject]:
        """The input as a chat's messages.  Raises ValueError for what cannot be one."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return list(_messages(self.input))

    def chat(self, history: Sequence[JsonObject] = ()) -> ChatRequest:
        """The same as a chat behind `history`.  Raises ValueError for what no chat has."""
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        tools, choice = _tools(self.tools or ()), self.tool_choice
        if isinstance(choice, Mapping):
            tools, choice = _chosen(tools, choice)
        return ChatRequest.model_construct(
            model=self.model,
            messages=[*system, *history, *self.messages()],
            tools=tools or None,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            response_format=_format(self.text.format if self.text is not None else None),
            max_tokens=self.max_output_tokens,
            logprobs=self.wants_logprobs,
            top_logprobs=self.top_logprobs,
            truncate_prompt_tokens=-1 if self.truncation == "auto" else None,
            **{name: getattr(self, name) for name in SAME},
        )


SAME = (
    *("stream", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "ignore_eos", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "priority", "cache_salt", "chat_template_kwargs"),
    *("request_id", "user"),
)


def input_items(messages: Sequence[JsonObject], id: str) -> list[JsonObject]:
    """Messages of a chat as items again, which are called after the response `id`."""
    return [
        {**item, "id": f"{kind}_{id}_{i}"}
        for i, (kind, item) in enumerate(each for message in messages for each in _items(message))
    ]


def _items(message: JsonObject) -> Iterator[tuple[str, JsonObject]]:
    """What one message is, each with the kind of its name."""
    role, text, done = message["role"], message.get("content"), {"status": "completed"}
    if role == "tool":
        called = {"call_id": message.get("tool_call_id"), "output": text}
        yield "fc", {"type": "function_call_output", **called, **done}
        return
    if role != "assistant":
        part = {"type": "input_text", "text": text}
        yield "msg", {"type": "message", "role": role, "content": [part], **done}
        return
    if thought := message.get("reasoning_content"):
        part = {"type": "reasoning_text", "text": thought}
        yield "rs", {"type": "reasoning", "summary": [], "content": [part]}
    if text:
        part = {"type": "output_text", "text": text, "annotations": []}
        yield "msg", {"type": "message", "role": role, "content": [part], **done}
    for call in cast("list[JsonObject]", message.get("tool_calls") or []):
        function = cast(JsonObject, call["function"])
        yield "fc", {"type": "function_call", "call_id": call["id"], **function, **done}


def _messages(items: Sequence[JsonObject]) -> Iterator[JsonObject]:
    """Thoughts, words and calls of the assistant's that follow each other are one message."""
    turn: JsonObject | None = None  # the assistant's that goes on
    for i, item in enumerate(items):
        kind = item.get("type", "message")
        is_message = kind == "message" and item.get("role") != "assistant"
        if turn is not None and (is_message or kind == "function_call_output"):
            yield turn
            turn = None
        if is_message:
            yield {"role": item.get("role"), "content": _text(i, item.get("content"))}
        elif kind == "function_call_output":
            content = _text(i, item.get("output"))
            yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
        else:
            turn = turn or {"role": "assistant", "content": ""}
            _add(turn, i, item)
    if turn is not None:
        yield turn


def _add(turn: JsonObject, index: int, item: JsonObject) -> None:
    """One more item of the assistant's turn."""
    match item.get("type", "message"):
        case "message":
            turn["content"] = f"{turn['content']}{_text(index, item.get('content'))}"
        case "reasoning":
            parts = item.get("content") or item.get("summary") or []
            if not isinstance(parts, list):
                raise ValueError(f"input has at {index} a content that is no list of parts")
            texts = [str(part.get("text", "")) for part in parts if isinstance(part, dict)]
            turn["reasoning_content"] = "\n".join(
                filter(None, [str(turn.get("reasoning_content", "")), *texts])
            )
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
            calls = turn.setdefault("tool_calls", [])
            assert isinstance(calls, list)
            calls.append({"id": item.get("call_id"), "type": "function", "function": function})
        case kind:
            raise ValueError(
                f"input has at {index} an item of type {kind!r}, which is not supported: message, "
                "reasoning, function_call and function_call_output are"
            )


def _text(index: int, content: object) -> str:
    """The text of a message, or of a function's output."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ValueError(f"input has at {index} a content that is neither text nor a list of parts")
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or kind not in TEXT_PARTS:
            raise ValueError(f"input has at {index} a part of type {kind!r}; only text is supported")
        texts.append(str(part.get("refusal" if kind == "refusal" else "text", "")))
    return "\n".join(texts)


def _tools(tools: Sequence[JsonObject]) -> list[JsonObject]:
    """As a chat has them."""
    for i, tool in enumerate(tools):
        if tool.get("type", "function") != "function":
            raise ValueError(
                f"tools has at {i} one of type {tool['type']!r}, which this server cannot run; give "
                "functions, and run them yourself"
            )
    keys = ("name", "description", "parameters", "strict")
    return [
        {"type": "function", "function": {key: tool[key] for key in keys if tool.get(key) is not None}}
        for tool in tools
    ]


def _chosen(
    tools: list[JsonObject], choice: JsonObject | Mapping[str, object]
) -> tuple[list[JsonObject], Literal["auto", "required"] | JsonObject]:
    """Which tools may be called, and whether one must."""
    if choice.get("type") == "allowed_tools":
        allowed = choice.get("tools")
        names = (
            [each.get("name") for each in allowed if isinstance(each, dict)]
            if isinstance(allowed, list)
            else []
        )
        kept = [tool for tool in tools if tool["function"]["name"] in names]  # type: ignore[index]
        return kept, "required" if choice.get("mode") == "required" else "auto"
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise ValueError(
            'tool_choice must be auto, none, required, {"type": "function", "name": ...} or '
            '{"type": "allowed_tools", "mode": ..., "tools": [...]}'
        )
    return tools, {"type": "function", "function": {"name": choice["name"]}}


def _format(said: JsonObject | None) -> JsonObject | None:
    if said is None or said.get("type") != "json_schema":
        return said
    return {
        "type": "json_schema",
        "json_schema": {key: said[key] for key in ("name", "schema") if key in said},
    }
