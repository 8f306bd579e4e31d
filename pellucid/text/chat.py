"""Chat messages to a prompt, by the checkpoint's own Jinja template.

Templates see what transformers would show them, in a sandbox, since they come with downloaded files.
Text only; knows nothing about token ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TypedDict

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pellucid.text.tokenizer import Tokenizer

Message = Mapping[str, object]
DEVELOPER = "developer"  # OpenAI's newer name of the system's role
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
CONTINUE_MARK = "\ue000CONTINUE\ue000"  # private-use characters: no message holds them


class ChatOptions(TypedDict, total=False):
    """How messages become a prompt: `render_chat`'s, for those that pass them on."""

    tools: Sequence[Mapping[str, object]] | None
    chat_template: str | None
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, object] | None


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, object]] | None = None,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template_kwargs: Mapping[str, object] | None = None,
) -> str:
    """Render messages with the tokenizer's template; encode the result with add_special_tokens=False.

    chat_template: used in place of the tokenizer's.
    Raises ValueError as `render`, or if there is no template.
    """
    template = chat_template or tokenizer.chat_template(tools=bool(tools))
    if template is None:
        raise ValueError(
            "this model's tokenizer has no chat template; pass chat_template, or a plain text prompt"
        )
    return render(
        template,
        messages,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        chat_template_kwargs={**tokenizer.special_tokens, **(chat_template_kwargs or {})},
    )


def render(
    template: str,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, object]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template_kwargs: Mapping[str, object] | None = None,
) -> str:
    """Render a Jinja chat template over OpenAI-style messages.

    chat_template_kwargs: further names for the template (bos_token, enable_thinking, ...).
    continue_final_message: end the prompt inside the last message, for the model to write on.
    Raises ValueError naming the message by index and role where a message is malformed.
    """
    if continue_final_message and add_generation_prompt:
        raise ValueError(
            "continue_final_message and add_generation_prompt exclude each other; "
            "set add_generation_prompt=False to continue the last message"
        )
    if not isinstance(messages, Sequence):
        raise ValueError(f"messages is a {type(messages).__name__}, must be a list of messages")
    if not messages:
        raise ValueError("messages is empty; a chat needs at least one message")
    plain = [_plain_message(i, message) for i, message in enumerate(messages)]
    if not re.search(f"""['"]{DEVELOPER}['"]""", template):
        _rename_developers(plain)
    if continue_final_message:
        _mark_final_message(plain)
    variables = {"documents": None, **(chat_template_kwargs or {})}
    variables |= {"messages": plain, "tools": tools or None, "add_generation_prompt": add_generation_prompt}
    try:
        text = _compile(template).render(variables)
    except Exception as error:  # whatever the template's own expressions raise
        roles = ", ".join(f"{i} {message['role']}" for i, message in enumerate(plain))
        raise ValueError(f"the chat template refused these messages ({roles}): {error}") from error
    return _cut_at_mark(text) if continue_final_message else text


def _plain_message(index: int, message: Message) -> dict[str, object]:
    """A copy as templates expect it: content a string, absent entries absent, arguments parsed."""
    if not isinstance(message, Mapping):
        raise ValueError(
            f"message {index} is a {type(message).__name__}, must be a dict with role and content"
        )
    role = message.get("role")
    if not isinstance(role, str):
        raise ValueError(f"message {index} has role {role!r}; give it one such as 'user' or 'assistant'")
    where = f"message {index} ({role})"
    plain = {key: value for key, value in message.items() if value is not None or key == "content"}
    if "content" not in plain and "tool_calls" not in plain:
        raise ValueError(f"{where} has neither content nor tool_calls; add content (it may be empty)")
    if "content" in plain:
        plain["content"] = _plain_content(where, plain["content"])
    if "tool_calls" in plain:
        plain["tool_calls"] = _plain_tool_calls(where, plain["tool_calls"])
    reasoning = plain.get("reasoning_content", plain.get("reasoning"))
    if reasoning is not None:  # one thought, under the names that different templates read
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _rename_developers(messages: list[dict[str, object]]) -> None:
    """A template that has never heard of them refuses them or, worse, leaves them out."""
    for message in messages:
        if message["role"] == DEVELOPER:
            message["role"] = "system"


def _plain_content(where: str, content: object) -> str | None:
    """A string, or OpenAI's list of parts joined by newlines."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ValueError(
            f"{where} has content of type {type(content).__name__}, must be text or a list of parts"
        )
    texts: list[str] = []
    for part in content:
        text = part
        if isinstance(part, Mapping) and (kind := part.get("type")) in TEXT_PARTS:
            text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ValueError(f"{where} has a content part of type {kind!r}; only text parts are supported")
        texts.append(text)
    return "\n".join(texts)


def _plain_tool_calls(where: str, calls: object) -> list[dict[str, object]]:
    """OpenAI sends arguments as a JSON string; templates want the object."""
    if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
        raise ValueError(f"{where} has tool_calls that are not a list of objects")
    return [_plain_tool_call(call) for call in calls]


def _plain_tool_call(call: Message) -> dict[str, object]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    return {**call, "function": {**function, "arguments": _arguments(function["arguments"] or "{}")}}


def _arguments(text: str) -> object:
    """What the text is as JSON; the text itself where it is none, as a model's own that was cut off."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return CutOff(text)


class CutOff(dict[str, object]):
    """Arguments that are no JSON: to a template an object without entries, which is written as it was."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def __str__(self) -> str:
        return self.text


def _mark_final_message(messages: list[dict[str, object]]) -> None:
    final = messages[-1]
    if not isinstance(final.get("content"), str):
        raise ValueError(
            f"continue_final_message needs text to continue, but message {len(messages) - 1} "
            f"({final['role']}) has no content; give it some, or leave the option out"
        )
    final["content"] = f"{final['content']}{CONTINUE_MARK} "


def _cut_at_mark(text: str) -> str:
    """Cut behind the last message; if the template trimmed its content, its own end is trimmed too."""
    before, mark, after = text.rpartition(CONTINUE_MARK)
    if not mark:
        raise ValueError("the chat template does not show the last message, so it cannot be continued")
    return before if after.startswith(" ") else before.rstrip()


@lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template has a syntax error in line {error.lineno}: {error}") from error


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here its body is rendered as it stands."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which a prompt must not."""
    if isinstance(value, CutOff):
        return value.text
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
