"""Finds the calls of Llama 3.1 and its kin: JSON, `{"name": ..., "parameters": {...}}`.

Several are separated by `;` or white space; `<|python_tag|>` may come before, where special tokens are shown,
or Llama 4's tags around.  Behind such a tag, a call may be Python's: `weather(city="Paris")`.
"""

from __future__ import annotations

import re
from typing import ClassVar

from pellucid.server.parsers.base import CallFrame, ParserSetting
from pellucid.server.parsers.pythonic import END, START, PythonScript
from pellucid.server.parsers.script import Reading

TAGS = ("<|python_tag|>", START)
# What an object of JSON begins with if it may be a call, and how much of it shows that.
FIRST_KEY = re.compile(r"""\{\s{0,32}(?:["'](?:name|type|id|arguments|parameters)["']|$)""")
MOST = 64


class Llama3JsonParser(PythonScript):
    """A call stands at the beginning of an answer, or calls a tool at that of a line."""

    frame: ClassVar[CallFrame | None] = CallFrame('{"name": "NAME", "parameters": ', "}", "; ", None)
    keeps: ClassVar[tuple[str, ...]] = ()

    def __init__(self, setting: ParserSetting) -> None:
        self._names = setting.names
        super().__init__()

    def read(self) -> Reading[None]:
        yield from self._skip_space()
        names = None  # at the beginning, any
        tag = yield from self._accept(*TAGS)
        while True:
            yield from self._calls(tag, names)
            names, may_be_call = self._names, False
            while not may_be_call:
                self._give_back()
                tag = yield from self._until("\n{", *TAGS)
                if not tag:
                    return
                self._at -= tag not in TAGS
                may_be_call = tag in TAGS or (yield from self._may_be_call())

    def _may_be_call(self) -> Reading[bool]:
        """Does an object begin as calls do?"""
        while True:
            rest = self._held[self._at : self._at + MOST]
            first = rest[1:].lstrip()[:1]
            if FIRST_KEY.match(rest) and (first or self._is_over):
                return bool(first)
            if self._is_over or len(rest) == MOST or first not in ("", '"', "'"):
                return False
            yield

    def _calls(self, tag: str, names: list[str] | None) -> Reading[None]:
        """All calls that come next."""
        while True:
            yield from self._skip_space()
            if self._begins("{"):
                is_call = yield from self._call(names)
            else:
                is_call = tag in TAGS and (yield from self._python_call())
            if not is_call:
                return
            yield from self._separator()
            self._drop()
            tag = yield from self._accept(*TAGS)
            names = names if names is None or not tag else None

    def _separator(self) -> Reading[None]:
        yield from self._skip_space()
        while (yield from self._accept(";", END)):
            yield from self._skip_space()
