"""Finds the calls of Mistral's models, which are special tokens around names and JSON.

Since 2025 `[TOOL_CALLS]name[ARGS]{...}` for each call, some with `[CALL_ID]id` between the two; before that
`[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, once.
"""

from __future__ import annotations

import secrets
import string
from typing import ClassVar

from pellucid.server.parsers.base import CallFrame, ParserSetting
from pellucid.server.parsers.script import NAME, Reading, ScriptParser

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
ID_LENGTH = 9  # which their templates insist on, and on letters and digits


class MistralParser(ScriptParser):
    """Both forms are read; calls are forced in the newer one."""

    frame: ClassVar[CallFrame | None] = CallFrame(f"{CALLS}NAME{ARGS}", "", "", CALLS)
    keeps: ClassVar[tuple[str, ...]] = (CALLS, ARGS, CALL_ID)

    def __init__(self, setting: ParserSetting) -> None:
        super().__init__()

    def read(self) -> Reading[None]:
        while (yield from self._until(CALLS)):
            yield from self._skip_space()
            is_call = yield from self._call_list() if self._begins("[") else self._named_call()
            if is_call:
                yield from self._skip_space()
                self._drop()
            else:
                self._give_back()

    def _named_call(self) -> Reading[bool]:
        name, tag = yield from self._head(ARGS, CALL_ID, "{")
        name, id = name.strip(), None
        if tag == CALL_ID:
            id, tag = yield from self._head(ARGS, "{")
        if tag == "{":
            self._at -= 1
        yield from self._skip_space()
        if not tag or not NAME.fullmatch(name) or not self._begins("{"):
            return False
        self._start(name, (id or "").strip() or new_id())
        yield from self._arguments()
        return True


def new_id() -> str:
    """Unique among the calls of a conversation."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(ID_LENGTH))
