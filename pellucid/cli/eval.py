"""`pellucid eval`: held-out items through the engine, greedily, and how many answers are right.

Also bits per byte of plain text: total -log2 p of all tokens but a text's first, over its UTF-8 bytes.
What quantization costs is seen beside the same without it, in one run.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pellucid.cli.console import note, terminal, write
from pellucid.cli.options import add_engine_options, open_llm
from pellucid.cli.prompts import write_text
from pellucid.cli.scoring import Item, Text, is_right, read_items
from pellucid.sampling_params import SamplingParams
from pellucid.types import RequestOutput

if TYPE_CHECKING:
    from pellucid.llm import LLM

STORAGE_OPTIONS = ("quantization", "kv_cache_dtype")
BUNDLED_ITEMS = Path(__file__).parent.parent / "assets" / "sprout" / "eval"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `eval` understands."""
    parser.usage = "%(prog)s [OPTION ...]"
    parser.add_argument("--tasks", nargs="+", default=[], metavar="TASK", help="only these (default all)")
    parser.add_argument(
        "--limit", type=int, metavar="N", help="most items a task and thinking mode (default all)"
    )
    parser.add_argument(
        "--items", type=Path, default=BUNDLED_ITEMS, metavar="DIR",
        help="folder of .jsonl files with items (default the bundled model's held-out sets)",
    )  # fmt: skip
    parser.add_argument(
        "--show-failures", type=int, default=0, metavar="N", help="show N wrong answers a task"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="also write the scores, and every wrong answer, as JSON"
    )
    parser.add_argument(
        "--baseline", action=argparse.BooleanOptionalAction, default=True,
        help="with --quantization or --kv-cache-dtype, score the model without them first, "
        "for a second pair of columns (default yes)",
    )  # fmt: skip
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Answer every item, and print the scores."""
    if args.limit is not None and args.limit < 1:
        raise ValueError(f"--limit is {args.limit}, must be at least 1; leave it out for all items")
    items, texts = read_items(args.items, args.tasks, args.limit)
    plain = _without_storage(args) if args.baseline else None
    baseline = evaluate(plain, items, texts)[0] if plain else None
    scores, answers = evaluate(args, items, texts)
    _print_table(scores, baseline)
    _print_failures(answers, args.show_failures)
    if args.json:
        report = _report(scores, answers) | ({"baseline": _as_json(baseline)} if baseline else {})
        write_text(args.json, json.dumps(report, ensure_ascii=False, indent=1), "--json")
    return 0


def _without_storage(args: argparse.Namespace) -> argparse.Namespace | None:
    """The same without the options that change how numbers are stored; None if none was given."""
    given = vars(args)
    kept = {name: value for name, value in given.items() if name not in STORAGE_OPTIONS}
    return argparse.Namespace(**kept) if len(kept) < len(given) else None


def evaluate(
    args: argparse.Namespace, items: Sequence[Item], texts: Sequence[Text]
) -> tuple[list[Score], list[Answer]]:
    """Open the model with these options and score it: (scores, answers)."""
    with open_llm(args) as llm:
        answers = answer(llm, items)
        bits = [Bits(text.task, *text_bits(llm, text)) for text in texts]
    return tally(answers, bits), answers


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model said to one item."""

    item: Item
    text: str
    right: bool


