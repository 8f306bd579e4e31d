"""One call as a JSON object, `{"name": ..., "arguments": {...}}`, read while it is being written.

What surrounds the object is a matter of each model's convention.  One that is written as Python would, with
single quotation marks, or with line breaks in its strings, is told as the JSON that was meant.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Collection

from pellucid.server.parsers.base import Content, Event, ToolCallArguments, ToolCallStart
from pellucid.server.parsers.literals import NO_VALUE, as_json, literal

# With this much of an object it is a call; others, such as one with its keys in another order or one of
# Python's, are read when they end.  Bounded, for it is looked for again with every piece of text.
NAME, KEY = r'"([^"\\<]{1,128})"', '"(?:arguments|parameters)"'
HEAD = re.compile(r"\s{0,32}".join([r"\{", '"name"', ":", NAME, ",", KEY, ":", r"(?=\{\s{0,32}[\"}])"]))
MARK = re.compile(r"""["'\\{}\[\]<\x00-\x1f]""")
ARGUMENT_KEYS = ("arguments", "parameters")
OTHER_KEYS = {"name", "type", "id"}  # of a call without arguments; with others it is data that has a name
OPENERS = tuple("{[,:")  # what a string of Python's stands behind; an apostrophe in prose does not


class CallReader:
    """Feed it text from the object's first brace on, until it is done.

    An object that is no call is content.  A tag outside all strings ends a malformed one.
    names: of the functions that may be called; None, any.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        self._names = names
        self.is_done = False
        self.is_call = False
        self.rest = ""  # when done: what came behind the object
        self._held = ""
        self._num_read = 0  # characters held that brackets were counted in
        self._in_arguments = False
        self._brackets = Brackets()

    def feed(self, text: str) -> list[Event]:
        assert not self.is_done, f"text {text!r} behind a call"
        self._held += text
        if not self.is_call:
            head = HEAD.match(self._held)
            is_known = head is not None and (self._names is None or head[1] in self._names)
            return self._begin(head) if head is not None and is_known else self._read_object()
        return self._read_arguments() if self._in_arguments else self._read_end()

    def finish(self) -> list[Event]:
        """The text has ended."""
        self.is_done = True
        return self._leave(len(self._held))

    def _begin(self, head: re.Match[str]) -> list[Event]:
        self.is_call = self._in_arguments = True
        self._brackets = Brackets(depth=1)
        self._held = self._held[head.end() :]
        return [ToolCallStart(new_id(), head[1]), *self._read_arguments()]

    def _read_arguments(self) -> list[Event]:
        end = self._brackets.read(self._held, 0, floor=1)
        arguments, self._held = self._brackets.mended(self._held[:end]), self._held[end:]
        events: list[Event] = [ToolCallArguments(arguments)] if arguments else []
        if self._brackets.is_at_tag:
            return [*events, *self._end(0)]
        if not self._brackets.is_closed:
            return events
        self._in_arguments, self._num_read = False, 0
        return [*events, *self._read_end()]

    def _read_end(self) -> list[Event]:
        """What an object has behind the arguments is nothing to anybody, unless it does not end."""
        end = self._num_read = self._brackets.read(self._held, self._num_read, floor=0)
        if self._brackets.is_at_tag:
            return self._end(end)
        if self._brackets.is_closed:
            self._held = self._held[end:]
            return self._end(0)
        return []

    def _read_object(self) -> list[Event]:
        end = self._num_read = self._brackets.read(self._held, self._num_read, floor=0)
        if self._brackets.is_closed:
            call = _call(self._brackets.mended(self._held[:end]))
            if call is not None and (self._names is None or call[0].name in self._names):
                self.is_call, self._held = True, self._held[end:]
                return [*call, *self._end(0)]
        return self._end(end) if self._brackets.is_closed or self._brackets.is_at_tag else []

    def _end(self, length: int) -> list[Event]:
        """Done, but for so many characters."""
        self.is_done, self.rest = True, self._held[length:]
        return self._leave(length)

    def _leave(self, length: int) -> list[Event]:
        text = self._held[:length]
        return [Content(text)] if text and not (self.is_call and text.isspace()) else []


class Brackets:
    """Counts the open brackets of a JSON text, or of one of Python's, however it is cut."""

    def __init__(self, depth: int = 0) -> None:
        self.is_closed = False  # has the floor been reached?
        self.is_at_tag = False
        self._depth = depth
        self._quote = ""  # that the string has begun with
        self._is_escaped = False
        self._before = ""  # the last character that was read and is no white space
        self._breaks: list[int] = []  # where a string has a control character, which JSON's have not

    def read(self, text: str, start: int, *, floor: int) -> int:
        """Read on from `start`; the place behind the bracket that leaves `floor` open, or that of a tag."""
        self.is_closed, begin = False, start
        if self._is_escaped and start < len(text):
            self._is_escaped, start = False, start + 1
        while (mark := MARK.search(text, start)) is not None:
            start = mark.end()
            match mark[0]:
                case '"' | "'" as sign if self._quote:
                    self._quote = "" if self._quote == sign else self._quote
                case '"' as sign:
                    self._quote = sign
                case "'" as sign if self._last(text, begin, mark.start()) in OPENERS:
                    self._quote = sign
                case "\\" if self._quote:
                    self._is_escaped = start == len(text)
                    start = min(start + 1, len(text))
                case "{" | "[" if not self._quote:
                    self._depth += 1
                case "}" | "]" if not self._quote:
                    self._depth -= 1
                    self.is_closed = self._depth <= floor
                    if self.is_closed:
                        return start
                case "<" if not self._quote:
                    self.is_at_tag = True
                    return mark.start()
                case sign if self._quote and sign < " ":
                    self._breaks.append(mark.start())
                case _:
                    pass
        self._before = self._last(text, begin, len(text))
        return len(text)

    def mended(self, text: str) -> str:
        """The text that was read since the last time, with escapes in its strings where there must be."""
        ends = [0, *(at + 1 for at in self._breaks)]
        parts = [
            text[end:at] + json.dumps(text[at])[1:-1] for end, at in zip(ends, self._breaks, strict=False)
        ]
        self._breaks = []
        return "".join(parts) + text[ends[-1] :]

    def _last(self, text: str, begin: int, end: int) -> str:
        """The last character before `end` that is no white space; begin: where `_before` is that."""
        while end > begin and text[end - 1].isspace():
            end -= 1
        return text[end - 1] if end > begin else self._before


