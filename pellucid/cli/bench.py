"""`pellucid bench MEASURE`: throughput or latency through `LLM.generate`, as a share of the machine's limit.

`serve` loads a server instead, and is a file of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from pellucid.cli import bench_serve
from pellucid.cli.console import complain, terminal
from pellucid.cli.options import add_engine_options, engine_options, open_llm
from pellucid.cli.prompts import write_text
from pellucid.cli.workloads import RECIPES, WORKLOADS, Lengths, choose, positive
from pellucid.registry import load_object

LENGTHS = "; ".join(f"{name}: {recipe.inputs} in, {recipe.outputs} out" for name, recipe in RECIPES.items())


MEASURES = {
    "throughput": "many requests at once",
    "latency": "B equal requests, milliseconds a step",
    "table": "nano, latency of 1, 32 and 256 requests, and prefill, one after another",
    "serve": "load a server of OpenAI's API, and show what its clients see",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `bench` understands."""
    measures = parser.add_subparsers(dest="measure", required=True, metavar="MEASURE")
    for name, text in MEASURES.items():
        measure = measures.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        # Said before MEASURE or behind it; a default of its own would undo the former.
        measure.add_argument(
            "-v",
            "--verbose",
            action="store_true",
            default=argparse.SUPPRESS,
            help="log what the engine decides",
        )
        if name == "serve":
            bench_serve.add_arguments(measure)
        else:
            _add_offline_arguments(measure, name)


