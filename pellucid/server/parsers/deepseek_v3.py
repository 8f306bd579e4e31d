"""Finds the calls of DeepSeek's models, V3 and R1 on the one hand, V3.1 on the other.

Both write a list between tags of its own; in it, a call is its type, its name and JSON fenced as Markdown, or
its name and bare JSON.  Either is read by both parsers, for models' names do not always tell.
"""

from __future__ import annotations

from typing import ClassVar

from pellucid.server.parsers.base import CallFrame, ParserSetting
from pellucid.server.parsers.script import NAME, Reading, ScriptParser

LIST, LIST_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE, FENCE_END = "```json\n", "\n```"


class DeepSeekV3Parser(ScriptParser):
    """Forces V3's and R1's: `function<｜tool▁sep｜>name`, and arguments in a fence on lines of its own."""

    frame: ClassVar[CallFrame | None] = CallFrame(
        f"{CALL}function{SEPARATOR}NAME\n{FENCE}", f"{FENCE_END}{CALL_END}", "\n", LIST, LIST, LIST_END
    )
    keeps: ClassVar[tuple[str, ...]] = (LIST, LIST_END, CALL, SEPARATOR, CALL_END)

    def __init__(self, setting: ParserSetting) -> None:
        super().__init__()

    def read(self) -> Reading[None]:
        while tag := (yield from self._until(LIST, CALL)):
            if tag == LIST:
                yield from self._skip_space()
                yield from self._accept(CALL)
            is_call = yield from self._head_of_call()
            while is_call:
                yield from self._arguments()
                yield from self._end_of_call()
                self._drop()
                is_call = bool((yield from self._accept(CALL))) and (yield from self._head_of_call())
            if self._at:
                self._give_back()

    def _head_of_call(self) -> Reading[bool]:
        """Up to the brace of the arguments."""
        name = yield from self._name()
        if not NAME.fullmatch(name) or not self._begins("{"):
            return False
        self._start(name)
        return True

    def _name(self) -> Reading[str]:
        name, _ = yield from self._head(SEPARATOR)
        yield from self._skip_space()
        if self._begins("{"):
            return name.strip()
        name, fence = yield from self._head(FENCE, "{")
        if fence == "{":
            self._at -= 1
        yield from self._skip_space()
        return name.strip()

    def _end_of_call(self) -> Reading[None]:
        """Up to the next call, or behind the list."""
        yield from self._skip_space()
        yield from self._accept("```")
        yield from self._skip_space()
        yield from self._accept(CALL_END)
        yield from self._skip_space()
        yield from self._accept(LIST_END)
        yield from self._skip_space()


class DeepSeekV31Parser(DeepSeekV3Parser):
    """Forces V3.1's: `name<｜tool▁sep｜>{...}`."""

    frame: ClassVar[CallFrame | None] = CallFrame(
        f"{CALL}NAME{SEPARATOR}", CALL_END, "", LIST, LIST, LIST_END
    )
