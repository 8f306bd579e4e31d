"""Finds the calls of Llama 3.1 and its kin: answers that are JSON, `{"name": ..., "parameters": {...}}`.

Several are separated by `;` or white space; `<|python_tag|>` may come before, where special tokens are shown.
"""

from __future__ import annotations

from collections.abc import Callable
from string import whitespace
from typing import ClassVar

from pellucid.server.parsers.base import CallFrame, Event, ParserSetting
from pellucid.server.parsers.calls import CallParser

TAG = "<|python_tag|>"


class Llama3JsonParser(CallParser):
    """An answer that does not begin with a call is content, and so is all behind the last call."""

    frame: ClassVar[CallFrame | None] = CallFrame('{"name": "NAME", "parameters": ', "}", "; ", None)
    keeps: ClassVar[tuple[str, ...]] = ()

    def __init__(self, setting: ParserSetting) -> None:
        super().__init__()
        self._separators = whitespace
        self._read = self._read_start

    def finish(self) -> list[Event]:
        if self._read == self._read_call:
            self._tell(self._call.finish())
        elif self._call.is_call:
            self._emit(self._held.lstrip(self._separators))
        else:
            self._emit(self._held)
        return self._take()

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
        self._open_call(body)
        return True

    def _behind_call(self) -> Callable[[], bool]:
        self._separators = whitespace + ";"
        return self._read_start if self._call.is_call else self._read_text

    def _read_text(self) -> bool:
        self._emit(self._held)
        self._held = ""
        return False