def _add_offline_arguments(parser: argparse.ArgumentParser, measure: str) -> None:
    if measure == "throughput":
        parser.add_argument(
            "--workload", choices=WORKLOADS, default="nano",
            help="nano: nano-vllm's own, 256 requests, 142,827 tokens in, 133,966 out; "
            "random: lengths as you say; prefill: long prompts, one token out (default nano)",
        )  # fmt: skip
        parser.add_argument(
            "--num-requests", type=positive, metavar="N",
            help="requests (default 256 for random, 16 for prefill)",
        )  # fmt: skip
    if measure == "latency":
        parser.add_argument(
            "--batch-size", type=positive, nargs="+", default=[1], metavar="B",
            help="requests at once, several to measure one after another (default 1)",
        )  # fmt: skip
    if measure != "table":
        parser.add_argument(
            "--input-len", type=Lengths.parse, metavar="N|LOW:HIGH",
            help=f"prompt tokens (defaults {LENGTHS})",
        )  # fmt: skip
        parser.add_argument("--output-len", type=Lengths.parse, metavar="N|LOW:HIGH", help="output tokens")
    parser.add_argument("--temperature", type=float, default=0.6, metavar="X", help="(default 0.6)")
    parser.add_argument(
        "--repeat", type=positive, default=3, metavar="N", help="runs, of which the median counts (default 3)"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the figures, of every run, as JSON")
    parser.add_argument(
        "--profile", metavar="FILE",
        help="run the workload once more and write what host and device did as a trace, for ui.perfetto.dev",
    )  # fmt: skip
    add_engine_options(parser)
    parser.epilog = (
        "--seed draws the lengths and tokens of random, prefill and latency, too; nano's are fixed."
    )


def run(args: argparse.Namespace) -> int:
    """Measure the machine, then every workload, and print one column a workload; or load a server."""
    if args.measure == "serve":
        return bench_serve.run(args)
    from pellucid.cli.measure import measure, plan_run
    from pellucid.cli.profile import print_profile, profile_run

    for option, path in (("--json", args.json), ("--profile", args.profile)):
        if path and not Path(path).absolute().parent.is_dir():
            raise ValueError(f"{option} {path!r} cannot be written; name a file in a folder that exists")
    options = engine_options(args)
    seed = options.get("seed", 0)
    assert isinstance(seed, int), "argparse made it one"
    workloads = choose(args, seed)
    if args.profile and len(workloads) > 1:
        raise ValueError(f"--profile shows one workload, not {len(workloads)}; ask for throughput, or one B")
    resolved = plan_run(options)
    machine = load_object("pellucid.cli.machine:measure_machine")(
        resolved.platform.device, resolved.dtype, resolved.num_threads
    )
    figures: list[dict[str, object]] = []
    profile = None
    with open_llm(args) as llm:
        fitted = [
            workload.fitted(
                vocab_size=resolved.checkpoint.vocab_size, max_model_len=llm.llm_engine.capacity.max_model_len
            )
            for workload in workloads
        ]
        for workload in fitted:
            figures.append(measure(llm, workload, machine, repeat=args.repeat, temperature=args.temperature))
            if sys.stderr.isatty():
                complain(f"{workload.name}: {figures[-1]['seconds']:.2f} s")
        if args.profile:
            profile = profile_run(llm, fitted[0], args.temperature)
    print_table(figures)
    if profile is not None:
        print_profile(profile)
        write_text(args.profile, json.dumps(profile.trace()), "--profile")
    if args.json:
        write_text(args.json, json.dumps(figures, indent=1), "--json")
    return 0


ROWS = (
    ("requests", "num_requests", "{:,}"),
    ("prompt tokens", "num_prompt_tokens", "{:,}"),
    ("output tokens", "num_output_tokens", "{:,}"),
    ("seconds", "seconds", "{:.3f}"),
    ("prompt tok/s", "prompt_tokens_per_second", "{:,.1f}"),
    ("output tok/s", "output_tokens_per_second", "{:,.1f}"),
    ("total tok/s", "total_tokens_per_second", "{:,.1f}"),
    ("ms/step", "ms_per_step", "{:.3f}"),
    ("host ms/step", "host_ms_per_step", "{:.3f}"),
    ("first token ms", "first_token_ms", "{:,.1f}"),
    ("peak KV use", "peak_kv_usage", "{:.1%}"),
    ("cached tokens", "num_cached_tokens", "{:,}"),
    ("preemptions", "num_preemptions", "{:,}"),
    ("kernels compiled late", "num_late_compilations", "{:,}"),
    ("experts of a layer read by a step, by chance", "experts_read_per_layer_and_step", "{:,.1f}"),
    ("bytes to move, GB", "limit_gigabytes", "{:,.1f}"),
    ("TFLOPs to compute", "limit_teraflops", "{:,.2f}"),
    ("machine GB/s", "machine_gigabytes_per_second", "{:,.1f}"),
    ("machine TFLOP/s", "machine_teraflops_per_second", "{:,.2f}"),
    ("the machine's limit, s", "limit_seconds", "{:.3f}"),
    ("share of the limit", "share_of_limit", "{:.1%}"),
)


DRAFT_ROWS = (
    ("spec_decode_num_drafts", "spec_decode_num_drafts", "{:,}"),
    ("spec_decode_num_draft_tokens", "spec_decode_num_draft_tokens", "{:,}"),
    ("spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens", "{:,}"),
    ("spec_decode_num_accepted_tokens_per_pos", "spec_decode_num_accepted_tokens_per_pos", "{:,}"),
    ("tokens a verification", "mean_accepted_length", "{:.2f}"),
    ("the same, from the first draft's rate", "expected_accepted_length", "{:.2f}"),
    ("drafts accepted, by position", "acceptance_rates", "{:.0%}"),
)


def _cell(value: object, form: str) -> str:
    """A figure, several of them, or none."""
    if isinstance(value, list):
        return " ".join(map(form.format, value))
    return "-" if value is None else form.format(value)


def print_table(figures: list[dict[str, object]]) -> None:
    """One column a workload."""
    from rich.table import Table

    first = figures[0]
    title = f"{first['model']}, {first['dtype']} on {first['device']}"
    if first["is_synthetic"]:
        title += "\nSYNTHETIC: drafts stood by chance, at given rates, not at the model's own"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for column in figures:
        table.add_column(str(column["workload"]), justify="right")
    speculates = any(column["acceptance_rates"] for column in figures)
    for title, key, form in ROWS + (DRAFT_ROWS if speculates else ()):
        values = [_cell(column[key], form) for column in figures]
        table.add_row(title, *values, end_section=key in ("num_output_tokens", "num_late_compilations"))
    terminal().print(table)
