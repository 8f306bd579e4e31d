"""Finds the calls of GLM-4.5 and later: a name, then keys and values in turn.

`<tool_call>weather\\n<arg_key>city</arg_key>\\n<arg_value>Paris</arg_value>\\n</tool_call>`
"""

from __future__ import annotations

from typing import ClassVar

from pellucid.server.parsers.base import CallFrame, ParserSetting
from pellucid.server.parsers.script import NAME, Reading
from pellucid.server.parsers.typed import TypedParser, parameters_of

START, END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"


class Glm45Parser(TypedParser):
    """Values are JSON, but for texts, which are as they are."""

    frame: ClassVar[CallFrame | None] = CallFrame(f"{START}NAME\n", f"\n{END}", "\n", START, style="glm_xml")
    keeps: ClassVar[tuple[str, ...]] = (START, END, KEY, KEY_END, VALUE, VALUE_END)

    def __init__(self, setting: ParserSetting) -> None:
        super().__init__()
        self._tools = setting.tools

    def read(self) -> Reading[None]:
        while (yield from self._until(START)):
            name, tag = yield from self._head(KEY, END)
            name = name.strip()
            if not NAME.fullmatch(name):
                self._give_back()
                continue
            self._start(name)
            self._begin_parameters()
            if tag == END or (yield from self._parameters(name)):
                self._end_parameters()
            yield from self._skip_space()
            self._drop()

    def _parameters(self, function: str) -> Reading[bool]:
        """All pairs, the first of whose tags has been read; did they end?"""
        schemas = parameters_of(self._tools, function)
        while True:
            key, tag = yield from self._head(KEY_END)
            yield from self._skip_space()
            if not tag or not (yield from self._accept(VALUE)):
                return False
            key = key.strip()
            if not (yield from self._parameter(key, schemas.get(key), (VALUE_END,), "")):
                return False
            yield from self._skip_space()
            if not (yield from self._accept(KEY)):
                return bool((yield from self._accept(END)))
