"""Finds the calls of Qwen3-Coder and Qwen3.5: XML within the tags of Hermes.

```
<tool_call>
<function=weather>
<parameter=city>
Paris
</parameter>
</function>
</tool_call>
```
"""

from __future__ import annotations

from typing import ClassVar

from pellucid.server.parsers.base import CallFrame, ParserSetting
from pellucid.server.parsers.script import NAME, Reading
from pellucid.server.parsers.typed import TypedParser, parameters_of

START, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
# What is written for the two, too.
PARAMETER_ENDS = (
    PARAMETER_END,
    *(f"</parameter{end}" for end in ("/>", "1>", "_function>", "function>", "\n")),
)
FUNCTION_ENDS = (FUNCTION_END, "</function_invocation>")


class Qwen3CoderParser(TypedParser):
    """The outer tags may be missing around a call of a tool, and those behind values before another one."""

    frame: ClassVar[CallFrame | None] = CallFrame(
        f"{START}\n{FUNCTION}NAME>\n",
        f"\n{FUNCTION_END}\n{END}",
        "\n",
        f"{START}\n{FUNCTION}",
        style="qwen_xml",
    )
    keeps: ClassVar[tuple[str, ...]] = (START, END)

    def __init__(self, setting: ParserSetting) -> None:
        super().__init__()
        self._tools, self._names = setting.tools, setting.names

    def read(self) -> Reading[None]:
        while tag := (yield from self._until(START, FUNCTION)):
            if tag == START:
                yield from self._skip_space()
                if not (yield from self._accept(FUNCTION)):
                    self._give_back()
                    continue
            name, _ = yield from self._head(">")
            if not NAME.fullmatch(name) or (tag == FUNCTION and name not in self._names):
                self._give_back()
                continue
            self._start(name)
            yield from self._parameters(name)
            yield from self._skip_space()
            while (yield from self._accept(*FUNCTION_ENDS)):
                yield from self._skip_space()
            yield from self._accept(END)
            yield from self._skip_space()
            self._drop()

    def _parameters(self, function: str) -> Reading[None]:
        schemas = parameters_of(self._tools, function)
        self._begin_parameters()
        while True:
            yield from self._skip_space()
            tag = yield from self._accept(PARAMETER, FUNCTION_END, END)
            if tag != PARAMETER:
                break
            key, end = yield from self._head(">", "\n")
            if not end:
                return
            self._at -= end == "\n"
            others = [f"\n{PARAMETER}{other}>" for other in schemas if other != key]
            ends = (*PARAMETER_ENDS, f"\n{FUNCTION_END}\n{END}", *others)
            if not (found := (yield from self._parameter(key, schemas.get(key), ends, "\n"))):
                return
            if found not in PARAMETER_ENDS:
                self._held = found + self._held
        if tag == END:
            self._at -= len(END)
        if tag:
            self._end_parameters()
