"""Tells what Granite 3 thinks from what it answers, and finds its calls.

It announces in words, "Here is my thought process:" and "Here is my response:", or since 3.3 by `<think>` and
`<response>`; calls are a list of JSON behind `<|tool_call|>`.  Granite 4 writes as Hermes does.
"""

from __future__ import annotations

from typing import ClassVar

from pellucid.server.parsers.base import CallFrame, ParserSetting, Reasoning
from pellucid.server.parsers.script import Reading, ScriptParser

CALLS, SPELLED = "<|tool_call|>", "<tool_call>"
THOUGHT = ("Here is my thought process:", "Here's my thought process:", "<think>")
ANSWER = ("Here is my response:", "Here's my response:", "</think>")
RESPONSE, RESPONSE_END = "<response>", "</response>"


class GraniteReasoningParser(ScriptParser):
    """An answer that does not begin so is content."""

    tags: ClassVar[tuple[str, str] | None] = None  # no tokens, but words
    keeps: ClassVar[tuple[str, ...]] = ()

    def __init__(self, setting: ParserSetting) -> None:
        super().__init__()

    def read(self) -> Reading[None]:
        yield from self._skip_space()
        if not (yield from self._accept(*THOUGHT)):
            self._give_back()
            return
        yield from self._skip_space()
        self._drop()
        yield from self._until(*ANSWER, kind=Reasoning)
        yield from self._skip_space()
        if (yield from self._accept(RESPONSE)):
            yield from self._skip_space()
            self._drop()
            yield from self._until(RESPONSE_END)
        self._drop()


class GraniteParser(ScriptParser):
    """A list in which something is no call is read up to there."""

    frame: ClassVar[CallFrame | None] = CallFrame(
        '{"name": "NAME", "arguments": ', "}", ", ", CALLS, f"{CALLS}[", "]"
    )
    keeps: ClassVar[tuple[str, ...]] = (CALLS,)

    def __init__(self, setting: ParserSetting) -> None:
        super().__init__()

    def read(self) -> Reading[None]:
        while (yield from self._until(CALLS, SPELLED)):
            if (yield from self._call_list()):
                yield from self._skip_space()
                self._drop()
            else:
                self._give_back()
