"""What `pellucid bench serve` prints: a table a run, a line for each of a sweep, what to be warned of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from pellucid.cli.console import terminal
from pellucid.cli.load.figures import LATENCIES, Figures, Spread

BUSY = 0.8  # share of a core from which on the client may be what is measured
LATE = 5.0  # ms, likewise
SHOWN_ERRORS = 5
SWEEP_HEADS = (
    *("sent", "errors", "req/s", "tok/s"),
    *("TTFT 50%", "99%", "ITL 50%", "99%", "us/tok"),
)


def warnings(figures: Figures) -> Iterator[str]:
    """What a reader of the figures has to know."""
    errors = list(figures.errors.items())
    for reason, number in errors[:SHOWN_ERRORS]:
        yield f"{number} of {figures.num_requests} requests failed: {reason}"
    if len(errors) > SHOWN_ERRORS:
        yield f"and {len(errors) - SHOWN_ERRORS} other reasons"
    if figures.num_miscounted:
        yield f"in {figures.num_miscounted} answers the usage at the end is another number than came"
    if figures.is_spread:
        yield "chunks do not say how many tokens they have: the usage at the end was spread evenly over them"
    if figures.client_busy > BUSY:
        yield (
            f"a client process was busy {figures.client_busy:.0%} of the time, the figures may be its own: "
            "take more --client-processes, and more cores"
        )
    spreads = [lane.latencies["late_ms"] for lane in figures.lanes if "late_ms" in lane.latencies]
    late = max((spread.p99 for spread in spreads), default=0.0)
    if late > LATE:
        yield f"requests were late, 1% of them by over {late:,.0f} ms: the rate is not the one asked for"


def print_run(figures: Figures) -> None:
    """One table, and below it what is counted."""
    title = f"{figures.model}, {figures.workload}, {figures.setting}"
    table = Table("milliseconds", title=title, title_justify="left")
    for column in ("mean", "50%", "90%", "99%", "max"):
        table.add_column(column, justify="right")
    for lane in figures.lanes:
        if lane.name:
            table.add_row(lane.name, style="bold")
        for key, each in lane.latencies.items():
            values = (each.mean, each.p50, each.p90, each.p99, each.max)
            cells = [f"{value:,.2f}" for value in values]
            table.add_row(LATENCIES[key], *cells, end_section=key == list(lane.latencies)[-1])
    terminal().print(table)
    for line in _counts(figures):
        terminal().print(line, soft_wrap=True)


def _counts(figures: Figures) -> Iterator[str]:
    """The lines below a run's table."""
    for lane in figures.lanes:
        name = f"{lane.name}: " if lane.name else ""
        yield f"{name}{lane.num_requests:,} requests, {lane.num_errors:,} errors"
    tokens = f"{figures.num_prompt_tokens:,} prompt and {figures.num_output_tokens:,.0f} output tokens"
    per_chunk = _optional(figures.tokens_per_chunk, ".2f")
    yield f"{figures.seconds:,.2f} s, {tokens}, {per_chunk} output tokens a chunk"
    rates = (
        f"{figures.requests_per_second:,.2f} requests/s, {figures.output_tokens_per_second:,.1f} output tok/s"
    )
    yield f"{rates}, {figures.total_tokens_per_second:,.1f} total tok/s"
    client = _optional(figures.client_us_per_token, ",.1f")
    yield f"client: {client} us of CPU time a token, busy {figures.client_busy:.0%} of a core"
    if figures.server_processes is not None:
        yield f"server: {_optional(figures.server_us_per_token, ',.1f')} us of CPU time a token"
        total = sum(process.seconds for process in figures.server_processes)
        for process in figures.server_processes:
            if total and process.seconds > total / 100:
                share = process.seconds / total * (figures.server_us_per_token or 0.0)
                yield f"  {share:,.1f} of them in process {process.pid}, {process.name}"


def _optional(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def print_sweep(runs: Sequence[Figures]) -> None:
    """One line a run: output tokens a second, ms of the lane that streams, CPU time of the server's."""
    table = Table(title=f"{runs[0].model}, {runs[0].workload}", title_justify="left", padding=(0, 0, 0, 1))
    table.add_column("", no_wrap=True)
    for column in SWEEP_HEADS:
        table.add_column(column, justify="right")
    for run in runs:
        table.add_row(
            run.setting,
            f"{run.num_requests:,}",
            f"{run.num_errors:,}",
            f"{run.requests_per_second:,.2f}",
            f"{run.output_tokens_per_second:,.1f}",
            *_two_percentiles(run.lanes[0].latencies.get("ttft_ms")),
            *_two_percentiles(run.lanes[0].latencies.get("itl_ms")),
            _optional(run.server_us_per_token, ",.1f"),
        )
    terminal().print(table)


def _two_percentiles(spread: Spread | None) -> tuple[str, str]:
    return ("-", "-") if spread is None else (f"{spread.p50:,.2f}", f"{spread.p99:,.2f}")
