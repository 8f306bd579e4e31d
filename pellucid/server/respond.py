"""From an answer and its form to a response: streamed or whole, ended when the client goes away."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from fastapi import Request
from fastapi.responses import Response
from msgspec import UNSET, UnsetType

from pellucid.server.answer import Answer, Piece, Usage
from pellucid.server.errors import CLIENT_GONE
from pellucid.server.protocol.openai_output import CompletionTokensDetails, PromptTokensDetails, UsageFacts
from pellucid.server.stream import OPENAI_ENDING, Ending, EventStream, closing, encode

JSON = "application/json"
LONGEST_ID = 256  # characters of a caller's own


class Wish(Protocol):
    """A request that may want a stream."""

    @property
    def stream(self) -> bool | None: ...


class Form(Protocol):
    """Writes an answer in the form of one route."""

    def begin(self) -> bytes:
        """The events before any piece; may be none, as in the others."""
        ...

    def events(self, pieces: list[Piece]) -> bytes:
        """The events of what is new."""
        ...

    def end(self) -> bytes:
        """The events behind the last piece of a complete answer."""
        ...

    async def whole(self) -> object:
        """All of it, for `msgspec`."""
        ...


class CallersName(Protocol):
    """A request to which its caller may have given a name."""

    @property
    def request_id(self) -> str | None: ...


def answer_id(kind: str, request: Request, body: CallersName) -> str:
    """What an answer is called: as its caller calls the request, by header or field, or by chance."""
    own = request.headers.get("x-request-id") or body.request_id
    return f"{kind}-{own[:LONGEST_ID] if own else uuid.uuid4().hex}"


async def respond(
    request: Request, body: Wish, answer: Answer, form: Form, *, ending: Ending = OPENAI_ENDING
) -> Response:
    """Answer a request whose prompts are with the engine."""
    if body.stream:
        return EventStream(_Streamed(answer, form), ending)
    async with closing(request.receive, answer.close):
        whole = await form.whole()
    if not answer.is_complete:
        return Response(status_code=CLIENT_GONE)
    return json_response(whole)


@dataclass(frozen=True, slots=True)
class _Streamed:
    """An answer as a stream, in a route's form."""

    answer: Answer
    form: Form

    async def chunks(self) -> AsyncIterator[bytes]:
        yield self.form.begin()
        async for pieces in self.answer.pieces():
            events = self.form.events(pieces)
            yield events + self.form.end() if self.answer.is_complete else events

    def pass_on(self, write: Callable[[bytes], None], can_write: Callable[[], bool]) -> None:
        events = self.form.events
        self.answer.pass_on(lambda pieces: write(events(pieces)), can_write)

    def close(self) -> None:
        self.answer.close()


def json_response(value: object) -> Response:
    return Response(encode(value), media_type=JSON)


class UsageWish(Protocol):
    """A request that may want the usage in its stream."""

    @property
    def wants_usage(self) -> bool: ...

    @property
    def wants_running_usage(self) -> bool: ...


def usage_of_chunk(body: UsageWish, usage: Usage) -> UsageFacts | None | UnsetType:
    """The usage so far, null in a chunk before the one that has it, or nothing where nobody asks."""
    return running_usage(body, usage) or (None if body.wants_usage else UNSET)


def running_usage(body: UsageWish, usage: Usage) -> UsageFacts | None:
    """The usage so far, for those who ask for it in every chunk."""
    return usage_facts(usage) if body.wants_running_usage else None


def usage_facts(usage: Usage) -> UsageFacts:
    num_prompt, num_completion = usage.num_prompt_tokens, usage.num_completion_tokens
    return UsageFacts(
        prompt_tokens=num_prompt,
        total_tokens=num_prompt + num_completion,
        completion_tokens=num_completion,
        prompt_tokens_details=PromptTokensDetails(usage.num_cached_tokens),
        completion_tokens_details=CompletionTokensDetails(usage.num_reasoning_tokens),
    )
