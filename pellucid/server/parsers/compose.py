"""One parser for a request's answers: reasoning first, then calls in the content.

Which ones a model needs is seen in its chat template, unless it is said.  A model may call without having
ended its thought; what it drafts there and goes on from is a thought.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from pellucid.server.parsers.base import (
    Content,
    Event,
    Parser,
    ParserSetting,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
    overlap,
    reasoning_parser,
    tool_parser,
)

AUTO = "auto"
NONE = "plain"
MOST_READ = 1 << 19  # characters of thoughts that are read for calls, again behind each mark that begins none
CHANNELS = "openai_gptoss"  # the parser of answers whose parts no single token divides
# What is found in the chat templates of models, the more special first.
REASONING_MARKS = (
    ("<|channel|>analysis", CHANNELS),
    ("[THINK]", "mistral"),
    ("Here is my thought process", "granite"),
    ("</think>", "qwen3"),  # whose like many are
)
TOOL_MARKS = (
    (("<|channel|>", "to=functions."), "openai"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<tool_call>", "<function="), "qwen3_coder"),  # some write XML within Hermes's tags
    (("<tool_call>", "<arg_key>"), "glm45"),
    (("<tool_call>",), "hermes"),
    (("<|tool_call|>", "<|start_of_role|>"), "granite"),
    (("<|tool|>",), "phi4_mini_json"),
    (("[func_name1(",), "llama4_pythonic"),
    (('"parameters": ', "<|eot_id|>"), "llama3_json"),
    (('"parameters": ', "<|eot|>"), "llama4_json"),
)


@dataclass(frozen=True, slots=True)
class Parsers:
    """The names of the parsers that answers of a model are read with."""

    reasoning: str = NONE
    tools: str = NONE

    @property
    def thinking(self) -> tuple[str, str] | None:
        """What reasoning begins and ends with."""
        return reasoning_parser(self.reasoning).tags

    @property
    def keeps(self) -> tuple[str, ...]:
        """Special tokens that they read."""
        return reasoning_parser(self.reasoning).keeps + tool_parser(self.tools).keeps

    def make(self, setting: ParserSetting) -> Parser:
        """A new parser for one completion."""
        reasoning = reasoning_parser(self.reasoning)(setting)
        if not setting.tools:
            return reasoning
        tools = tool_parser(self.tools)
        if tools.frame is not None and tools.frame.trigger is not None:
            mark = tools.frame.trigger.partition("\n")[0]
            reasoning = _CallsAmidThoughts(reasoning, partial(tools, setting), mark)
        return _InTurn(reasoning, tools(setting), setting)


def choose(template: str | None, *, reasoning: str = AUTO, tools: str = AUTO) -> Parsers:
    """`auto` is what the template's markup shows.  Raises ValueError for names that do not exist."""
    template = template or ""
    if reasoning == AUTO:
        reasoning = next((name for mark, name in REASONING_MARKS if mark in template), NONE)
    if tools == AUTO:
        tools = _tools_of(template)
    reasoning_parser(reasoning)
    tool_parser(tools)
    return Parsers(reasoning, tools)


def _tools_of(template: str) -> str:
    """The first whose marks are all there."""
    return next((name for marks, name in TOOL_MARKS if all(mark in template for mark in marks)), NONE)


class _CallsAmidThoughts:
    """Finds the calls that end an answer whose thought has not ended, or has nothing behind it.

    From the mark of a call on, thoughts are held until something follows: then they were thoughts.
    """

    def __init__(self, reasoning: Parser, make_tools: Callable[[], Parser], mark: str) -> None:
        self._reasoning, self._make_tools, self._mark = reasoning, make_tools, mark
        self._held = ""  # of a thought: from a mark on, or what may be the beginning of one
        self._tools: Parser | None = None  # reads what is held, if it begins with a mark
        self._calls: list[Event] = []  # that it has found
        self._told: list[Event] = []
        self._num_read = 0  # characters of thoughts, each as often as it was held behind a new mark

    def feed(self, text: str) -> list[Event]:
        return self._read(self._reasoning.feed(text))

    def finish(self) -> list[Event]:
        told = self._read(self._reasoning.finish())
        while self._tools is not None:
            calls = [*self._calls, *self._tools.finish()]
            if not any(map(_is_said, calls)):
                return [*told, *calls]
            self._look_on()
        self._tell(len(self._held))
        return told + self._take()

    def _read(self, events: Iterable[Event]) -> list[Event]:
        for event in events:
            if isinstance(event, Reasoning):
                self._think(event.text)
                continue
            if not isinstance(event, Content) or event.text.strip():
                while self._tools is not None:
                    self._look_on()
                self._tell(len(self._held))
            self._told.append(event)
        return self._take()

    def _think(self, text: str) -> None:
        """More of a thought; where nothing is held that could become a call, it is told."""
        self._held += text
        if self._tools is None or not self._is_call(text):
            self._look_on()

    def _look_on(self) -> None:
        """What is held begins with a thought; there may be a call behind its first mark."""
        while self._finds_mark() and not self._is_call(self._held):
            pass

    def _finds_mark(self) -> bool:
        """Tell the thought up to the next mark, beyond one that has begun no call; is there one?"""
        if self._tools is not None:
            self._tools, self._calls = None, []
            self._tell(self._held.find(self._mark) + len(self._mark))
        at = self._held.find(self._mark) if self._num_read < MOST_READ else -1
        end = at if at >= 0 else len(self._held) - overlap(self._held, self._mark)
        self._tell(len(self._held[:end].rstrip()))
        if at >= 0:
            self._tools = self._make_tools()
            self._num_read += len(self._held)
        return at >= 0

    def _is_call(self, text: str) -> bool:
        """Is all that is held calls, as far as it goes?  text: the end of it, which is read now."""
        assert self._tools is not None, "no mark has been found"
        events = self._tools.feed(text)
        self._calls += events
        return not any(map(_is_said, events))

    def _tell(self, length: int) -> None:
        if length:
            self._told.append(Reasoning(self._held[:length]))
            self._held = self._held[length:]

    def _take(self) -> list[Event]:
        taken, self._told = self._told, []
        return taken


def _is_said(event: Event) -> bool:
    return isinstance(event, Content) and not event.text.isspace()


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
                read += self._counted([event])  # some find calls among the thoughts
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
