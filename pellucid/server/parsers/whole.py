"""A finished text, read as streams are: for whoever has texts and no server.

By the conventions of Qwen and the bundled model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

from pellucid.server.parsers.base import (
    Content,
    Event,
    ParserSetting,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
    joined,
)
from pellucid.server.parsers.compose import Parsers
from pellucid.server.parsers.think import END, START

QWEN = Parsers("qwen3", "hermes")


class Call(NamedTuple):
    """A function that the model wants called."""

    name: str
    arguments: dict[str, object]


def split_thinking(text: str, prompt: str | None = None) -> tuple[str, str]:
    """Split a completion into reasoning and content, either of which may be empty.

    prompt: as text, which may have opened the thinking; None if it is not known.
    """
    events = _read(text, prompt, finds_calls=False)
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    return reasoning, "".join(event.text for event in events if isinstance(event, Content))


def calls_of(text: str) -> list[Call]:
    """The calls behind the thinking, in order; those whose arguments are no JSON object are left out."""
    calls: list[Call] = []
    name = ""
    for event in _read(split_thinking(text)[1], "", finds_calls=True):
        if isinstance(event, ToolCallStart):
            name = event.name
        elif isinstance(event, ToolCallArguments):
            try:
                calls.append(Call(name, json.loads(event.text)))
            except (ValueError, RecursionError):
                continue
    return calls


def _read(text: str, prompt: str | None, *, finds_calls: bool) -> Iterable[Event]:
    """An end tag without a start tag tells that the latter is in a prompt that is not known."""
    if prompt is None:
        prompt = START if END in text and not text.lstrip().startswith(START) else ""
    setting = ParserSetting(prompt=prompt, tools=({},) if finds_calls else ())
    parser = QWEN.make(setting)
    return joined([*parser.feed(text), *parser.finish()])
