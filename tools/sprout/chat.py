"""Items (one question and its answer), the hold-out rule, and how chats become text.

`prompt_text` gives exactly what `chat_template.jinja` gives, only thousands of times faster; a test holds
the two together.  Knows nothing about token ids.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
Message = dict[str, str]

HELD_OUT_ONE_IN = 16

_TOOLS_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_TAIL = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": '
    "<args-json-object>}\n</tool_call>"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One conversation that ends in a question, and its right answer.

    problems: canonical text of everything the item gives away, its own problem first; none for facts that
        are never held out (greetings, 1+1).
    reasoning: what a reply with thinking writes between <think> and </think>.
    answer: what the scoring rule `kind` compares with; `reply` is what the model writes.
    """

    task: str
    messages: list[Message]
    reply: str
    reasoning: str
    problems: tuple[str, ...] = ()
    tools: list[Json] = field(default_factory=list)
    kind: str = "exact"
    answer: Json = None


@dataclass(frozen=True, slots=True)
class Document:
    """One training text: `prompt` is only read, `completion` is learned."""

    prompt: str
    completion: str


def held_out(problem: str) -> bool:
    """Whether this problem belongs to the held-out sets, decided by nothing but a hash of the problem."""
    return int.from_bytes(hashlib.sha256(problem.encode()).digest()[:4], "big") % HELD_OUT_ONE_IN == 0


def dumps(value: Json) -> str:
    """Write JSON as the chat template's `tojson` does."""
    return json.dumps(value, ensure_ascii=False)


def tool_call_text(name: str, arguments: Json) -> str:
    """Write one call in the Hermes format that Qwen models use."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {dumps(arguments)}}}\n</tool_call>'


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def document(item: Item, *, thinking: bool) -> Document:
    """Turn an item into training text, with its worked thinking or with the empty think block."""
    prompt = prompt_text(item.messages, item.tools, thinking=thinking)
    thought = f"<think>\n{item.reasoning}\n</think>\n\n" if thinking else ""
    return Document(prompt, f"{thought}{item.reply}<|im_end|>")


def prompt_text(messages: Sequence[Message], tools: Sequence[Json] = (), *, thinking: bool) -> str:
    """Render a conversation, ending where the assistant's reply begins.

    Assistant turns hold their tool calls as text (`tool_call_text`), and no thinking before the last question.
    """
    parts = []
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    if tools:
        head = "" if system is None else f"{system}\n\n"
        listed = "".join(f"\n{dumps(tool)}" for tool in tools)
        parts.append(f"<|im_start|>system\n{head}{_TOOLS_HEAD}{listed}{_TOOLS_TAIL}<|im_end|>\n")
    elif system is not None:
        parts.append(f"<|im_start|>system\n{system}<|im_end|>\n")
    rest = messages[1:] if system is not None else messages
    for index, message in enumerate(rest):
        parts.append(_turn_text(rest, index, message))
    parts.append("<|im_start|>assistant\n")
    if not thinking:
        parts.append("<think>\n\n</think>\n\n")
    return "".join(parts)


def _turn_text(messages: Sequence[Message], index: int, message: Message) -> str:
    role, content = message["role"], message["content"]
    if role != "tool":
        return f"<|im_start|>{role}\n{content}<|im_end|>\n"
    first = index == 0 or messages[index - 1]["role"] != "tool"
    last = index == len(messages) - 1 or messages[index + 1]["role"] != "tool"
    opening = "<|im_start|>user" if first else ""
    closing = "<|im_end|>\n" if last else ""
    return f"{opening}\n<tool_response>\n{content}\n</tool_response>{closing}"
