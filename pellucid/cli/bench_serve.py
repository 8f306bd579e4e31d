"""`pellucid bench serve`: what an OpenAI-compatible server's clients see, and what it costs both sides."""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pellucid.cli.console import complain, note
from pellucid.cli.load.workloads import COUNTINGS, ENDPOINTS, FIXED_PACE, LOADS, Load, Wire
from pellucid.cli.prompts import parse_json, write_text
from pellucid.cli.workloads import Lengths, positive

if TYPE_CHECKING:
    from pellucid.cli.load.figures import Figures
    from pellucid.cli.load.http import Target
    from pellucid.cli.load.server import ServerCpu

BASE_URL = "http://127.0.0.1:8000"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `bench serve` understands."""
    parser.usage = "%(prog)s [OPTION ...] [--spawn SERVE_OPTION ...]"
    for section, add_options in SECTIONS.items():
        add_options(parser.add_argument_group(f"{section} options"))
    parser.epilog = (
        "Times are of requests without an error, from when they were sent; if that was "
        "later than they were due, it is shown. The server's CPU time is shown where it runs on this machine."
    )


def _add_server_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--base-url", metavar="URL", help=f"with or without /v1 (default {BASE_URL})")
    add("--model", metavar="NAME", help="what requests call the model (default the first of /v1/models)")
    add("--api-key", metavar="KEY", help="sent as Authorization: Bearer KEY")
    add(
        "--spawn", nargs=argparse.REMAINDER, metavar="SERVE_OPTION",
        help="start `pellucid serve` on a free port with all that follows, stop it at the end; comes last",
    )  # fmt: skip


def _add_load_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    lengths = {name: f", {recipe.inputs} in, {recipe.outputs} out" for name, recipe in LOADS.items()}
    recipes = "; ".join(f"{name}: {LOADS[name].text}{lengths[name] * (name != 'chat')}" for name in LOADS)
    numbers = ", ".join(f"{recipe.num_requests} for {name}" for name, recipe in LOADS.items())
    limits = ", ".join(f"{recipe.limit} for {name}" for name, recipe in LOADS.items() if recipe.limit)
    add("--workload", choices=tuple(LOADS), default="random", help=f"{recipes} (default random)")
    add("--num-requests", type=positive, metavar="N", help=f"requests of a run (default {numbers})")
    add(
        "--request-rate", type=_positive_number, nargs="+", metavar="X",
        help="requests a second, a Poisson process; several are runs one after another, a sweep",
    )  # fmt: skip
    add(
        "--max-concurrency", type=positive, nargs="+", metavar="N",
        help=f"requests at a time; several are a sweep (default {limits}, else no limit)",
    )  # fmt: skip
    add("--input-len", type=Lengths.parse, metavar="N|LOW:HIGH", help="prompt tokens")
    add("--output-len", type=Lengths.parse, metavar="N|LOW:HIGH", help="output tokens")
    for flag, kind, metavar, default, text in SHAPES:
        add(flag, type=kind, metavar=metavar, default=default, help=f"{text} (default {default:g})")


def _add_request_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--endpoint", choices=tuple(ENDPOINTS), default="completions", help="(default completions)")
    add("--temperature", type=float, metavar="X", default=0.6, help="(default 0.6)")
    add("--seed", type=int, metavar="N", default=0, help="draws tokens, lengths and times (default 0)")
    add(
        "--count-by", choices=COUNTINGS, default="usage",
        help="usage: ask for the usage so far in every chunk; ids: ask for token ids in every chunk; end: "
        "ask for nothing unusual, and spread the usage at the end over the chunks (default usage)",
    )  # fmt: skip
    add(
        "--extra-body", metavar="JSON",
        help="fields of every request; null takes one away that a server refuses, such as ignore_eos",
    )  # fmt: skip
    add(
        "--timeout", type=_positive_number, metavar="S", default=600.0, help="seconds a request (default 600)"
    )


def _add_client_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--num-warm-ups", type=_count, metavar="N", default=4, help="requests before all others (default 4)")
    add(
        "--client-processes", type=positive, metavar="N", default=1,
        help="processes that share the load (default 1)",
    )  # fmt: skip
    add("--json", metavar="FILE", help="also write all figures as JSON, one object a run")
    add(
        "--plot", metavar="FILE", help="draw latency against throughput: .html, .svg, or .png (with cairosvg)"
    )


def _positive_number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
    return number


def _count(text: str) -> int:
    return 0 if text == "0" else positive(text)


SECTIONS = {
    "server": _add_server_options,
    "load": _add_load_options,
    "request": _add_request_options,
    "client": _add_client_options,
}
SHAPES = (
    ("--prefix-len", positive, "N", 1024, "for shared-prefix: tokens of a prefix"),
    ("--num-prefixes", positive, "N", 8, "for shared-prefix: how many there are"),
    ("--long-len", positive, "N", 8000, "for mixed: tokens of a long prompt"),
    ("--long-every", _positive_number, "S", 0.25, "for mixed: seconds between two long prompts"),
)


def run(args: argparse.Namespace) -> int:
    """Run every load of the sweep and print what was seen; status 1 if all requests of one have failed."""
    from pellucid.cli.load.plot import check_plot, write_plot
    from pellucid.cli.load.show import print_sweep

    if args.json and not Path(args.json).absolute().parent.is_dir():
        raise ValueError(f"--json {args.json!r} cannot be written; name a file in a folder that exists")
    if args.plot:
        check_plot(args.plot)
    _check(args)
    with _server(args) as server:
        runs = [_run(load, server, args) for load in _warmed_up(_loads(args, server), server, args)]
    if len(runs) > 1:
        print_sweep(runs)
    if args.json:
        figures = [{**run.as_json(), "seconds_to_ready": server.seconds_to_ready} for run in runs]
        write_text(args.json, json.dumps(figures, indent=1), "--json")
    if args.plot:
        write_plot(args.plot, runs)
    return 0 if all(run.num_requests > run.num_errors for run in runs) else 1


def _check(args: argparse.Namespace) -> None:
    """Raise ValueError for what contradicts itself."""
    if args.spawn is not None and args.base_url is not None:
        raise ValueError("--spawn starts a server, --base-url names one; give one of them")
    if args.request_rate and args.workload in FIXED_PACE:
        raise ValueError(f"--workload {args.workload} has a pace of its own; drop --request-rate")
    if (
        args.request_rate
        and args.max_concurrency
        and min(map(len, (args.request_rate, args.max_concurrency))) > 1
    ):
        raise ValueError("sweep --request-rate or --max-concurrency, not both")
    if args.workload == "chat" and (args.input_len or args.output_len):
        raise ValueError(
            "the bundled conversations have lengths of their own; drop --input-len and --output-len"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Server:
    target: Target
    model: str
    max_model_len: int | None
    cpu: ServerCpu | None
    seconds_to_ready: float | None  # None where it was there before


@contextmanager
def _server(args: argparse.Namespace) -> Iterator[_Server]:
    """The server to load, started if asked for."""
    from pellucid.cli.load.http import Target
    from pellucid.cli.load.server import ServerCpu, ask_models, spawned

    with ExitStack() as stack:
        spawn = None if args.spawn is None else stack.enter_context(spawned(args.spawn))
        if spawn is not None:
            note(f"ready after {spawn.seconds:.1f} s")
        target = Target.parse(spawn.url if spawn else args.base_url or BASE_URL, args.api_key)
        served = ask_models(target, args.model)
        yield _Server(
            target=target,
            model=served.model,
            max_model_len=served.max_model_len,
            cpu=ServerCpu.of(target, spawn.pid if spawn else None),
            seconds_to_ready=spawn.seconds if spawn else None,
        )


def _loads(args: argparse.Namespace, server: _Server) -> list[Load]:
    """One load for each setting of the sweep.  Raises ValueError for requests that the model cannot take."""
    recipe = LOADS[args.workload]
    extra = parse_json(args.extra_body, "--extra-body") if args.extra_body else {}
    if not isinstance(extra, dict):
        raise ValueError("--extra-body must hold a JSON object")
    wire = Wire(
        model=server.model,
        endpoint=args.endpoint,
        counting=args.count_by,
        temperature=args.temperature,
        extra=extra,
    )
    rates, limits = args.request_rate or [None], args.max_concurrency or [recipe.limit]
    loads = [
        Load(
            workload=args.workload,
            num_requests=args.num_requests or recipe.num_requests,
            inputs=args.input_len or recipe.inputs,
            outputs=args.output_len or recipe.outputs,
            wire=wire,
            request_rate=rate,
            max_concurrency=limit,
            num_prefixes=args.num_prefixes,
            prefix_len=args.prefix_len,
            long_len=args.long_len,
            long_every=args.long_every,
            # Other tokens in every run: what the one before left in the prefix cache is of no use.
            seed=args.seed + number,
        )
        for number, (rate, limit) in enumerate(itertools.product(rates, limits))
    ]
    if server.max_model_len is not None and loads[0].longest > server.max_model_len:
        raise ValueError(
            f"{args.workload} has requests of {loads[0].longest:,} tokens, the server's max_model_len is "
            f"{server.max_model_len:,}; shorten --input-len, --prefix-len or --long-len"
        )
    return loads


def _warmed_up(loads: list[Load], server: _Server, args: argparse.Namespace) -> list[Load]:
    """Send a few requests that do not count.  Raises ValueError if they fail: so would all others."""
    from pellucid.cli.load.drive import drive
    from pellucid.cli.load.workloads import warm_up

    if args.num_warm_ups:
        lanes = warm_up(loads[0], args.num_warm_ups)
        for record in drive(server.target, lanes, start=time.monotonic(), timeout=args.timeout).records:
            if record.error is not None:
                raise ValueError(f"a first request has failed: {record.error}")
    return loads


def _run(load: Load, server: _Server, args: argparse.Namespace) -> Figures:
    from pellucid.cli.load.clients import observe
    from pellucid.cli.load.figures import summarize
    from pellucid.cli.load.show import print_run, warnings

    if server.cpu is not None:
        server.cpu.restart()
    seen = observe(server.target, load, num_processes=args.client_processes, timeout=args.timeout)
    figures = summarize(load, seen, server.cpu.processes() if server.cpu is not None else None)
    print_run(figures)
    for warning in warnings(figures):
        complain(f"pellucid bench serve: {warning}")
    return figures
