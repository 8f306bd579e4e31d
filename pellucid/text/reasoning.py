"""Tells a model's thinking from its answer, in a finished text.

For the `<think>...</think>` convention of Qwen3, DeepSeek-R1 and others.  Whole texts only, no streams.
"""

from __future__ import annotations

THINK_START = "<think>"
THINK_END = "</think>"


def split_thinking(text: str) -> tuple[str | None, str]:
    """Split a completion into (reasoning, content); reasoning is None if the model did not think.

    Some templates write `<think>` into the prompt, so a text with the end tag alone began with thinking; a
    text without the end tag was cut off while thinking.
    """
    before, start, rest = text.partition(THINK_START)
    if not start or before.strip():  # a start tag amid the answer is a word like any other
        before, start, rest = "", "", text
    reasoning, end, content = rest.partition(THINK_END)
    if end:
        return reasoning.strip(), content.lstrip()
    return (rest.strip(), "") if start else (None, text)