def _call(text: str) -> tuple[ToolCallStart, ToolCallArguments] | None:
    """A whole object's events; None if it is no call.  Arguments may be null, or a string of an object."""
    try:
        call = literal(text)
        if not isinstance(call, dict):
            return None
        given = [call[key] for key in ARGUMENT_KEYS if key in call]
        if not given and not call.keys() <= OTHER_KEYS:
            return None
        arguments = given[0] if given else {}
        if isinstance(arguments, str):
            arguments = literal(arguments) if arguments.strip() else {}
        if arguments is None:
            arguments = {}
    except NO_VALUE:
        return None
    name = call.get("name")
    if not isinstance(name, str) or not name or not name.isprintable() or not isinstance(arguments, dict):
        return None
    return ToolCallStart(new_id(), name), ToolCallArguments(as_json(arguments))


def new_id() -> str:
    """Unique among all calls of all answers."""
    return f"call_{uuid.uuid4().hex[:24]}"


class CallParser:
    """A convention's parser: what may turn out to be markup is held, and states read from what is held.

    A state says whether the next one has something to read.  Subclasses begin in one of their own, and come
    to `_read_call` by `_open_call`.
    """

    _read: Callable[[], bool]

    def __init__(self) -> None:
        self._held = ""
        self._opening = ""  # what is before a call, if it is one
        self._events: list[Event] = []
        self._call = CallReader()

    def feed(self, text: str) -> list[Event]:
        self._held += text
        while self._read():
            pass
        return self._take()

    def _open_call(self, body: str) -> None:
        """`body`, the end of what is held, may be a call."""
        self._opening += self._held[: -len(body)]
        self._held, self._call, self._read = body, CallReader(), self._read_call

    def _read_call(self) -> bool:
        self._tell(self._call.feed(self._held))
        self._held = ""
        if not self._call.is_done:
            return False
        self._held = self._call.rest
        self._read = self._behind_call()
        return True

    def _behind_call(self) -> Callable[[], bool]:
        """The state that reads what comes behind a call, or behind an object that was none."""
        raise NotImplementedError

    def _tell(self, events: list[Event]) -> None:
        """What the call's reader says; what is no call gets back what was before it."""
        if events and not self._call.is_call:
            self._emit(self._opening)
        if events:
            self._opening = ""
        self._events += events

    def _emit(self, text: str) -> None:
        if text:
            self._events.append(Content(text))

    def _take(self) -> list[Event]:
        taken, self._events = self._events, []
        return taken
