"""Finds the calls of the Hermes convention, also Qwen's and the bundled model's.

`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, the white space around a tag being part of it.
The end tag may be missing: it was a stop string, or the text was cut off.  There may be braces too many
before it, or another call.
"""

from __future__ import annotations

from collections.abc import Callable
from string import whitespace
from typing import ClassVar

from pellucid.server.parsers.base import CallFrame, Event, ParserSetting, overlap
from pellucid.server.parsers.calls import CallParser

START = "<tool_call>"
END = "</tool_call>"
STRAY = whitespace + "}"


class HermesParser(CallParser):
    """Whatever is no call stays in the content, its tags included."""

    frame: ClassVar[CallFrame | None] = CallFrame(
        f'{START}\n{{"name": "NAME", "arguments": ', f"}}\n{END}", "\n", START
    )
    keeps: ClassVar[tuple[str, ...]] = (START, END)

    def __init__(self, setting: ParserSetting) -> None:
        super().__init__()
        self._is_behind_call = False
        self._read = self._read_text

    def finish(self) -> list[Event]:
        if self._read == self._read_call:
            self._tell(self._call.finish())
        elif self._read == self._read_end:
            self._emit(self._held.lstrip(STRAY))
        else:
            self._emit(self._opening + self._held)
        return self._take()

    def _read_text(self) -> bool:
        if self._is_behind_call:
            self._held = self._held.lstrip()
        at = self._held.find(START)
        safe = self._held[:at] if at >= 0 else self._held[: len(self._held) - overlap(self._held, START)]
        text = safe.rstrip()
        self._emit(text)
        self._held = self._held[len(text) :]
        if at < 0:
            return False
        self._opening, _, self._held = self._held.partition(START)
        self._opening += START
        self._read = self._read_start
        return True

    def _read_start(self) -> bool:
        body = self._held.lstrip()
        if not body:
            return False
        if body.startswith("{"):
            self._open_call(body)
            return True
        self._emit(self._opening)
        self._opening, self._read = "", self._read_text
        return True

    def _behind_call(self) -> Callable[[], bool]:
        return self._read_end if self._call.is_call else self._read_text

    def _read_end(self) -> bool:
        body = self._held.lstrip()
        if body.startswith("{"):
            self._open_call(body)
            return True
        behind = body.lstrip(STRAY)
        if behind != END and END.startswith(behind):
            return False
        self._held, self._is_behind_call = (
            (behind if behind.startswith(END) else body).removeprefix(END),
            True,
        )
        self._read = self._read_text
        return True

    def _emit(self, text: str) -> None:
        super()._emit(text)
        self._is_behind_call = self._is_behind_call and not text
