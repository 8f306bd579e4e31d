"""From records to figures: rates, percentiles, errors.  Seconds in, milliseconds out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from pellucid.cli.load.answer import Record
from pellucid.cli.load.drive import Observed
from pellucid.cli.load.server import ProcessCpu
from pellucid.cli.load.workloads import Load

# A gap before k tokens counts k times, as gap / k, between tokens, and once between chunks: that is what a
# reader waits, however much comes then.  The time per output token is a request's, from its first arrival to
# its last, over the tokens after the first.  Requests are late when the client is, or when it has no room.
LATENCIES = {
    "ttft_ms": "first token (TTFT)",
    "itl_ms": "between tokens (ITL)",
    "gap_ms": "between chunks",
    "tpot_ms": "a token (TPOT)",
    "e2e_ms": "end to end",
    "late_ms": "sent later than due",
}


@dataclass(frozen=True, slots=True)
class Spread:
    """How something is distributed."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneFigures:
    """Requests of one kind.  latencies: by the names of LATENCIES, in ms, of requests without an error."""

    name: str
    num_requests: int
    num_errors: int
    latencies: dict[str, Spread]  # without those of which there is nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One run.  Token counts are of requests without an error."""

    workload: str
    setting: str
    request_rate: float | None
    max_concurrency: int | None
    model: str
    endpoint: str
    num_requests: int
    num_errors: int
    errors: dict[str, int]  # reason: requests
    seconds: float
    num_prompt_tokens: int
    num_output_tokens: float
    num_miscounted: int  # requests whose usage at the end says another number than came
    is_spread: bool  # were tokens spread evenly over chunks, because no chunk said how many it has?
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    tokens_per_chunk: float | None
    lanes: list[LaneFigures]
    num_client_processes: int
    client_busy: float  # share of a core, of the busiest process
    client_us_per_token: float | None
    server_us_per_token: float | None
    server_processes: list[ProcessCpu] | None  # None where the server is not on this machine

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def percentile(values: np.ndarray, weights: np.ndarray, percent: float) -> float:
    """The least value that `percent` of all weight does not exceed (nearest rank).  values: sorted."""
    sums = np.cumsum(weights)
    place = int(np.searchsorted(sums, sums[-1] * percent / 100 * (1 - 1e-12)))
    return float(values[min(place, len(values) - 1)])


def spread(seconds: Sequence[float], weights: Sequence[float] | None = None) -> Spread | None:
    """In ms.  weights: how often each value counts."""
    if not seconds:
        return None
    order = np.argsort(seconds)
    values = 1000 * np.asarray(seconds)[order]
    weight = np.ones(len(values)) if weights is None else np.asarray(weights)[order]
    mean = float(np.average(values, weights=weight))
    p50, p90, p99 = (percentile(values, weight, percent) for percent in (50, 90, 99))
    return Spread(mean, p50, p90, p99, float(values[-1]))


def summarize(load: Load, seen: Observed, server: list[ProcessCpu] | None) -> Figures:
    """All figures of a run.  server: the CPU time of its processes meanwhile."""
    good = [record for record in seen.records if record.error is None]
    errors = Counter(record.error for record in seen.records if record.error is not None)
    num_prompt = sum(record.num_prompt for record in good)
    num_output = sum(record.num_output for record in good)
    # CPU time went to the tokens of failed requests, too.
    streamed = sum(record.num_output for record in seen.records)
    num_chunks = sum(len(record.times) for record in good)
    return Figures(
        workload=load.workload,
        setting=load.setting,
        request_rate=load.request_rate,
        max_concurrency=load.max_concurrency,
        model=load.wire.model,
        endpoint="chat" if load.workload == "chat" else load.wire.endpoint,
        num_requests=len(seen.records),
        num_errors=len(seen.records) - len(good),
        errors=dict(errors.most_common()),
        seconds=seen.seconds,
        num_prompt_tokens=num_prompt,
        num_output_tokens=round(num_output, 3),
        num_miscounted=sum(
            record.num_usage is not None and abs(record.num_usage - record.num_output) > 0.5
            for record in good
        ),
        is_spread=any(record.is_spread for record in good),
        requests_per_second=len(good) / seen.seconds,
        output_tokens_per_second=num_output / seen.seconds,
        total_tokens_per_second=(num_prompt + num_output) / seen.seconds,
        tokens_per_chunk=num_output / num_chunks if num_chunks else None,
        lanes=[_lane(name, seen.records) for name in dict.fromkeys(r.lane for r in seen.records)],
        num_client_processes=len(seen.cpu_seconds),
        client_busy=seen.busiest,
        client_us_per_token=_per_token(sum(seen.cpu_seconds), streamed),
        server_us_per_token=None
        if server is None
        else _per_token(sum(process.seconds for process in server), streamed),
        server_processes=server,
    )


def _per_token(seconds: float, tokens: float) -> float | None:
    return 1e6 * seconds / tokens if tokens else None


def _lane(name: str, records: Iterable[Record]) -> LaneFigures:
    mine = [record for record in records if record.lane == name]
    good = [record for record in mine if record.error is None]
    spoke = [record for record in good if record.times]
    gaps: list[float] = []
    counts: list[float] = []
    for record in spoke:
        gaps += [b - a for a, b in zip(record.times, record.times[1:], strict=False)]
        counts += record.counts[1:]
    per_token = [gap / count for gap, count in zip(gaps, counts, strict=True)]
    found = {
        "ttft_ms": spread([record.times[0] - record.sent for record in spoke]),
        "itl_ms": spread(per_token, counts),
        "gap_ms": spread(gaps),
        "tpot_ms": spread([_per_output_token(record) for record in spoke if len(record.times) > 1]),
        "e2e_ms": spread([record.ended - record.sent for record in good]),
        "late_ms": spread([record.sent - record.due for record in mine if record.due is not None]),
    }
    return LaneFigures(
        name=name,
        num_requests=len(mine),
        num_errors=len(mine) - len(good),
        latencies={key: value for key, value in found.items() if value is not None},
    )


def _per_output_token(record: Record) -> float:
    return (record.times[-1] - record.times[0]) / sum(record.counts[1:])
