"""Which n-gram drafts are accepted on the bundled model's held-out sets.  See docs/speculation.md."""

from __future__ import annotations

import json

from pellucid import LLM, SamplingParams
from pellucid.engine.statistics import EngineStats
from pellucid.models.checkpoint import ASSETS

TASKS = ("copy", "tool_call", "json_extract", "add")
NUM_ITEMS = 8
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


def main() -> None:
    with LLM("sprout", dtype="float32", speculative_config=NGRAM) as llm:
        for task in TASKS:
            before = llm.llm_engine.stats
            run_items(llm, task)
            print_row(task, before, llm.llm_engine.stats)


def run_items(llm: LLM, task: str) -> None:
    """Answer a task's first items without thinking, one after another."""
    lines = (ASSETS / "sprout" / "eval" / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()
    items = [item for item in map(json.loads, lines) if not item["enable_thinking"]]
    for item in items[:NUM_ITEMS]:
        llm.chat(
            item["messages"],
            SamplingParams(temperature=0, max_tokens=item["max_tokens"]),
            use_tqdm=False,
            tools=item.get("tools"),
            chat_template_kwargs={"enable_thinking": False},
        )


def print_row(task: str, before: EngineStats, after: EngineStats) -> None:
    num_drafts = after.num_drafts - before.num_drafts
    length = 1 + (after.num_accepted_tokens - before.num_accepted_tokens) / num_drafts
    pairs = zip(before.num_accepted_per_position, after.num_accepted_per_position, strict=True)
    rates = " ".join(f"{(b - a) / num_drafts:.0%}" for a, b in pairs)
    num_tokens = after.num_sampled_tokens - before.num_sampled_tokens
    print(
        f"{task:13}{num_tokens:5} tokens {after.num_steps - before.num_steps:5} steps {length:6.2f}  {rates}"
    )


if __name__ == "__main__":
    main()
