"""Thinking and calls are found in finished texts."""

from __future__ import annotations

import pytest

from pellucid.server.parsers.whole import calls_of, split_thinking

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.mark.parametrize(
    "text,reasoning,content",
    [
        ("<think>\nHm.\n</think>\n\nFour.", "Hm.", "Four."),
        ("Hm.\n</think>\n\nFour.", "Hm.", "Four."),  # the template wrote <think>
        ("<think>\nHm, and then", "Hm, and then", ""),  # cut off
        ("Four.", "", "Four."),
        (f"Hm.</think>{CALL}", "Hm.", CALL),
    ],
)
def test_thinking_is_split_from_the_answer(text: str, reasoning: str, content: str) -> None:
    assert split_thinking(text) == (reasoning, content)


@pytest.mark.parametrize(
    "text,prompt,reasoning,content",
    [
        ("Hm, and then", "1+1<|assistant|><think>\n", "Hm, and then", ""),  # cut off
        ("Hm.</think>Four.", "1+1<|assistant|><think>\n", "Hm.", "Four."),
        ("a </think> b", "<|assistant|><think>\n\n</think>\n\n", "", "a </think> b"),
    ],
)  # fmt: skip
def test_a_prompt_says_whether_it_has_opened_the_thinking(
    text: str, prompt: str, reasoning: str, content: str
) -> None:
    assert split_thinking(text, prompt) == (reasoning, content)


def test_calls_are_found_behind_the_thinking() -> None:
    time = '<tool_call>{"name": "time", "arguments": "{}"}</tool_call>'
    called = [("weather", {"city": "Paris"}), ("time", {})]
    assert calls_of(f"<think>{CALL}</think>I look.\n{CALL}\n{time}") == called
    assert calls_of(CALL.replace('"Paris"', "Paris")) == calls_of("hello") == []
