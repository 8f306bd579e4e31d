"""The door for parsers: a model's text becomes reasoning, content and tool calls, as it streams.

A parser sees the text of one completion in pieces, cut anywhere, and must say the same for every cut.  There
are two kinds: one tells reasoning from content, the other finds tool calls in that content.  To add one,
write `parsers/<name>.py` and a line in `REASONING_PARSERS` or `TOOL_PARSERS`; `auto` chooses it once
compose.py knows its markup in a chat template.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

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
    continued: str = ""  # the part of the answer that is in the prompt already
    tools: Sequence[Mapping[str, object]] = ()  # as the request has them; empty if none may be called
    is_forced: bool = False  # is the answer held to calls?
    is_parallel: bool = True  # may one answer have several calls?
    is_constrained: bool = False  # is all of the answer held to a language?


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

    tags: ClassVar[tuple[str, str] | None] = None
    frame: ClassVar[CallFrame | None] = None

    def __init__(self, setting: ParserSetting) -> None:
        pass

    def feed(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []


@dataclass(frozen=True, slots=True)
class CallFrame:
    """How a model writes a call around its arguments."""

    begin: str  # with NAME where the function's name is, a JSON string
    end: str
    separator: str  # between calls
    trigger: str | None  # the beginning of `begin` that no other text has; None: a text is calls or has none


class ReasoningParserFactory(Protocol):
    """A class of reasoning parsers."""

    @property
    def tags(self) -> tuple[str, str] | None:
        """What reasoning begins and ends with; None if there is none."""
        ...

    def __call__(self, setting: ParserSetting, /) -> Parser: ...


class ToolParserFactory(Protocol):
    """A class of tool parsers."""

    @property
    def frame(self) -> CallFrame | None:
        """None if calls cannot be forced."""
        ...

    def __call__(self, setting: ParserSetting, /) -> Parser: ...


REASONING_PARSERS: Registry[ReasoningParserFactory] = Registry(
    "reasoning parser",
    {
        "plain": "pellucid.server.parsers.base:PlainParser",
        "qwen3": "pellucid.server.parsers.qwen3:Qwen3Parser",
    },
)
TOOL_PARSERS: Registry[ToolParserFactory] = Registry(
    "tool call parser",
    {
        "plain": "pellucid.server.parsers.base:PlainParser",
        "hermes": "pellucid.server.parsers.hermes:HermesParser",
        "llama3_json": "pellucid.server.parsers.llama3_json:Llama3JsonParser",
    },
)


def joined(events: Iterable[Event]) -> list[Event]:
    """The same events with as few of them as can be: texts of one kind that follow each other are one."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        match last, event:
            case (Content(), Content()) | (Reasoning(), Reasoning()):
                result[-1] = type(event)(last.text + event.text)
            case (ToolCallArguments(), ToolCallArguments()):
                result[-1] = ToolCallArguments(last.text + event.text)
            case _:
                result.append(event)
    return result


def overlap(text: str, tag: str) -> int:
    """How many characters at the end of `text` may be the beginning of `tag`."""
    at = text.find(tag[0], max(0, len(text) - len(tag) + 1))
    while at >= 0 and not tag.startswith(text[at:]):
        at = text.find(tag[0], at + 1)
    return len(text) - at if at >= 0 else 0
