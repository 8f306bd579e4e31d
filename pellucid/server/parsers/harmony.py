"""Tells thought, answer and calls apart in the messages that GPT-OSS writes (OpenAI's harmony format).

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`, where the channel
`analysis` is thinking, `final` the answer, and a message to `functions.NAME` a call of it.  All this markup
is special tokens.  One parser for both purposes: behind itself it finds nothing more.  At times a message
has words where its header should be and no more; they are thoughts.
"""

from __future__ import annotations

import re
from typing import ClassVar

from pellucid.server.parsers.base import CallFrame, Content, ParserSetting, Reasoning
from pellucid.server.parsers.script import LONGEST_HEAD, Reading, ScriptParser

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
FUNCTION = re.compile(r"\bto=functions\.([\w.-]{1,128})")
IS_FINAL = re.compile(r"<\|channel\|>\s*final\b")
OTHER_TOOL = re.compile(r"\bto=(?!functions\.)")
CHANNELS = ("analysis", "commentary", "final")
MARKUP = re.compile(r"(?:<\|start\|>\w*|<\|channel\|>\s*(?:analysis|commentary|final)?)\s*")


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
        self._finds_calls, self._names = bool(setting.tools), setting.names

    def read(self) -> Reading[None]:
        while True:
            yield from self._skip_space()
            first = yield from self._accept(START, CHANNEL, "to=")
            if not first:
                self._give_back()
                first = yield from self._until(START, CHANNEL)
                if not first:
                    return
            _, tag = yield from self._head(MESSAGE, *ENDS)
            if tag == MESSAGE:
                yield from self._message(self._held[: self._at])
            elif first != "to=" and (tag or len(self._held) - self._at > LONGEST_HEAD):
                yield from self._words()
            else:
                return
            if (tag := (yield from self._accept(*ENDS))) or self._at:
                self._drop()
            if not tag and not self._held:
                return

    def _message(self, head: str) -> Reading[None]:
        """Up to the tag that ends it."""
        call = FUNCTION.search(head)
        if call is not None and self._finds_calls:
            yield from self._skip_space()
            self._start(self._named(call[1]))
            yield from self._arguments()
            yield from self._skip_space()
            self._drop()
            return
        self._drop()
        is_shown = IS_FINAL.search(head) or ("commentary" in head and not OTHER_TOOL.search(head))
        tag = yield from self._until(*ENDS, START, kind=Content if is_shown else Reasoning)
        self._at -= len(tag)
        self._drop()

    def _words(self) -> Reading[None]:
        """Up to the tag that ends a message which has no more than words for a header."""
        self._at = 0
        while markup := MARKUP.match(self._held):
            self._at = markup.end()
            self._drop()
        while (tag := (yield from self._until(*ENDS, START, CHANNEL, MESSAGE, kind=Reasoning))) in (
            CHANNEL,
            MESSAGE,
        ):
            yield from self._skip_space()
            yield from self._accept(*CHANNELS)
            yield from self._skip_space()
            self._drop()
        self._at -= len(tag)
        self._drop()

    def _named(self, name: str) -> str:
        """The function that is meant: `json` may stand right behind its name."""
        meant = name.removesuffix("json")
        return meant if name not in self._names and meant in self._names else name
