"""The door for parsers: a model's text becomes reasoning, content and tool calls, as it streams.

A parser sees the text of one completion in pieces, cut anywhere, and must say the same for every cut.  There
are two kinds: one tells reasoning from content, the other finds tool calls in that content.  To add one,
write `parsers/<name>.py` (most are a script, as in script.py) and a line in `REASONING_PARSERS` or
`TOOL_PARSERS`; `auto` chooses it once compose.py knows its markup in a chat template.  One in a file of one's
own is named `FILE.py:Class`.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

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
    """The model calls a function; `id` is unique among all calls, unless the model gives it."""

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

    @property
    def names(self) -> list[str]:
        """Of the functions that may be called."""
        functions = [tool.get("function") for tool in self.tools]
        return [str(each["name"]) for each in functions if isinstance(each, Mapping) and each.get("name")]


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
    keeps: ClassVar[tuple[str, ...]] = ()

    def __init__(self, setting: ParserSetting) -> None:
        pass

    def feed(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []


@dataclass(frozen=True, slots=True)
class CallFrame:
    """How a model writes a call around its arguments."""

    begin: str  # with NAME where the function's name is
    end: str
    separator: str | None  # between calls; None: an answer has one call at most
    trigger: str | None  # what calls, and no other text, begin with; None: a text is calls or has none
    opening: str = ""  # before the first call
    closing: str = ""  # behind the last one
    style: str = "json"  # of the arguments, as xgrammar calls it, or "python" for keywords
    other_begins: tuple[str, ...] = ()  # which the model writes for `begin`, too
    # Parts of a structural tag: what may come before calls, and a text that has none where nothing triggers.
    before: Mapping[str, object] | None = None
    otherwise: Mapping[str, object] | None = None


class ReasoningParserFactory(Protocol):
    """A class of reasoning parsers."""

    @property
    def tags(self) -> tuple[str, str] | None:
        """The tokens that reasoning begins and ends with; None if there are none."""
        ...

    @property
    def keeps(self) -> tuple[str, ...]:
        """Special tokens that it reads: where there is one of them, all such are left in the text."""
        ...

    def __call__(self, setting: ParserSetting, /) -> Parser: ...


class ToolParserFactory(Protocol):
    """A class of tool parsers."""

    @property
    def frame(self) -> CallFrame | None:
        """None if calls cannot be forced."""
        ...

    @property
    def keeps(self) -> tuple[str, ...]:
        """As a reasoning parser's."""
        ...

    def __call__(self, setting: ParserSetting, /) -> Parser: ...


# Names are vLLM's.
ROOM = "pellucid.server.parsers"
REASONING_PARSERS: Registry[ReasoningParserFactory] = Registry(
    "reasoning parser",
    {
        "plain": f"{ROOM}.base:PlainParser",
        "deepseek_r1": f"{ROOM}.think:ThinkParser",
        "deepseek_v3": f"{ROOM}.think:ThinkParser",
        "glm45": f"{ROOM}.think:ThinkParser",
        "granite": f"{ROOM}.granite:GraniteReasoningParser",
        "kimi_k2": f"{ROOM}.think:ThinkParser",
        "minimax_m2": f"{ROOM}.think:ThinkParser",
        "mistral": f"{ROOM}.think:MistralThinkParser",
        "openai_gptoss": f"{ROOM}.harmony:HarmonyParser",
        "qwen3": f"{ROOM}.think:ThinkParser",
    },
)
TOOL_PARSERS: Registry[ToolParserFactory] = Registry(
    "tool call parser",
    {
        "plain": f"{ROOM}.base:PlainParser",
        "deepseek_v3": f"{ROOM}.deepseek_v3:DeepSeekV3Parser",
        "deepseek_v31": f"{ROOM}.deepseek_v3:DeepSeekV31Parser",
        "glm45": f"{ROOM}.glm45:Glm45Parser",
        "glm47": f"{ROOM}.glm45:Glm45Parser",
        "granite": f"{ROOM}.granite:GraniteParser",
        "granite4": f"{ROOM}.hermes:HermesParser",
        "hermes": f"{ROOM}.hermes:HermesParser",
        "kimi_k2": f"{ROOM}.kimi_k2:KimiK2Parser",
        "llama3_json": f"{ROOM}.llama3_json:Llama3JsonParser",
        "llama4_json": f"{ROOM}.llama3_json:Llama3JsonParser",
        "llama4_pythonic": f"{ROOM}.pythonic:PythonicParser",
        "minimax_m2": f"{ROOM}.minimax_m2:MiniMaxM2Parser",
        "mistral": f"{ROOM}.mistral:MistralParser",
        "openai": f"{ROOM}.harmony:HarmonyParser",
        "phi4_mini_json": f"{ROOM}.phi4_mini_json:Phi4MiniJsonParser",
        "pythonic": f"{ROOM}.pythonic:PythonicParser",
        "qwen3_coder": f"{ROOM}.qwen3_coder:Qwen3CoderParser",
        "qwen3_xml": f"{ROOM}.qwen3_coder:Qwen3CoderParser",
    },
)


def reasoning_parser(name: str) -> ReasoningParserFactory:
    """By a name of `REASONING_PARSERS`, or FILE.py:Class.  Raises ValueError for what there is not."""
    return _own(name) if _is_own(name) else REASONING_PARSERS.load(name)


def tool_parser(name: str) -> ToolParserFactory:
    """By a name of `TOOL_PARSERS`, or FILE.py:Class.  Raises ValueError for what there is not."""
    return _own(name) if _is_own(name) else TOOL_PARSERS.load(name)


def _is_own(name: str) -> bool:
    return name.rpartition(":")[0].endswith(".py")


@functools.cache
def _own(name: str) -> Any:
    """A class in a file that its user has written."""
    path, _, class_name = name.rpartition(":")
    if not Path(path).is_file():
        raise ValueError(f"parser {name!r}: {path!r} is no file; name one as FILE.py:Class")
    spec = importlib.util.spec_from_file_location(f"own_parser_{Path(path).stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if not hasattr(module, class_name):
        raise ValueError(f"parser {name!r}: the file has no {class_name!r}")
    return getattr(module, class_name)


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
