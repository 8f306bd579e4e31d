"""Draw the held-out sets: items whose problem the hash keeps out of training, one file a task.

Line format: id, task, messages, tools (if any), enable_thinking, kind, answer, max_tokens; kind `text_bpb`
has `text` in place of messages and answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

from tokenizers import Tokenizer

from chat import Item, document, held_out
from data import PYTHON_CHARS
from tasks.arithmetic import calculation
from tasks.extraction import extract
from tasks.lists import copy, count, reverse, sort
from tasks.lookup import lookup_of_size
from tasks.python_text import modules
from tasks.tool_use import tool_answer, tool_call, tool_none

ITEMS_PER_TASK = 160
MAX_DRAWS = 20_000
PYTHON_TEXTS = 40
LOOKUP_TOKENS = range(1400, 1650)

Make = Callable[[Random], Item]


def write_heldout(folder: Path, tokenizer: Tokenizer, seed: int) -> None:
    """Write `<task>.jsonl` for every task into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for task, make in makers().items():
        rng = Random(f"heldout:{seed}:{task}")
        _write_lines(folder / f"{task}.jsonl", _items(rng, task, make, tokenizer))
    _write_lines(folder / "python_bpb.jsonl", _texts())


def _texts() -> list[dict[str, object]]:
    """List the openings of held-out modules, without the character tables, which are near copies of each other."""
    kept = [text[:PYTHON_CHARS] for name, text in modules(held=True) if not name.startswith("encodings/")]
    return [
        {"id": f"python_bpb-{index:03d}", "task": "python_bpb", "kind": "text_bpb", "text": text}
        for index, text in enumerate(kept[:PYTHON_TEXTS])
    ]


def makers() -> dict[str, Make]:
    def arithmetic(op: str) -> Make:
        return lambda rng: calculation(rng, op=op, language="en", max_digits=3)

    def zh_arithmetic(rng: Random) -> Item:
        return calculation(rng, op="+" if rng.random() < 0.5 else "-", language="zh", max_digits=3)

    return {
        "add": arithmetic("+"),
        "sub": arithmetic("-"),
        "mul": arithmetic("*"),
        "zh_arith": zh_arithmetic,
        "kv_lookup": lambda rng: lookup_of_size(rng, tokens=rng.uniform(1400, 1700)),
        "tool_call": tool_call,
        "tool_answer": tool_answer,
        "tool_none": tool_none,
        "json_extract": extract,
        "sort": sort,
        "count": count,
        "copy": copy,
        "reverse": reverse,
    }


def _fits(task: str, item: Item, *, thinking: bool, tokenizer: Tokenizer) -> bool:
    """Whether an item has the size that its task asks for."""
    if task == "kv_lookup":
        return len(tokenizer.encode(item.messages[0]["content"]).ids) in LOOKUP_TOKENS
    # A product of two digits by two is asked only where the model may work it out in writing.
    return task != "mul" or thinking or int(item.problems[0].rsplit(",", 1)[1]) < 10


def _items(rng: Random, task: str, make: Make, tokenizer: Tokenizer) -> list[dict[str, object]]:
    """Draw half of the items with thinking and half without; small tasks run out of problems before that."""
    lines: list[dict[str, object]] = []
    for thinking in (True, False):
        seen: set[str] = set()
        for _ in range(MAX_DRAWS):
            item = make(rng)
            if not item.problems or item.problems[0] in seen or not held_out(item.problems[0]):
                continue
            if _fits(task, item, thinking=thinking, tokenizer=tokenizer):
                seen.add(item.problems[0])
                lines.append(_line(item, task, len(lines), thinking=thinking, tokenizer=tokenizer))
            if len(seen) == ITEMS_PER_TASK // 2:
                break
    return lines


def _line(item: Item, task: str, number: int, *, thinking: bool, tokenizer: Tokenizer) -> dict[str, object]:
    written = len(tokenizer.encode(document(item, thinking=thinking).completion).ids)
    line: dict[str, object] = {"id": f"{task}-{number:03d}", "task": task, "messages": item.messages}
    if item.tools:
        line["tools"] = item.tools
    return line | {
        "enable_thinking": thinking,
        "kind": item.kind,
        "answer": item.answer,
        "max_tokens": -(-(written + 24) // 16) * 16,
    }


def _write_lines(path: Path, lines: list[dict[str, object]]) -> None:
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8")
