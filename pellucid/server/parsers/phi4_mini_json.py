"""Finds the calls of Phi-4-mini: `functools[{"name": ..., "arguments": {...}}, ...]`, or the same in tags."""

from __future__ import annotations

from typing import ClassVar

from pellucid.server.parsers.base import CallFrame, ParserSetting
from pellucid.server.parsers.script import Reading, ScriptParser

WORD, TAG, TAG_END = "functools", "<|tool_call|>", "<|/tool_call|>"


class Phi4MiniJsonParser(ScriptParser):
    """The word alone is a word like any other.  Behind a tag, a list may be without its brackets."""

    frame: ClassVar[CallFrame | None] = CallFrame(
        '{"name": "NAME", "arguments": ', "}", ", ", f"{WORD}[", f"{WORD}[", "]"
    )
    keeps: ClassVar[tuple[str, ...]] = (TAG, TAG_END)

    def __init__(self, setting: ParserSetting) -> None:
        super().__init__()

    def read(self) -> Reading[None]:
        while tag := (yield from self._until(WORD, TAG)):
            if (yield from self._call_list(may_be_bare=tag == TAG)):
                yield from self._skip_space()
                yield from self._accept(TAG_END)
                yield from self._skip_space()
                self._drop()
            else:
                self._give_back()
