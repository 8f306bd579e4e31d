"""`pellucid replay FILE`: a trace of steps, run again with other limits, in virtual time."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pellucid.cli.options import UNSET, chosen

if TYPE_CHECKING:
    from pellucid.observe.replay import Outcome

# Options as `serve` has them, and the fields of SchedulerOptions that they are.
LIMITS = {
    "max_num_seqs": "num_slots",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_model_len": "max_model_len",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `replay` understands."""
    parser.add_argument("file", metavar="FILE", help="of --trace-steps")
    for name in LIMITS:
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=int, default=UNSET, metavar="N", help="instead of what was recorded")
    parser.add_argument("--num-pages", type=int, default=UNSET, metavar="N", help="pages of KV cache instead")
    parser.add_argument(
        "--scheduling-policy",
        choices=("fcfs", "priority"),
        default=UNSET,
        help="instead of what was recorded",
    )
    parser.add_argument("--target-itl-ms", type=float, default=UNSET, metavar="X", help="as of serve")
    parser.add_argument(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=UNSET, help="or not"
    )


def run(args: argparse.Namespace) -> int:
    """Print how it went, how it goes again, and how it would go."""
    from pellucid.observe.replay import StepCost, measured, read_trace, replay

    if not Path(args.file).is_file():
        raise ValueError(f"{args.file!r} is no file")
    recorded = read_trace(args.file)
    cost = StepCost(recorded.steps)
    said = chosen(args, [*LIMITS, "num_pages", "scheduling_policy", "target_itl_ms", "enable_prefix_caching"])
    _check(said, num_kinds=len(recorded.engine.kinds))
    changes: dict[str, object] = {LIMITS[name]: said[name] for name in LIMITS if name in said}
    if "scheduling_policy" in said:
        changes["policy"] = said["scheduling_policy"]
    options = replace(recorded.engine.options, **changes)  # type: ignore[arg-type]
    outcomes = {"recorded": measured(recorded), "again": replay(recorded, cost)}
    if said:
        target = said.get("target_itl_ms")
        pages, caching = said.get("num_pages"), said.get("enable_prefix_caching")
        outcomes["what if"] = replay(
            recorded,
            cost,
            options=options,
            num_pages=pages if isinstance(pages, int) else None,
            target_itl_ms=target if isinstance(target, float) else None,
            has_prefix_cache=caching if isinstance(caching, bool) else None,
        )
    _print(outcomes, has_drafts=any(drafts for step in recorded.steps for _, _, drafts, _ in step.rows))
    return 0


def _check(said: dict[str, object], *, num_kinds: int) -> None:
    """Raise ValueError for what no engine can have.  num_kinds: of pages, each of which has at least one."""
    least = {"max_num_seqs": 1, "max_model_len": 1, "num_pages": num_kinds, "target_itl_ms": 0}
    for name, value in said.items():
        if isinstance(value, int | float) and name in least and not least[name] <= value < math.inf:
            raise ValueError(f"{name} is {value}, must be at least {least[name]}")


def _print(outcomes: dict[str, Outcome], *, has_drafts: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("", *outcomes, box=None, header_style="bold")
    for name in ("num_steps", "num_tokens", "num_preemptions", "num_cached"):
        table.add_row(name, *(f"{getattr(each, name):,}" for each in outcomes.values()))
    table.add_row("seconds", *(f"{each.seconds:.3f}" for each in outcomes.values()))
    table.add_row("KV at most", *(f"{each.kv_peak:.0%}" for each in outcomes.values()))
    for name, text in (("waits", "first token"), ("gaps", "between tokens")):
        for share in (50, 95):
            cells = [_percentile(getattr(each, name), share) for each in outcomes.values()]
            table.add_row(f"{text}, p{share}, ms", *cells)
    console.print(table)
    for name, outcome in outcomes.items():
        for refusal in outcome.refused[:3]:
            console.print(f"{name}: refused {refusal}")
    if has_drafts:
        console.print("The recorded steps had drafts; those that run again have none.")


def _percentile(seconds: list[float], share: float) -> str:
    import numpy as np

    return f"{1000 * float(np.percentile(seconds, share)):.1f}" if seconds else "-"
