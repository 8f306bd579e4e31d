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
    """Values are JSON, but for texts, which are as they are.

    The tag before a key may be missing behind the name of a tool, and that before any value.
    """

    frame: ClassVar[CallFrame | None] = CallFrame(f"{START}NAME\n", f"\n{END}", "\n", START, style="glm_xml")
    keeps: ClassVar[tuple[str, ...]] = (START, END, KEY, KEY_END, VALUE, VALUE_END)

    def __init__(self, setting: ParserSetting) -> None:
        super().__init__()
        self._tools, self._names = setting.tools, sorted(setting.names, key=len, reverse=True)

    def read(self) -> Reading[None]:
        while (yield from self._until(START)):
            head, tag = yield from self._head(KEY, KEY_END, END)
            name, key = self._parted(head) if tag == KEY_END else (head.strip(), None)
            if not NAME.fullmatch(name):
                self._give_back()
                continue
            self._start(name)
            self._begin_parameters()
            if tag == END or (yield from self._parameters(name, key)):
                self._end_parameters()
            yield from self._skip_space()
            self._drop()

    def _parted(self, head: str) -> tuple[str, str]:
        """A tool's name, and the key behind it."""
        name = next((name for name in self._names if head.strip().startswith(name)), "")
        return name, head.strip().removeprefix(name).strip()

    def _parameters(self, function: str, first: str | None) -> Reading[bool]:
        """All pairs; did they end?  The tag before the first key has been read, or this key itself."""
        schemas, key = parameters_of(self._tools, function), first
        while True:
            if key is None:
                key, tag = yield from self._head(KEY_END)
                if not tag:
                    return False
            yield from self._skip_space()
            if not (yield from self._accept(VALUE)) and (not self._held[self._at :] or self._begins("<")):
                return False
            key = key.strip()
            if not (yield from self._parameter(key, schemas.get(key), (VALUE_END,), "")):
                return False
            key = None
            yield from self._skip_space()
            if not (yield from self._accept(KEY)):
                return bool((yield from self._accept(END)))
