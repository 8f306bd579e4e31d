"""Tells thought, answer and calls apart in the messages that GPT-OSS writes (OpenAI's harmony format).

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`, where the channel
`analysis` is thinking, `final` the answer, and a message to `functions.NAME` a call of it.  All this markup
is special tokens.  One parser for both purposes: behind itself it finds nothing more.
"""

from __future__ import annotations

import re
from typing import ClassVar

from pellucid.server.parsers.base import CallFrame, Content, ParserSetting, Reasoning
from pellucid.server.parsers.script import Reading, ScriptParser

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
FUNCTION = re.compile(r"\bto=functions\.([\w.-]{1,128})")
IS_FINAL = re.compile(r"<\|channel\|>\s*final\b")
OTHER_TOOL = re.compile(r"\bto=(?!functions\.)")


def _message(channel: str) -> dict[str, object]:
    """A whole message to the user, with the beginning of the next one, as a part of a structural tag."""
    content = {"type": "any_text"}
    message = {"type": "tag", "begin": f"{CHANNEL}{channel}{MESSAGE}", "content": content, "end": ENDS[0]}
    return {"type": "sequence", "elements": [message, {"type": "const_string", "value": f"{START}assistant"}]}


# Thoughts, and what is said before a call, as parts of structural tags.
THOUGHT, PREAMBLE = _message("analysis"), _message("commentary")
FINAL = f"{CHANNEL}final{MESSAGE}"
TO = "to=functions.NAME"
# A call is the last message of a turn: what ends it is a stop token, and so no text.
FRAME = CallFrame(
    begin=f"{CHANNEL}commentary {TO} <|constrain|>json{MESSAGE}",
    other_begins=(
        f" {TO}{CHANNEL}commentary <|constrain|>json{MESSAGE}",
        f" {TO}{CHANNEL}commentary json{MESSAGE}",
    ),
    end="",
    separator=None,
    trigger=None,
    before={"type": "star", "content": {"type": "or", "elements": [THOUGHT, PREAMBLE]}},
    otherwise={
        "type": "tag",
        "begin": FINAL,
        "content": {"type": "any_text", "excludes": [START]},
        "end": "",
    },
)


class HarmonyParser(ScriptParser):
    """What is said on `commentary` to nobody, before calls, is content; to other tools, thinking."""

    tags: ClassVar[tuple[str, str] | None] = None  # no single token ends what is thought
    frame: ClassVar[CallFrame | None] = FRAME
    keeps: ClassVar[tuple[str, ...]] = (START, CHANNEL, MESSAGE, "<|constrain|>", *ENDS)

    def __init__(self, setting: ParserSetting) -> None:
        super().__init__()
        self._finds_calls = bool(setting.tools)

    def read(self) -> Reading[None]:
        while True:
            yield from self._skip_space()
            if not (yield from self._accept(START, CHANNEL, "to=")):
                self._give_back()
                if not (yield from self._until(START, CHANNEL)):
                    return
            if not (yield from self._head(MESSAGE))[1]:
                return
            yield from self._message(self._held[: self._at])
            if (tag := (yield from self._accept(*ENDS))) or self._at:
                self._drop()
            if not tag and not self._held:
                return

    def _message(self, head: str) -> Reading[None]:
        """Up to the tag that ends it."""
        call = FUNCTION.search(head)
        if call is not None and self._finds_calls:
            yield from self._skip_space()
            self._start(call[1])
            yield from self._arguments()
            yield from self._skip_space()
            self._drop()
            return
        self._drop()
        is_shown = IS_FINAL.search(head) or ("commentary" in head and not OTHER_TOOL.search(head))
        tag = yield from self._until(*ENDS, START, kind=Content if is_shown else Reasoning)
        self._at -= len(tag)
        self._drop()
