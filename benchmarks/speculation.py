"""Which drafts are accepted on held-out chats and Python, what a drafter takes, and what it saves.

Every proposer drafts all that it can, one request after another; another item of each task has been run
before.  On a CPU, in float32 on one thread, times are the processor's, so others on the machine do not count.
On a GPU, in bfloat16, they are the clock's, and a drafter takes what a step is longer than without drafts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pellucid import LLM, SamplingParams
from pellucid.cli.measure import Acceptance
from pellucid.models.checkpoint import ASSETS

PROPOSERS: dict[str, dict[str, object]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "suffix": {"method": "suffix", "num_speculative_tokens": 4},
    "medusa": {"model": "sprout-medusa"},
    "eagle3": {"model": "sprout-eagle3", "num_speculative_tokens": 4},
    "eagle3, trees": {"model": "sprout-eagle3", "speculative_eagle_topk": 4, "num_speculative_tokens": 16},
    "mtp": {"method": "mtp", "num_speculative_tokens": 4},
    "mtp, trees": {"method": "mtp", "speculative_eagle_topk": 4, "num_speculative_tokens": 16},
    "draft_model": {"model": "sprout-draft", "num_speculative_tokens": 4},
}
TASKS = ("copy", "tool_call", "json_extract", "add", "python")
OPENING, NUM_PYTHON_TOKENS = 200, 80  # characters of a module that are given, and tokens that follow


@dataclass(frozen=True, slots=True)
class Run:
    """A task's items."""

    num_tokens: int  # of the answers
    num_steps: int
    seconds: float
    drafter_seconds: float  # of these
    acceptance: Acceptance


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=8, help="of each task")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--proposers", nargs="+", default=list(PROPOSERS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--adaptive", action="store_true", help="drafts by what they bring, as engines do")
    args = parser.parse_args()
    is_gpu = args.device == "cuda"
    plain = run_all(None, args)
    rows: list[tuple[float, int, float, str]] = []
    for name in args.proposers:
        sys.stderr.write(f"{name}\n")
        runs = run_all(PROPOSERS[name] | {"adaptive": args.adaptive}, args)
        for (temperature, task), run in runs.items():
            without = plain[temperature, task]
            row = row_of(name, task, temperature, without, run, is_gpu=is_gpu)
            rows.append((temperature, args.tasks.index(task), -speed_of(run, without), row))
    sys.stdout.writelines(row for *_, row in sorted(rows))


def run_all(config: dict[str, object] | None, args: argparse.Namespace) -> dict[tuple[float, str], Run]:
    """Every task at every temperature on one engine."""
    options: dict[str, Any] = {"device": args.device, "speculative_config": config}
    if args.device == "cpu":
        options |= {"dtype": "float32", "num_threads": 1}
    with LLM("sprout", **options) as llm:
        clock = Clock(llm) if config and args.device == "cpu" else None
        timed = time.process_time if args.device == "cpu" else time.perf_counter
        which = [(temperature, task) for temperature in args.temperature for task in args.tasks]
        for temperature, task in which:
            run_task(llm, task, temperature, slice(args.items, args.items + 1), clock, timed)
        return {each: run_task(llm, each[1], each[0], slice(args.items), clock, timed) for each in which}


class Clock:
    """Counts the processor's time in a proposer."""

    def __init__(self, llm: LLM) -> None:
        engine: Any = llm.llm_engine.engine
        proposer = engine.executor.worker.runner.launcher.step.proposer
        self.seconds, self._propose = 0.0, proposer.propose
        proposer.propose = self._timed

    def _timed(self, *args: object) -> object:
        began = time.process_time()
        try:
            return self._propose(*args)
        finally:
            self.seconds += time.process_time() - began


def run_task(
    llm: LLM,
    task: str,
    temperature: float,
    which: slice,
    clock: Clock | None,
    now: Callable[[], float],
) -> Run:
    """Some of a task's items, one after another."""
    llm.reset_prefix_cache()
    before, began, drafter = llm.llm_engine.stats, now(), clock.seconds if clock else 0.0
    for ask in asks(llm, task, temperature)[which]:
        ask()
    seconds, after = now() - began, llm.llm_engine.stats
    return Run(
        after.num_sampled_tokens - before.num_sampled_tokens,
        after.num_steps - before.num_steps,
        seconds,
        (clock.seconds if clock else 0.0) - drafter,
        Acceptance.between(before, after),
    )


def asks(llm: LLM, task: str, temperature: float) -> list[Callable[[], object]]:
    """The items: openings of modules to go on with, or questions without thinking."""
    name = "python_bpb" if task == "python" else task
    lines = (ASSETS / "sprout" / "eval" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    items = list(map(json.loads, lines))

    def go_on(item: dict) -> object:
        params = SamplingParams(temperature=temperature, max_tokens=NUM_PYTHON_TOKENS, seed=1)
        return llm.generate([item["text"][:OPENING]], params, use_tqdm=False)

    def answer(item: dict) -> object:
        params = SamplingParams(temperature=temperature, max_tokens=item["max_tokens"], seed=1)
        return llm.chat(
            item["messages"], params, use_tqdm=False, tools=item.get("tools"),
            chat_template_kwargs={"enable_thinking": False},
        )  # fmt: skip

    if task == "python":
        return [lambda item=item: go_on(item) for item in items]
    return [lambda item=item: answer(item) for item in items if not item["enable_thinking"]]


def speed_of(run: Run, plain: Run) -> float:
    """Times as fast as without drafts."""
    return (run.num_tokens / run.seconds) / (plain.num_tokens / plain.seconds)


def row_of(name: str, task: str, temperature: float, plain: Run, run: Run, *, is_gpu: bool) -> str:
    figures: dict[str, Any] = run.acceptance.figures()
    rates = " ".join(f"{rate:.0%}" for rate in figures["acceptance_rates"] or () if rate)
    without, drafter = plain.seconds / plain.num_steps, run.drafter_seconds / run.num_steps
    if is_gpu:
        drafter = max(0.0, run.seconds / run.num_steps - without)
    return (
        f"| {task} | {temperature:g} | `{name}` | {figures['mean_accepted_length'] or 1:.2f} | {rates} | "
        f"{1000 * drafter:.2f} | {1000 * without:.2f} | {speed_of(run, plain):.2f} |\n"
    )


if __name__ == "__main__":
    main()
