"""Parsers as scripts: each tells from top to bottom what its model writes, as if all of the text were there.

`read` is a generator.  Where a script asks for more than has come, it stops and goes on with the next piece,
so it says the same however a text is cut.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Generator
from typing import TypeVar

from pellucid.server.parsers.base import Content, Event, Reasoning, ToolCallArguments, ToolCallStart, overlap
from pellucid.server.parsers.calls import Brackets, CallReader, new_id
from pellucid.server.parsers.literals import NO_VALUE, as_json, literal

T = TypeVar("T")
Reading = Generator[None, None, T]
NAME = re.compile(r"[\w.-]{1,128}")
LONGEST_HEAD = 256  # characters between what opens a call and its arguments


class ScriptParser:
    """What is held begins with what was read since the last event: `_at` characters, maybe markup.

    `_drop` says that they are, `_give_back` that they are content.
    """

    def __init__(self) -> None:
        self._held, self._at = "", 0
        self._is_over = False
        self._events: list[Event] = []
        self._reading: Reading[None] | None = self.read()

    def read(self) -> Reading[None]:
        """The script.  What it leaves unread at its end is content."""
        raise NotImplementedError

    def feed(self, text: str) -> list[Event]:
        self._held += text
        return self._go_on()

    def finish(self) -> list[Event]:
        self._is_over = True
        return self._go_on()

    def _go_on(self) -> list[Event]:
        if self._reading is not None and next(self._reading, self) is self:
            self._reading = None
        if self._reading is None:
            self._at = len(self._held)
            self._give_back()
        taken, self._events = self._events, []
        return taken

    # What scripts ask for.  Those that wait are called with `yield from`.

    def _until(self, *tags: str, kind: type[Content | Reasoning] = Content) -> Reading[str]:
        """Tell all text up to the first of these tags, and read it, with the white space before it.

        Returns the tag; nothing at the end of the text.
        """
        assert self._at == 0, "something was read, and nobody said what it is"
        while True:
            found = [(at, -len(tag), tag) for tag in tags if (at := self._held.find(tag)) >= 0]
            if found:
                at, _, tag = min(found)
                num_told = self._tell(kind, len(self._held[:at].rstrip()))
                self._at = at - num_told + len(tag)
                return tag
            if self._is_over:
                self._tell(kind, len(self._held))
                return ""
            most = max((overlap(self._held, tag) for tag in tags), default=0)
            safe = self._held[: len(self._held) - most]
            self._tell(kind, len(safe.rstrip() if tags else safe))
            yield

    def _accept(self, *texts: str) -> Reading[str]:
        """Read the one of these texts that comes next, none of which begins another; nothing if none does."""
        while True:
            rest = self._held[self._at :]
            for text in texts:
                if rest.startswith(text):
                    self._at += len(text)
                    return text
            if self._is_over or not any(text.startswith(rest) for text in texts):
                return ""
            yield

    def _skip_space(self) -> Reading[None]:
        """Read white space."""
        while True:
            rest = self._held[self._at :]
            self._at = len(self._held) - len(rest.lstrip())
            if self._at < len(self._held) or self._is_over:
                return
            yield

    def _head(self, *tags: str) -> Reading[tuple[str, str]]:
        """Read a short text and the first of these tags behind it; two empty texts if there is none."""
        while True:
            rest = self._held[self._at :]
            found = [(at, tag) for tag in tags if (at := rest.find(tag)) >= 0]
            if found:
                at, tag = min(found)
                if at > LONGEST_HEAD:
                    return "", ""
                self._at += at + len(tag)
                return rest[:at], tag
            if self._is_over or len(rest) > LONGEST_HEAD + max(map(len, tags)):
                return "", ""
            yield

    def _arguments(self) -> Reading[bool]:
        """Tell the JSON that comes next as arguments, as it is written; did it end?

        Outside of strings no JSON has a `<`, so a tag ends it, too.  Python's is told when it is whole.
        """
        self._drop()
        while self._held.rstrip() == "{" and not self._is_over:
            yield
        is_pythons = self._begins("{") and self._held[1:].lstrip().startswith("'")
        brackets, num_read = Brackets(), 0
        while True:
            num_read = brackets.read(self._held, num_read, floor=0)
            is_at_end = brackets.is_closed or brackets.is_at_tag or self._is_over
            if is_at_end or not is_pythons:
                text, self._held = brackets.mended(self._held[:num_read]), self._held[num_read:]
                self._argue(_as_json(text) if is_pythons else text)
                num_read = 0
            if is_at_end:
                return brackets.is_closed
            yield

    def _call(self, names: Collection[str] | None = None) -> Reading[bool]:
        """Read `{"name": ..., "arguments": {...}}`, and tell the call; what is none is content.

        names: as a reader's.
        """
        reader, is_first = CallReader(names), True
        while not reader.is_done:
            opening, body = self._held[: self._at], self._held[self._at :]
            events = reader.feed(body)
            if self._is_over and not reader.is_done:
                events += reader.finish()
            if events and is_first and opening and not reader.is_call:
                events.insert(0, Content(opening))
            self._events += events
            is_first = is_first and not events
            self._held = (opening if is_first and not reader.is_done else "") + reader.rest
            self._at = len(opening) if is_first and not reader.is_done else 0
            if not reader.is_done:
                yield
        return reader.is_call

    def _call_list(self, *, may_be_bare: bool = False) -> Reading[bool]:
        """Read `[{"name": ..., "arguments": {...}}, ...]`; was it all calls, or at least the first one?

        may_be_bare: are there lists without their brackets?
        """
        yield from self._skip_space()
        if not (yield from self._accept("[")) and not (may_be_bare and self._begins("{")):
            return False
        has_calls = False
        while True:
            yield from self._skip_space()
            if not self._begins("{") or not (yield from self._call()):
                return has_calls
            has_calls = True
            yield from self._skip_space()
            if not (yield from self._accept(",")):
                yield from self._accept("]")
                self._drop()
                return True

    # What scripts say.

    def _begins(self, text: str) -> bool:
        """Does what has come, and was not read, begin so?"""
        return self._held.startswith(text, self._at)

    def _start(self, name: str, id: str | None = None) -> None:
        """A call begins; what was read is its head."""
        self._drop()
        self._events.append(ToolCallStart(id or new_id(), name))

    def _drop(self) -> None:
        """What was read is markup."""
        self._held, self._at = self._held[self._at :], 0

    def _give_back(self) -> None:
        """What was read is content."""
        self._tell(Content, self._at)
        self._at = 0

    def _argue(self, text: str) -> None:
        """More of the arguments, which the model has written otherwise."""
        if text:
            self._events.append(ToolCallArguments(text))

    def _tell(self, kind: type[Content | Reasoning], length: int) -> int:
        if length:
            self._events.append(kind(self._held[:length]))
            self._held = self._held[length:]
        return length


def _as_json(text: str) -> str:
    """Of an object as Python writes it; the text itself where it is none."""
    try:
        return as_json(literal(text))
    except NO_VALUE:
        return text
