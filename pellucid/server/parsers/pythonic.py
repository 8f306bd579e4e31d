"""Finds calls that are written as a list of Python's: `[weather(city="Paris"), time()]`.

So do Llama 3.2 and Llama 4, the latter perhaps between `<|python_start|>` and `<|python_end|>`, and often
behind words of what it will do.
"""

from __future__ import annotations

import ast
import json
import keyword
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from pellucid.server.parsers.base import CallFrame, ParserSetting
from pellucid.server.parsers.literals import NO_VALUE, parsed, value_of
from pellucid.server.parsers.script import NAME, Reading, ScriptParser

START, END = "<|python_start|>", "<|python_end|>"
MARK = re.compile(r"[\"'\\()\[\]{}]")
# Texts, which may have line breaks, and keywords that are words of Python's own: what models get wrong.
TEXT = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
WRONG = re.compile(rf"(?P<text>{TEXT})|\b(?P<word>{'|'.join(keyword.kwlist)})(?=\s*=[^=])", re.DOTALL)
SHIELD = "keyword_of_python_"
MOST_IN_VAIN = 1 << 19  # characters, read for calls that do not end; behind so many no call is looked for
PYTHONS = {  # where no JSON is within or around it
    "boolean": {"type": "regex", "pattern": "True|False"},
    "null": {"type": "const_string", "value": "None"},
}
# What begins with neither a bracket nor the token for it.
OTHER = {"type": "regex", "pattern": r"(\s*(([^\s\[<]|<[^|])[\s\S]*|<))?"}
FRAME = CallFrame("NAME(", ")", ", ", None, "[", "]", style="python", otherwise=OTHER)


class PythonScript(ScriptParser):
    """What scripts ask for where calls are Python's."""

    def __init__(self) -> None:
        super().__init__()
        self._num_in_vain = 0  # characters, each as often as it was read for a call that did not end

    def _python_call(self) -> Reading[bool]:
        """Read `name(key=value, ...)`, and tell the call; is it one?"""
        call = _call((yield from self._expression()))
        if call is not None:
            self._start(call[0])
            self._argue(call[1])
        return call is not None

    def _expression(self) -> Reading[str]:
        """Read up to the bracket that closes the first one outside of strings; nothing if there is none."""
        at, depth, quote = self._at, 0, ""
        while self._num_in_vain < MOST_IN_VAIN:
            mark = MARK.search(self._held, at)
            if mark is None or (mark[0] == "\\" and mark.end() == len(self._held)):
                if self._is_over:
                    self._num_in_vain += len(self._held) - self._at
                    break
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
        return ""


class PythonicParser(PythonScript):
    """A list stands at the beginning of an answer, or calls a tool at that of a line.

    A call is told when it is whole.
    """

    frame: ClassVar[CallFrame | None] = FRAME
    keeps: ClassVar[tuple[str, ...]] = (START, END)

    def __init__(self, setting: ParserSetting) -> None:
        self._names = setting.names
        super().__init__()

    def read(self) -> Reading[None]:
        yield from self._skip_space()
        yield from self._accept(START)
        while True:
            yield from self._lists()
            is_list = False
            while not is_list:
                self._give_back()
                tag = yield from self._until("\n[", START)
                if not tag:
                    return
                is_list = tag == START or (yield from self._is_of_tool())

    def _is_of_tool(self) -> Reading[bool]:
        """Does a list call a tool, whose bracket is the last that has been read?  It is put back."""
        place = self._at - 1
        name, tag = yield from self._head("(", "]", ",", " ", "\n")
        self._at = place
        return tag == "(" and name in self._names

    def _lists(self) -> Reading[None]:
        """All lists that come next, the one behind the other."""
        yield from self._skip_space()
        while (yield from self._accept("[")):
            has_more = True
            while has_more:
                yield from self._skip_space()
                if not (yield from self._python_call()):
                    return
                yield from self._skip_space()
                has_more = yield from self._accept(",")
                yield from self._skip_space()
                self._drop()
            yield from self._accept("]")
            yield from self._skip_space()
            yield from self._accept(END)
            yield from self._skip_space()
            self._drop()


