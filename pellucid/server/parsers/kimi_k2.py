"""Finds the calls of Kimi K2, which name themselves: `functions.NAME:NUMBER` is a call's id, too.

`<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{...}`, and on.
Its template shows the model the ids of earlier calls, so they are handed out as they are.
"""

from __future__ import annotations

import re
from typing import ClassVar

from pellucid.server.parsers.base import CallFrame, ParserSetting
from pellucid.server.parsers.script import Reading, ScriptParser

LIST, LIST_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
# As some of its models and servers write them.
SHORT, SHORT_END = "<|tool_call_section_begin|>", "<|tool_call_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
ID = re.compile(r"(?:functions\.)?([\w.-]{1,128}):\d+")
NUMBER = re.compile(r"\d{1,9}")  # which it writes for an id at times


class KimiK2Parser(ScriptParser):
    """A number that comes twice in an answer becomes the next one that has not.

    A number without a name calls the only tool, where there is but one.
    """

    frame: ClassVar[CallFrame | None] = CallFrame(
        f"{CALL}functions.NAME:0{ARGUMENTS}", CALL_END, "", LIST, LIST, LIST_END
    )
    keeps: ClassVar[tuple[str, ...]] = (*(LIST, LIST_END, SHORT, SHORT_END, CALL, ARGUMENTS, CALL_END),)

    def __init__(self, setting: ParserSetting) -> None:
        super().__init__()
        self._ids: set[str] = set()
        self._only = setting.names[0] if len(setting.names) == 1 else None

    def read(self) -> Reading[None]:
        while tag := (yield from self._until(LIST, SHORT, CALL)):
            if tag != CALL:
                yield from self._skip_space()
                yield from self._accept(CALL)
            while (yield from self._one_call()):
                yield from self._skip_space()
                yield from self._accept(CALL_END)
                yield from self._skip_space()
                self._drop()
                if not (yield from self._accept(CALL)):
                    break
            if self._at:
                self._give_back()
            yield from self._accept(LIST_END, SHORT_END)
            yield from self._skip_space()
            self._drop()

    def _one_call(self) -> Reading[bool]:
        head, _ = yield from self._head(ARGUMENTS)
        yield from self._skip_space()
        id = head.strip()
        if self._only is not None and NUMBER.fullmatch(id):
            id = f"functions.{self._only}:{id}"
        known = ID.fullmatch(id)
        if known is None or not self._begins("{"):
            return False
        self._start(known[1], self._unique(id))
        yield from self._arguments()
        return True

    def _unique(self, id: str) -> str:
        name, _, number = id.rpartition(":")
        count = int(number)
        while f"{name}:{count}" in self._ids:
            count += 1
        self._ids.add(f"{name}:{count}")
        return f"{name}:{count}"
