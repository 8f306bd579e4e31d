"""From an answer and its form to a response: streamed or whole, ended when the client goes away."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from fastapi import Request
from fastapi.responses import Response

from pellucid.server.answer import Answer, Usage
from pellucid.server.protocol.openai_output import PromptTokensDetails, UsageFacts
from pellucid.server.stream import OPENAI_ENDING, Ending, EventStream, closing, encode

CLIENT_GONE = 499  # nginx's word for it; nobody reads it


class Wish(Protocol):
    """A request that may want a stream."""

    @property
    def stream(self) -> bool | None: ...


class Form(Protocol):
    """Writes an answer in the form of one route."""

    def chunks(self) -> AsyncIterator[bytes]:
        """Events, as the answer comes."""
        ...

    async def whole(self) -> object:
        """All of it, for `msgspec`."""
        ...


async def respond(
    request: Request, body: Wish, answer: Answer, form: Form, *, ending: Ending = OPENAI_ENDING
) -> Response:
    """Answer a request whose prompts are with the engine."""
    if body.stream:
        return EventStream(ending.after(form.chunks()), answer.close)
    async with closing(request.receive, answer.close):
        whole = await form.whole()
    if not answer.is_complete:
        return Response(status_code=CLIENT_GONE)
    return json_response(whole)


def json_response(value: object) -> Response:
    return Response(encode(value), media_type="application/json")


def usage_facts(usage: Usage) -> UsageFacts:
    num_prompt, num_completion = usage.num_prompt_tokens, usage.num_completion_tokens
    details = PromptTokensDetails(usage.num_cached_tokens)
    return UsageFacts(num_prompt, num_prompt + num_completion, num_completion, details)
