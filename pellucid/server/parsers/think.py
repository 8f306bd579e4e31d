"""Tells thinking from the answer: `<think>...</think>`, as Qwen3, DeepSeek-R1, GLM-4.5, Kimi K2, MiniMax M2
and the bundled model write it; Magistral has other tags.

The white space around a tag belongs to the tag, but that behind the last one to an answer which is held to a
language: it may be part of it.  Some templates write `<think>` into the prompt, and then the text begins with
thinking.  A text without the end tag was cut off while thinking.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from pellucid.server.parsers.base import Content, Event, ParserSetting, Reasoning, overlap

START = "<think>"
END = "</think>"


class ThinkParser:
    """Thinking comes first or not at all; a tag amid the answer is a word like any other."""

    tags: ClassVar[tuple[str, str] | None] = (START, END)
    keeps: ClassVar[tuple[str, ...]] = (START, END)

    def __init__(self, setting: ParserSetting) -> None:
        assert self.tags is not None
        self._start, self._end = self.tags
        self._is_opened = self._was_opened(setting)
        self._read_behind = self._read_answer if setting.is_constrained else self._read_answers_start
        self._held = ""
        self._events: list[Event] = []
        self._read: Callable[[], bool] = self._read_start

    def feed(self, text: str) -> list[Event]:
        self._held += text
        while self._read():
            pass
        return self._take()

    def finish(self) -> list[Event]:
        if self._read == self._read_start and self._is_opened:
            self._go_on(self._held.lstrip(), self._read_thought)
        self._emit(Reasoning if self._read == self._read_thought else Content, len(self._held))
        return self._take()

    # Each reads from what is held, and says whether the next one has something to read.

    def _read_start(self) -> bool:
        body = self._held.lstrip()
        if self._start.startswith(body):
            return False if body != self._start else self._go_on("", self._read_thoughts_start)
        if body.startswith(self._start):
            return self._go_on(body.removeprefix(self._start), self._read_thoughts_start)
        if self._is_opened:
            return self._go_on(body, self._read_thoughts_start)
        return self._go_on(self._held, self._read_answer)

    def _read_thoughts_start(self) -> bool:
        self._held = self._held.lstrip()
        return bool(self._held) and self._go_on(self._held, self._read_thought)

    def _read_thought(self) -> bool:
        at = self._held.find(self._end)
        if at < 0:
            safe = self._held[: len(self._held) - overlap(self._held, self._end)]
            self._emit(Reasoning, len(safe.rstrip()))
            return False
        self._emit(Reasoning, len(self._held[:at].rstrip()))
        return self._go_on(self._held.lstrip().removeprefix(self._end), self._read_behind)

    def _read_answers_start(self) -> bool:
        self._held = self._held.lstrip()
        return bool(self._held) and self._go_on(self._held, self._read_answer)

    def _read_answer(self) -> bool:
        self._emit(Content, len(self._held))
        return False

    def _go_on(self, rest: str, read: Callable[[], bool]) -> bool:
        self._held, self._read = rest, read
        return True

    def _emit(self, kind: type[Content | Reasoning], length: int) -> None:
        if length:
            self._events.append(kind(self._held[:length]))
            self._held = self._held[length:]

    def _take(self) -> list[Event]:
        taken, self._events = self._events, []
        return taken

    def _was_opened(self, setting: ParserSetting) -> bool:
        """Has the prompt begun the thought?  What users write does not count."""
        continued = setting.continued
        is_continued = continued.rfind(self._start) > continued.rfind(self._end)
        return setting.prompt.rstrip().endswith(self._start) or is_continued


class MistralThinkParser(ThinkParser):
    """Magistral's and Ministral's tags, which are special tokens."""

    tags: ClassVar[tuple[str, str] | None] = ("[THINK]", "[/THINK]")
    keeps: ClassVar[tuple[str, ...]] = ("[THINK]", "[/THINK]")
