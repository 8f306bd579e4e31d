"""Which drafts are accepted on the bundled model's held-out sets, and what they save on a CPU."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass

from pellucid import LLM, SamplingParams
from pellucid.cli.measure import Acceptance
from pellucid.models.checkpoint import ASSETS

TASKS = ("copy", "tool_call", "json_extract", "add")
NUM_ITEMS = 8
PROPOSERS = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "draft_model": {"method": "draft_model", "model": "sprout-draft", "num_speculative_tokens": 4},
}


@dataclass(frozen=True, slots=True)
class Run:
    """A task's items, one after another."""

    num_tokens: int  # of the answers
    num_steps: int
    seconds: float  # of the processor: one thread, so others on the machine do not count
    acceptance: Acceptance


def main() -> None:
    plain = run_all(None)
    for name, config in PROPOSERS.items():
        sys.stdout.write(f"{name}, k = {config['num_speculative_tokens']}\n")
        for task, run in run_all(config).items():
            print_row(task, plain[task], run)


def run_all(speculative_config: dict[str, object] | None) -> dict[str, Run]:
    """Every task on a fresh engine; what is measured was run before, so nothing is compiled in it."""
    with LLM(
        "sprout", device="cpu", dtype="float32", num_threads=1, speculative_config=speculative_config
    ) as llm:
        for task in TASKS:
            run_task(llm, task)
        return {task: run_task(llm, task) for task in TASKS}


def run_task(llm: LLM, task: str) -> Run:
    """Answer a task's first items without thinking, one after another."""
    lines = (ASSETS / "sprout" / "eval" / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()
    items = [item for item in map(json.loads, lines) if not item["enable_thinking"]]
    llm.reset_prefix_cache()
    before, began = llm.llm_engine.stats, time.process_time()
    for item in items[:NUM_ITEMS]:
        llm.chat(
            item["messages"],
            SamplingParams(temperature=0, max_tokens=item["max_tokens"]),
            use_tqdm=False,
            tools=item.get("tools"),
            chat_template_kwargs={"enable_thinking": False},
        )
    seconds, after = time.process_time() - began, llm.llm_engine.stats
    return Run(
        after.num_sampled_tokens - before.num_sampled_tokens,
        after.num_steps - before.num_steps,
        seconds,
        Acceptance.between(before, after),
    )


def print_row(task: str, plain: Run, run: Run) -> None:
    figures = run.acceptance.figures()
    rates = " ".join(f"{rate:.0%}" for rate in figures["acceptance_rates"])
    sys.stdout.write(
        f"{task:13}{plain.num_steps:5} steps {run.num_steps:5} steps "
        f"{figures['mean_accepted_length']:6.2f} of {figures['expected_accepted_length']:.2f} tokens "
        f"{plain.seconds:6.2f} s {run.seconds:6.2f} s {plain.seconds / run.seconds:5.2f} x  {rates}\n"
    )


if __name__ == "__main__":
    main()
