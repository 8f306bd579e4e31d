"""What language an answer must be of: `response_format`, `structured_outputs`, and tool calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import cast

import msgspec
from fastapi import Request

from pellucid.sampling_params import SamplingParams, StructuredOutputsParams
from pellucid.server.context import Server, client_of
from pellucid.server.errors import ApiError
from pellucid.server.parsers.compose import CHANNELS
from pellucid.server.parsers.harmony import FINAL, THOUGHT
from pellucid.server.protocol.openai import ChatRequest, CompletionRequest
from pellucid.server.stream import while_there
from pellucid.text.prompts import TokenPrompt

NAMES = [field.name for field in fields(StructuredOutputsParams) if field.name != "thinking"]


def wish_of(
    body: ChatRequest | CompletionRequest, *, forced: str | None = None, strict: str | None = None
) -> StructuredOutputsParams | None:
    """The language that a request asks for.

    forced: a structural tag, of the calls that the answer must have.  strict: one of the calls that it may
    have, of which there are none where anything else is asked for.

    Raises ValueError, beginning with the field's name, for what cannot be understood, or is said twice.
    """
    wishes = {
        "response_format": _from_format(body.response_format),
        "structured_outputs": _from_fields(body.structured_outputs),
        "tool_choice": None if forced is None else StructuredOutputsParams(structural_tag=forced),
    }
    given = {name: wish for name, wish in wishes.items() if wish is not None}
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} each ask for a form of the answer; leave one out")
    wish = next(iter(given.values()), None)
    return StructuredOutputsParams(structural_tag=strict) if wish is None and strict is not None else wish


async def check_wish(
    body: ChatRequest | CompletionRequest, sampling: SamplingParams, server: Server, request: Request
) -> str | None:
    """What `Server.submit` takes as the grammar, if there is one.

    A client that goes away ends its compile.  Raises a 400, naming the field, for a grammar that is wrong or
    takes too long to compile.
    """
    wish = sampling.structured_outputs
    if wish is None:
        return None
    try:
        seconds = server.options.max_grammar_seconds
        check = server.llm.check_grammar(sampling, seconds=seconds, client=client_of(request))
        return await while_there(request, check)
    except ValueError as error:
        field = "structured_outputs"
        if body.structured_outputs is None:
            field = "tools" if body.response_format is None else "response_format"
        message = str(error).removeprefix(f"structured_outputs.{wish.kind}").strip()
        raise ApiError(400, f"{field}: {message}", param=field) from error


def thinking_in(prompt: TokenPrompt, body: ChatRequest, server: Server) -> tuple[str | None, str] | None:
    """The tokens around what the answer's language does not hold for; None if the answer does not think."""
    tags = server.parsers.thinking
    if tags is None or any(server.llm.tokenizer.token_to_id(tag) is None for tag in tags):
        return None
    (start, end), text = tags, (prompt.text or "").rstrip()
    if body.continue_final_message:
        said = body.messages[-1].get("content")
        is_open = isinstance(said, str) and said.rfind(start) > said.rfind(end)
        return (None, end) if is_open else None
    if text.endswith(end):
        return None
    return (None if text.endswith(start) else start, end)


def within_markup(
    wish: StructuredOutputsParams, body: ChatRequest, server: Server
) -> StructuredOutputsParams:
    """The same language, of what the model writes around its answer, too, where that is more than a tag."""
    has_channels = server.parsers.reasoning == CHANNELS and not body.continue_final_message
    return in_final_channel(wish) if has_channels else wish


def in_final_channel(wish: StructuredOutputsParams) -> StructuredOutputsParams:
    """A language of harmony's channel `final`, behind a thought of any kind, or none."""
    final = {"type": "tag", "begin": FINAL, "content": _format_of(wish), "end": ""}
    form = {"type": "sequence", "elements": [{"type": "optional", "content": THOUGHT}, final]}
    said = msgspec.json.encode({"type": "structural_tag", "format": form}).decode()
    return StructuredOutputsParams(structural_tag=said)


def _format_of(wish: StructuredOutputsParams) -> Mapping[str, object]:
    """A language as a part of xgrammar's structural tags."""
    text = wish.text
    match wish.kind:
        case "json":
            return {"type": "json_schema", "json_schema": msgspec.json.decode(text)}
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object", "additionalProperties": True}}
        case "regex":
            return {"type": "regex", "pattern": text}
        case "choice":
            choices = [{"type": "const_string", "value": choice} for choice in msgspec.json.decode(text)]
            return {"type": "or", "elements": choices} if len(choices) > 1 else choices[0]
        case "grammar":
            return {"type": "grammar", "grammar": text}
        case _:
            return msgspec.json.decode(text)["format"]


def _from_fields(said: Mapping[str, object] | None) -> StructuredOutputsParams | None:
    if said is None:
        return None
    unknown = [name for name in said if name not in NAMES]
    if unknown:
        raise ValueError(f"structured_outputs has no {unknown[0]!r}; it has {', '.join(NAMES)}")
    return StructuredOutputsParams(**said)  # type: ignore[arg-type]


def _from_format(said: Mapping[str, object] | None) -> StructuredOutputsParams | None:
    kind = "text" if said is None else said.get("type")
    if said is None or kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "json_schema":
        named = said.get("json_schema")
        schema = named.get("schema") if isinstance(named, Mapping) else None
        if not isinstance(schema, dict):
            raise ValueError('response_format needs {"json_schema": {"name": ..., "schema": {...}}}')
        return StructuredOutputsParams(json=cast("dict[str, object]", schema))
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=msgspec.json.encode(_structural_tag(said)).decode())
    raise ValueError(
        f"response_format has type {kind!r}, must be text, json_object, json_schema or structural_tag"
    )


def _structural_tag(said: Mapping[str, object]) -> Mapping[str, object]:
    """As xgrammar has it now; its older form lists structures and what triggers them."""
    structures = said.get("structures")
    if not isinstance(structures, list):
        return said
    tags: list[dict[str, object]] = []
    for each in structures:
        if not isinstance(each, Mapping):
            raise ValueError("response_format has structures that are no objects")
        content = {"type": "json_schema", "json_schema": each.get("schema")}
        tags.append({"type": "tag", "begin": each.get("begin"), "content": content, "end": each.get("end")})
    form = {"type": "triggered_tags", "triggers": said.get("triggers"), "tags": tags}
    return {"type": "structural_tag", "format": form}
