"""One parser for a request's answers: reasoning first, then calls in the content.

Which ones a model needs is seen in its chat template, unless it is said.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pellucid.server.parsers.base import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    Content,
    Event,
    Parser,
    ParserSetting,
    ToolCallArguments,
    ToolCallStart,
)

AUTO = "auto"
NONE = "plain"


@dataclass(frozen=True, slots=True)
class Parsers:
    """The names of the parsers that answers of a model are read with."""

    reasoning: str = NONE
    tools: str = NONE

    @property
    def thinking(self) -> tuple[str, str] | None:
        """What reasoning begins and ends with."""
        return REASONING_PARSERS.load(self.reasoning).tags

    def make(self, setting: ParserSetting) -> Parser:
        """A new parser for one completion."""
        reasoning = REASONING_PARSERS.load(self.reasoning)(setting)
        if not setting.tools:
            return reasoning
        return _InTurn(reasoning, TOOL_PARSERS.load(self.tools)(setting), setting)


def choose(template: str | None, *, reasoning: str = AUTO, tools: str = AUTO) -> Parsers:
    """`auto` is what the template's markup shows.  Raises ValueError for names that do not exist."""
    template = template or ""
    if reasoning == AUTO:
        reasoning = "qwen3" if "</think>" in template else NONE
    if tools == AUTO:
        tools = _tools_of(template)
    REASONING_PARSERS.check(reasoning)
    TOOL_PARSERS.check(tools)
    return Parsers(reasoning, tools)


def _tools_of(template: str) -> str:
    """Some write XML within Hermes's tags, which is another convention."""
    if "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template:
        return "hermes"
    if '"parameters": ' in template and "<|eot_id|>" in template:
        return "llama3_json"
    return NONE


class _InTurn:
    """The first parser's content is the second one's text.

    What is held back at the end of an answer that is held to calls is the beginning of one that was cut off.
    """

    def __init__(self, reasoning: Parser, tools: Parser, setting: ParserSetting) -> None:
        self._reasoning, self._tools = reasoning, tools
        self._is_forced = setting.is_forced
        self._most_calls = None if setting.is_parallel else 1
        self._num_calls = 0

    def feed(self, text: str) -> list[Event]:
        return self._read(self._reasoning.feed(text))

    def finish(self) -> list[Event]:
        read, rest = self._read(self._reasoning.finish()), self._counted(self._tools.finish())
        return [*read, *(each for each in rest if not (self._is_forced and isinstance(each, Content)))]

    def _read(self, events: Iterable[Event]) -> list[Event]:
        read: list[Event] = []
        for event in events:
            if isinstance(event, Content):
                read += self._counted(self._tools.feed(event.text))
            else:
                read.append(event)
        return read

    def _counted(self, events: list[Event]) -> list[Event]:
        """Without the calls that are too many."""
        if self._most_calls is None:
            return events
        kept: list[Event] = []
        for event in events:
            self._num_calls += isinstance(event, ToolCallStart)
            is_call = isinstance(event, ToolCallStart | ToolCallArguments)
            if not is_call or self._num_calls <= self._most_calls:
                kept.append(event)
        return kept
