"""The door for parsers: a model's text becomes reasoning, content and tool calls, as it streams.

A parser sees the text of one completion in pieces, cut anywhere, and must say the same for every cut.  To add
one, write `parsers/<name>.py` and a line in `PARSERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pellucid.registry import Registry


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model thought."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The model calls a function; `id` is unique among all calls of all answers."""

    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the JSON of the arguments of the call that started last."""

    text: str


Event = Content | Reasoning | ToolCallStart | ToolCallArguments


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserSetting:
    """What a parser may want to know of a request."""

    prompt: str = ""  # which may have opened the model's reasoning
    tools: Sequence[Mapping[str, object]] = ()  # as the request has them; empty if none may be called
    tool_choice: str = "none"  # auto, none, required, or the name of a function


class Parser(Protocol):
    """Reads one completion.  Joined, the texts of its events are the text but for the model's own markup."""

    def feed(self, text: str) -> list[Event]:
        """Events that this text completes; what may turn out to be markup is held back."""
        ...

    def finish(self) -> list[Event]:
        """The text has ended: what was held back."""
        ...


class PlainParser:
    """All is content."""

    def __init__(self, setting: ParserSetting) -> None:
        pass

    def feed(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []


ParserFactory = Callable[[ParserSetting], Parser]
PARSERS: Registry[ParserFactory] = Registry(
    "parser",
    {
        "plain": "pellucid.server.parsers.base:PlainParser",
    },
)