def _call(text: str) -> tuple[str, str] | None:
    """The function's name and its arguments as JSON; None if this is no call with keywords alone."""
    for each in (text, WRONG.sub(_right, text)):
        try:
            call = parsed(each)
            if not isinstance(call, ast.Call) or call.args:
                return None
            name = ast.unparse(call.func)
            words = {
                word.arg.removeprefix(SHIELD): word.value for word in call.keywords if word.arg is not None
            }
            if not NAME.fullmatch(name) or len(words) < len(call.keywords):
                return None
            values = {word: value_of(value) for word, value in words.items()}
            return name, _paired(json.dumps(values, ensure_ascii=False, allow_nan=False))
        except SyntaxError:
            continue
        except NO_VALUE:
            return None
    return None


def _right(wrong: re.Match[str]) -> str:
    if wrong["word"]:
        return SHIELD + wrong["word"]
    return wrong["text"].replace("\n", "\\n").replace("\r", "\\r")


def _paired(text: str) -> str:
    """With halves of letters joined, as JSON's escapes mean them, and others replaced."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def keywords(name: str, schema: Mapping[str, object]) -> Mapping[str, object]:
    """Arguments of a call of `name`, `city="Paris", days=2`, as a part of a structural tag.

    schema: of an object; what it requires comes first, and values are JSON, but for words that stand alone.
    Raises ValueError for a parameter that must be there and cannot be a keyword.
    """
    properties, required = schema.get("properties"), schema.get("required")
    required = required if isinstance(required, list) else []
    if not isinstance(properties, Mapping) or not properties:
        anything = {
            "type": "sequence",
            "elements": [{"type": "regex", "pattern": r"[A-Za-z_]\w*="}, _json({})],
        }
        tag = {"type": "tag", "begin": "", "content": anything, "end": ""}
        return {"type": "tags_with_separator", "tags": [tag], "separator": ", ", "at_least_one": False}
    for key in required:
        if not _is_keyword(key):
            raise ValueError(
                f"tools: {name} requires {key!r}, which calls in Python's form cannot name; rename it"
            )
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    parts = {
        key: _keyword(key, {**shared, **value} if isinstance(value, Mapping) else value)
        for key, value in properties.items()
        if _is_keyword(key)
    }
    always = [parts.pop(key) for key in required if key in parts]
    maybe = list(parts.values())
    if always:
        return _listed(always, maybe)
    starts = [_listed([first], maybe[at + 1 :]) for at, first in enumerate(maybe)]
    return {"type": "optional", "content": {"type": "or", "elements": starts}} if starts else _text("")


def _is_keyword(key: object) -> bool:
    return isinstance(key, str) and key.isidentifier() and not keyword.iskeyword(key)


def _listed(
    always: Sequence[Mapping[str, object]], maybe: Iterable[Mapping[str, object]]
) -> dict[str, object]:
    """Parts with commas between them.  always: at least one."""
    first, *others = always
    more = [{"type": "optional", "content": _behind_comma(part)} for part in maybe]
    return {"type": "sequence", "elements": [first, *map(_behind_comma, others), *more]}


def _behind_comma(part: Mapping[str, object]) -> dict[str, object]:
    return {"type": "sequence", "elements": [_text(", "), part]}


def _keyword(key: str, schema: object) -> dict[str, object]:
    said = schema if isinstance(schema, Mapping) else {}
    is_any = not {"enum", "const"} & said.keys()
    value = PYTHONS.get(str(said.get("type"))) if is_any else None
    return {"type": "sequence", "elements": [_text(f"{key}="), value or _json(schema)]}


def _text(text: str) -> dict[str, object]:
    return {"type": "const_string", "value": text}


def _json(schema: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": schema}
