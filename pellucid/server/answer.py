"""One request's answer, as its choices come: what the engine says, parsed, and counted.

OpenAI's and other routes are translations of this.  Knows nothing of JSON.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from pellucid.async_llm import Mailbox
from pellucid.server.errors import AnswerFailedError
from pellucid.server.parsers.base import (
    Event,
    Parser,
    ParserSetting,
    PlainParser,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)
from pellucid.text.prompts import TokenPrompt
from pellucid.types import CompletionOutput, Logprob, RequestOutput

OF_CALLS = (ToolCallStart, ToolCallArguments)


@dataclass(slots=True, kw_only=True)
class Piece:
    """What is new in one choice; the first and only one of each, unless it is streamed."""

    index: int  # of the choice: prompt by prompt, n for each
    is_first: bool
    text: str  # as generated, before parsing
    events: list[Event]
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(slots=True)
class Usage:
    """Tokens so far."""

    num_prompt_tokens: int
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0
    num_reasoning_tokens: int = 0  # of the completions', with their tags


class Answer:
    """The choices of one request: n for each of its prompts."""

    def __init__(
        self,
        mailbox: Mailbox,
        prompts: Sequence[TokenPrompt],
        n: int,
        make_parser: Callable[[], Parser] | None = None,
        count_calls: Callable[[bool], None] | None = None,
        thoughts_end: int | None = None,
    ) -> None:
        """count_calls: told of each piece whether it has any of a tool call.

        thoughts_end: the token that ends thoughts; None if there is none.
        """
        may_think = make_parser is not None
        make_parser = make_parser or (lambda: PlainParser(ParserSetting()))
        self.prompts = prompts
        self.num_choices = n * len(prompts)
        self.usage = Usage(sum(len(prompt.token_ids) for prompt in prompts))
        self.is_complete = False  # has every choice ended?
        self.kv_transfer_params: dict[str, object] | None = None  # where the prompt's KV is, if that is kept
        self._n = n
        self._mailbox = mailbox
        self._first_index = {name: n * i for i, name in enumerate(mailbox.request_ids)}
        self._count_calls = count_calls
        self._parsers = [make_parser() for _ in range(self.num_choices)]
        self._begun = [False] * self.num_choices
        self._has_calls = [False] * self.num_choices
        self._thoughts_end = thoughts_end
        self._may_think = [may_think] * self.num_choices  # has no thought ended?
        self._has_thought = [False] * self.num_choices
        self._num_maybe = [0] * self.num_choices  # tokens of a thought, if it is one
        self._num_ended = 0

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """What is new, as it comes.  Ends early if closed.  Raises AnswerFailedError if the engine fails."""
        async for output in self._mailbox:
            yield self._read(output)

    async def whole(self) -> list[Piece]:
        """All choices in order; to be asked of a mailbox that has one output of each request."""
        found = [piece async for pieces in self.pieces() for piece in pieces]
        return sorted(found, key=lambda piece: piece.index)

    def prompt_of(self, index: int) -> TokenPrompt:
        """Of a choice."""
        return self.prompts[index // self._n]

    def pass_on(self, write: Callable[[list[Piece]], None], can_write: Callable[[], bool]) -> None:
        """Let `write` have what is new the moment it comes, as long as it can and `pieces` waits anyway."""

        def take(outputs: Sequence[RequestOutput]) -> bool:
            if not can_write():
                return False
            write([piece for output in outputs for piece in self._read(output)])
            return True

        self._mailbox.sink = take

    def close(self) -> None:
        """Nobody reads on: the engine is told, and `pieces` ends."""
        self._mailbox.close()

    def _read(self, output: RequestOutput) -> list[Piece]:
        if output.error is not None:
            raise AnswerFailedError(output.error)
        first = self._first_index[output.request_id]
        if output.finished:
            self.usage.num_cached_tokens += output.num_cached_tokens
        return [self._piece(first + part.index, part, output) for part in output.outputs]

    def _piece(self, index: int, part: CompletionOutput, output: RequestOutput) -> Piece:
        is_first, self._begun[index] = not self._begun[index], True
        parser = self._parsers[index]
        events = parser.feed(part.text)
        finish_reason = part.finish_reason
        if part.extras is not None:
            self.kv_transfer_params = part.extras.get("kv_transfer_params", self.kv_transfer_params)
        if finish_reason is not None:
            events += parser.finish()
            self._num_ended += 1
            self.is_complete = self._num_ended == self.num_choices
        has_calls = any(isinstance(event, OF_CALLS) for event in events)
        self._has_calls[index] |= has_calls
        if self._count_calls is not None:
            self._count_calls(has_calls)
        if finish_reason == "stop" and self._has_calls[index]:
            finish_reason = "tool_calls"
        self.usage.num_completion_tokens += len(part.token_ids)
        if self._may_think[index]:
            self._count_thought(index, part, events)
        return Piece(
            index=index,
            is_first=is_first,
            text=part.text,
            events=events,
            token_ids=part.token_ids,
            logprobs=part.logprobs,
            prompt_logprobs=output.prompt_logprobs,
            finish_reason=finish_reason,
            stop_reason=part.stop_reason,
        )

    def _count_thought(self, index: int, part: CompletionOutput, events: Sequence[Event]) -> None:
        """Up to the token that ends it; without one, by how much of the text is a thought."""
        num_letters = sum(len(event.text) for event in events if isinstance(event, Reasoning))
        num_tokens = len(part.token_ids)
        if self._thoughts_end is None:
            share = min(1.0, num_letters / max(1, len(part.text)))
            self.usage.num_reasoning_tokens += round(share * num_tokens)
            return
        if self._thoughts_end in part.token_ids:
            num_tokens = part.token_ids.index(self._thoughts_end) + 1
            self._may_think[index] = False
        self._num_maybe[index] += num_tokens
        self._has_thought[index] |= num_letters > 0
        if self._has_thought[index]:
            self.usage.num_reasoning_tokens += self._num_maybe[index]
            self._num_maybe[index] = 0
