"""Finds calls that are written as a list of Python's: `[weather(city="Paris"), time()]`.

So do Llama 3.2 and Llama 4, the latter perhaps between `<|python_start|>` and `<|python_end|>`.
"""

from __future__ import annotations

import ast
import json
import re
from typing import ClassVar

from pellucid.server.parsers.base import CallFrame, ParserSetting
from pellucid.server.parsers.script import NAME, Reading, ScriptParser

START, END = "<|python_start|>", "<|python_end|>"
MARK = re.compile(r"[\"'\\()\[\]{}]")
WORDS = {"true": True, "false": False, "null": None}  # for those who mix it with JSON


class PythonicParser(ScriptParser):
    """An answer that does not begin with such a list is content.  A call is told when it is whole."""

    frame: ClassVar[CallFrame | None] = None  # no schema describes Python's arguments
    keeps: ClassVar[tuple[str, ...]] = (START, END)

    def __init__(self, setting: ParserSetting) -> None:
        super().__init__()

    def read(self) -> Reading[None]:
        yield from self._skip_space()
        yield from self._accept(START)
        yield from self._skip_space()
        if not (yield from self._accept("[")):
            return
        while True:
            yield from self._skip_space()
            text = yield from self._expression()
            call = _call(text)
            if call is None:
                return
            self._start(call[0])
            self._argue(call[1])
            yield from self._skip_space()
            if not (yield from self._accept(",")):
                break
        yield from self._accept("]")
        yield from self._skip_space()
        yield from self._accept(END)
        yield from self._skip_space()
        self._drop()

    def _expression(self) -> Reading[str]:
        """Read up to the bracket that closes the first one outside of strings; nothing if there is none."""
        at, depth, quote = self._at, 0, ""
        while True:
            mark = MARK.search(self._held, at)
            if mark is None or (mark[0] == "\\" and mark.end() == len(self._held)):
                if self._is_over:
                    return ""
                at = len(self._held) if mark is None else mark.start()
                yield
                continue
            at = mark.end()
            match mark[0]:
                case "\\":
                    at += 1
                case '"' | "'" as sign:
                    quote = sign if not quote else ("" if quote == sign else quote)
                case "(" | "[" | "{" if not quote:
                    depth += 1
                case ")" | "]" | "}" if not quote:
                    depth -= 1
                    if depth <= 0:
                        text, self._at = self._held[self._at : at], at
                        return text
                case _:
                    pass


def _call(text: str) -> tuple[str, str] | None:
    """The function's name and its arguments as JSON; None if this is no call with keywords alone."""
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not NAME.fullmatch(name := ast.unparse(call.func)):
            return None
        values = {word.arg: _value(word.value) for word in call.keywords if word.arg is not None}
        if len(values) < len(call.keywords):
            return None
        return name, json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> object:
    """Of a literal, in which JSON's words are Python's.  Raises ValueError for anything else."""
    match node:
        case ast.Name(id=word) if word in WORDS:
            return WORDS[word]
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_value(part) for part in parts]
        case ast.Dict(keys=keys, values=values):
            names = [None if key is None else ast.literal_eval(key) for key in keys]
            if not all(isinstance(name, str) for name in names):
                raise ValueError("a key is no text")
            return dict(zip(names, map(_value, values), strict=True))
        case _:
            return ast.literal_eval(node)
