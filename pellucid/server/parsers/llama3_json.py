"""Finds the calls of Llama 3.1 and its kin: answers that are JSON, `{"name": ..., "parameters": {...}}`.

Several are separated by `;` or white space; `<|python_tag|>` may come before, where special tokens are shown.
"""

from __future__ import annotations

from collections.abc import Callable
from string import whitespace
from typing import ClassVar

from pellucid.server.parsers.base import CallFrame, Content, Event, ParserSetting
from pellucid.server.parsers.calls import CallReader

TAG = "<|python_tag|>"


class Llama3JsonParser:
    """An answer that does not begin with a call is content, and so is all behind the last call."""

    frame: ClassVar[CallFrame | None] = CallFrame('{"name": NAME, "parameters": ', "}", "; ")

    def __init__(self, setting: ParserSetting) -> None:
        self._held = ""
        self._separators = whitespace
        self._events: list[Event] = []
        self._call = CallReader()
        self._opening = ""  # what is before a call, if it is one
        self._read: Callable[[], bool] = self._read_start

    def feed(self, text: str) -> list[Event]:
        self._held += text
        while self._read():
            pass
        return self._take()

    def finish(self) -> list[Event]:
        if self._read == self._read_call:
            self._tell(self._call.finish())
        elif self._call.is_call:
            self._emit(self._held.lstrip(self._separators))
        else:
            self._emit(self._held)
        return self._take()

    # Each reads from what is held, and says whether the next one has something to read.

    def _read_start(self) -> bool:
        body = self._held.lstrip(self._separators)
        if body != TAG and TAG.startswith(body):
            return False
        body = body.removeprefix(TAG).lstrip()
        if not body:
            return False
        if not body.startswith("{"):
            self._read = self._read_text
            return True
        self._opening = self._held[: -len(body)]
        self._held, self._call, self._read = body, CallReader(), self._read_call
        return True

    def _read_call(self) -> bool:
        self._tell(self._call.feed(self._held))
        self._held = ""
        if not self._call.is_done:
            return False
        self._held, self._separators = self._call.rest, whitespace + ";"
        self._read = self._read_start if self._call.is_call else self._read_text
        return True

    def _read_text(self) -> bool:
        self._emit(self._held)
        self._held = ""
        return False

    def _tell(self, events: list[Event]) -> None:
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
