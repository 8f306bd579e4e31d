"""Finds the tool calls in a finished text.

For the Hermes convention, also Qwen's: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.  Whole
texts only, no streams.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

# The last block may lack its end: it was a stop string, or the text was cut off behind complete JSON.
_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


class ToolCall(NamedTuple):
    """A function that the model wants called."""

    name: str
    arguments: dict[str, object]


def parse_tool_calls(text: str) -> list[ToolCall]:
    """The calls in order of appearance; blocks that are no valid call are left out."""
    calls = [_parse_block(match[1]) for match in _BLOCK.finditer(text)]
    return [call for call in calls if call is not None]


def split_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """The text without its calls, and the calls; what is no valid call stays in the text."""
    content = _BLOCK.sub(lambda match: "" if _parse_block(match[1]) else match[0], text)
    return content.strip(), parse_tool_calls(text)


def _parse_block(block: str) -> ToolCall | None:
    """Models write arguments as an object or, as OpenAI does, as a string holding one."""
    try:
        call = json.loads(block)
        arguments = call.get("arguments", {}) if isinstance(call, dict) else None
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
    except json.JSONDecodeError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not isinstance(arguments, dict):
        return None
    return ToolCall(call["name"], arguments)
