"""Finds the calls of MiniMax M2: XML whose tags have attributes.

```
<minimax:tool_call>
<invoke name="weather">
<parameter name="city">Paris</parameter>
</invoke>
</minimax:tool_call>
```
"""

from __future__ import annotations

from typing import ClassVar

from pellucid.server.parsers.base import CallFrame, ParserSetting
from pellucid.server.parsers.script import NAME, Reading
from pellucid.server.parsers.typed import TypedParser, parameters_of

START, END = "<minimax:tool_call>", "</minimax:tool_call>"
INVOKE, INVOKE_END = "<invoke name=", "</invoke>"
PARAMETER, PARAMETER_END = "<parameter name=", "</parameter>"


class MiniMaxM2Parser(TypedParser):
    """One pair of tags may have several calls."""

    frame: ClassVar[CallFrame | None] = CallFrame(
        f'{INVOKE}"NAME">\n', f"{INVOKE_END}\n", "", START, f"{START}\n", END, style="minimax_xml"
    )
    keeps: ClassVar[tuple[str, ...]] = (START, END)

    def __init__(self, setting: ParserSetting) -> None:
        super().__init__()
        self._tools = setting.tools

    def read(self) -> Reading[None]:
        while (yield from self._until(START)):
            yield from self._skip_space()
            while (yield from self._accept(INVOKE)):
                name, _ = yield from self._head(">")
                name = name.strip("\"'")
                if not NAME.fullmatch(name):
                    break
                self._start(name)
                yield from self._parameters(name)
                yield from self._skip_space()
                self._drop()
            if self._at:
                self._give_back()
            yield from self._accept(END)
            yield from self._skip_space()
            self._drop()

    def _parameters(self, function: str) -> Reading[None]:
        schemas = parameters_of(self._tools, function)
        self._begin_parameters()
        while True:
            yield from self._skip_space()
            tag = yield from self._accept(PARAMETER, INVOKE_END)
            if tag != PARAMETER:
                break
            key, end = yield from self._head(">")
            key = key.strip("\"'")
            if not end or not (yield from self._parameter(key, schemas.get(key), (PARAMETER_END,), "\n")):
                return
        if tag:
            self._end_parameters()
