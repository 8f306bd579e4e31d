"""Thinking and tool calls are told from the answer."""

from __future__ import annotations

import pytest

from pellucid.text.reasoning import split_thinking
from pellucid.text.tools import parse_tool_calls, split_tool_calls


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nHm.\n</think>\n\nFour.", "Hm.", "Four."),
        ("\n<think>Hm.</think>Four.", "Hm.", "Four."),
        ("Hm.\n</think>\n\nFour.", "Hm.", "Four."),  # the template wrote <think>
        ("<think>\nHm, and then", "Hm, and then", ""),  # cut off
        ("<think>\n\n</think>\n\nFour.", "", "Four."),
        ("Four.", None, "Four."),
        ("The tag <think> opens a thought.", None, "The tag <think> opens a thought."),
    ],
)
def test_thinking_is_split_from_the_answer(text: str, reasoning: str | None, content: str) -> None:
    assert split_thinking(text) == (reasoning, content)


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def test_calls_are_found_in_order_and_the_rest_is_content() -> None:
    text = f'I look.\n{CALL}\n<tool_call>{{"name": "time", "arguments": "{{}}"}}</tool_call>'
    content, calls = split_tool_calls(text)
    assert content == "I look."
    assert calls == [("weather", {"city": "Paris"}), ("time", {})]
    assert parse_tool_calls(text) == calls


def test_a_call_whose_end_was_a_stop_string_counts() -> None:
    assert parse_tool_calls(CALL.removesuffix("</tool_call>")) == [("weather", {"city": "Paris"})]


@pytest.mark.parametrize(
    "block", ["not json", '{"name": 3}', '"text"', '{"arguments": {}}', '{"name": "f", "arguments": [1]}']
)
def test_what_is_no_call_stays_in_the_text(block: str) -> None:
    text = f"<tool_call>{block}</tool_call>"
    assert split_tool_calls(text) == (text, [])


def test_a_text_without_calls_has_none() -> None:
    assert split_tool_calls("hello") == ("hello", [])
