"""Held-out items and the rules that score answers to them.  Knows nothing about engines.

An item is a JSON line: `id`, `task`, `kind`, and either `text` (kind text_bpb) or `messages`, `answer`,
`enable_thinking`, `max_tokens` and perhaps `tools`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pellucid.cli.prompts import Message, Tool, parse_json, read_text
from pellucid.server.parsers.whole import calls_of, split_thinking

TEXT_KIND = "text_bpb"


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A conversation that ends in a question, and its right answer."""

    id: str
    task: str
    kind: str
    messages: list[Message]
    tools: list[Tool] | None
    enable_thinking: bool
    answer: object
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Text:
    """A text whose every token is to be predicted."""

    id: str
    task: str
    text: str


def is_exact(answer: object, text: str) -> bool:
    """What follows the thinking is the answer, but for white space around it."""
    return split_thinking(text)[1].strip() == str(answer).strip()


def is_tool_call(answer: object, text: str) -> bool:
    """What follows the thinking holds one tool call, its name and arguments equal as JSON."""
    calls = calls_of(text)
    return [_same_json({"name": call.name, "arguments": call.arguments}, answer) for call in calls] == [True]


def is_json(answer: object, text: str) -> bool:
    """What follows the thinking is equal JSON."""
    try:
        return _same_json(json.loads(split_thinking(text)[1]), answer)
    except json.JSONDecodeError:
        return False


def _same_json(left: object, right: object) -> bool:
    """Equal as JSON: the order of keys does not matter; true is not 1, and 1 is 1.0 (as in JSON)."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same_json(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_same_json, left, right))
    return left == right


RULES: dict[str, Callable[[object, str], bool]] = {
    "exact": is_exact,
    "tool_call": is_tool_call,
    "json": is_json,
}


def is_right(item: Item, text: str) -> bool:
    """Score the whole text of an answer, thinking included."""
    return RULES[item.kind](item.answer, text)


def read_items(folder: Path, tasks: Sequence[str], limit: int | None) -> tuple[list[Item], list[Text]]:
    """The items of `folder` that belong to `tasks` (all, if empty), at most `limit` a task and thinking mode.

    Raises ValueError for a folder without items, an unknown task, and a malformed line, saying where.
    """
    entries = list(_entries(folder))
    if not entries:
        raise ValueError(f"{str(folder)!r} holds no .jsonl files with items; name the folder by --items")
    known = sorted({entry.task for entry in entries})
    for task in tasks:
        if task not in known:
            raise ValueError(f"unknown task {task!r}; {str(folder)!r} has {', '.join(known)}")
    counts: dict[tuple[str, bool], int] = {}
    items: list[Item] = []
    texts: list[Text] = []
    for entry in entries:
        mode = (entry.task, isinstance(entry, Item) and entry.enable_thinking)
        counts[mode] = counts.get(mode, 0) + 1
        if (tasks and entry.task not in tasks) or (limit is not None and counts[mode] > limit):
            continue
        if isinstance(entry, Item):
            items.append(entry)
        else:
            texts.append(entry)
    return items, texts


def _entries(folder: Path) -> Iterator[Item | Text]:
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(read_text(path, "--items").splitlines(), start=1):
            if line.strip():
                yield parse_item(line, f"{path}, line {number}")


def parse_item(line: str, where: str) -> Item | Text:
    """One JSON line as an item.  Raises ValueError, saying where it stood, if it is none."""
    entry = parse_json(line, where)
    if not isinstance(entry, dict):
        raise ValueError(f"{where} is no JSON object")
    try:
        if entry["kind"] == TEXT_KIND:
            return Text(entry["id"], entry["task"], entry["text"])
        if entry["kind"] not in RULES:
            raise ValueError(
                f"{where}: kind {entry['kind']!r} must be one of {', '.join(RULES)}, {TEXT_KIND}"
            )
        return Item(
            id=entry["id"],
            task=entry["task"],
            kind=entry["kind"],
            messages=entry["messages"],
            tools=entry.get("tools") or None,
            enable_thinking=entry["enable_thinking"],
            answer=entry["answer"],
            max_tokens=entry["max_tokens"],
        )
    except KeyError as error:
        raise ValueError(f"{where} lacks {error}") from None