@dataclass(frozen=True, slots=True)
class Bits:
    """How many bits the model needed for a text of so many bytes."""

    task: str
    bits: float
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One line of the table."""

    task: str
    mode: str  # thinking, direct, or text
    num_items: int
    accuracy: float | None = None  # share of right answers
    bits_per_byte: float | None = None


def answer(llm: LLM, items: Sequence[Item]) -> list[Answer]:
    """Answer all items in one batch: each is a prompt of its own, for tools and thinking differ."""
    from pellucid.text.chat import render_chat

    if not items:
        return []
    tokenizer = llm.get_tokenizer()
    prompts = [
        render_chat(
            tokenizer,
            item.messages,
            tools=item.tools,
            chat_template_kwargs={"enable_thinking": item.enable_thinking},
        )
        for item in items
    ]
    ids = tokenizer.encode_batch(prompts, add_special_tokens=False)
    sampling = [SamplingParams(temperature=0.0, max_tokens=item.max_tokens) for item in items]
    outputs = llm.generate(ids, sampling, use_tqdm=sys.stderr.isatty())
    texts = [_text(output, item.id) for output, item in zip(outputs, items, strict=True)]
    return [Answer(item, text, is_right(item, text)) for item, text in zip(items, texts, strict=True)]


def _text(output: RequestOutput, item_id: str) -> str:
    if output.error:
        raise ValueError(f"item {item_id}: {output.error}")
    return output.outputs[0].text


def text_bits(llm: LLM, text: Text) -> tuple[float, int]:
    """Measure one text: (bits, UTF-8 bytes).

    A text longer than the context is cut into windows; every token but the text's first is predicted once.
    """
    ids = llm.get_tokenizer().encode(text.text, add_special_tokens=False)
    windows = cut_windows(ids, llm.llm_engine.capacity.max_model_len - 1)
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate(windows, sampling, use_tqdm=False) if windows else []
    nats = 0.0
    for window, output in zip(windows, outputs, strict=True):
        if output.error or output.prompt_logprobs is None:
            raise ValueError(f"text {text.id}: {output.error or 'no prompt logprobs came back'}")
        for token, entries in zip(window[1:], output.prompt_logprobs[1:], strict=True):
            assert entries is not None, "only the first prompt token has no log-probability"
            nats -= entries[token].logprob
    return nats / math.log(2), len(text.text.encode())


def cut_windows(ids: list[int], length: int) -> list[list[int]]:
    """Pieces of at most `length` tokens; each begins with the last token of the one before."""
    return [
        ids[start : start + length] for start in range(0, max(1, len(ids) - 1), length - 1) if len(ids) > 1
    ]


def tally(answers: Sequence[Answer], bits: Sequence[Bits]) -> list[Score]:
    """One score a task and thinking mode, in order of name."""
    groups: dict[tuple[str, str], list[bool]] = {}
    for each in answers:
        mode = "thinking" if each.item.enable_thinking else "direct"
        groups.setdefault((each.item.task, mode), []).append(each.right)
    scores = [
        Score(task=task, mode=mode, num_items=len(rights), accuracy=sum(rights) / len(rights))
        for (task, mode), rights in groups.items()
    ]
    for task in {each.task for each in bits}:
        own = [each for each in bits if each.task == task]
        per_byte = sum(each.bits for each in own) / sum(each.num_bytes for each in own)
        scores.append(Score(task=task, mode="text", num_items=len(own), bits_per_byte=per_byte))
    return sorted(scores, key=lambda score: (score.task, score.mode))


def _print_table(scores: Sequence[Score], baseline: Sequence[Score] | None) -> None:
    from rich.table import Table

    table = Table("task", "mode")
    titles = ["items", "exact match", "bits per byte"]
    for title in titles + (["baseline's match", "baseline's bits"] if baseline else []):
        table.add_column(title, justify="right")
    for i, score in enumerate(scores):
        beside = _cells(baseline[i]) if baseline else ()
        table.add_row(score.task, score.mode, f"{score.num_items:,}", *_cells(score), *beside)
    terminal().print(table)


def _cells(score: Score) -> tuple[str, str]:
    exact = "" if score.accuracy is None else f"{score.accuracy:.1%}"
    bits = "" if score.bits_per_byte is None else f"{score.bits_per_byte:.4f}"
    return exact, bits


def _print_failures(answers: Sequence[Answer], most: int) -> None:
    shown: dict[str, int] = {}
    for each in answers:
        task = each.item.task
        if not each.right and shown.get(task, 0) < most:
            shown[task] = shown.get(task, 0) + 1
            write(f"\n{each.item.id}: {each.item.messages[-1]['content']}\n")
            note(each.text)
            write(f"right is {json.dumps(each.item.answer, ensure_ascii=False)}\n")


def _report(scores: Sequence[Score], answers: Sequence[Answer]) -> dict[str, object]:
    return {
        "scores": _as_json(scores),
        "wrong": [
            {"id": each.item.id, "answer": each.item.answer, "text": each.text}
            for each in answers
            if not each.right
        ],
    }


def _as_json(scores: Sequence[Score]) -> list[dict[str, object]]:
    return [
        {
            "task": score.task,
            "mode": score.mode,
            "items": score.num_items,
            "exact_match": score.accuracy,
            "bits_per_byte": score.bits_per_byte,
        }
        for score in scores
    ]
