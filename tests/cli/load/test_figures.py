"""Figures are what their names say, also where chunks carry several tokens."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pellucid.cli.load.answer import Record, StreamAnswer
from pellucid.cli.load.drive import Observed
from pellucid.cli.load.figures import Figures, percentile, spread, summarize
from pellucid.cli.load.workloads import Load, Wire
from pellucid.cli.workloads import Lengths
from tests.cli.load.fake import end, event, token

ONE = Lengths(low=1, high=1)
LOAD = Load(workload="random", num_requests=1, inputs=ONE, outputs=ONE, wire=Wire(model="m"))


def answered(*arrivals: tuple[float, bytes], lane: str = "") -> Record:
    """The record of a request sent at 0."""
    answer = StreamAnswer(Record(lane=lane, due=None, sent=0.0))
    for when, data in arrivals:
        answer.take(200, data, when)
    return answer.finish(arrivals[-1][0])


def figures(*records: Record) -> Figures:
    return summarize(LOAD, Observed(records=list(records), cpu_seconds=[0.5]), None)


def test_percentiles_are_of_the_nearest_rank() -> None:
    values = list(range(1, 101))
    random.Random(1).shuffle(values)
    found = spread([value / 1000 for value in values])
    assert found is not None
    assert (found.mean, found.p50, found.p90, found.p99, found.max) == pytest.approx((50.5, 50, 90, 99, 100))


def test_percentiles_of_one_value_are_that_value() -> None:
    found = spread([0.007])
    assert found is not None and {found.p50, found.p99, found.max} == {7.0}
    assert spread([]) is None


def test_weights_are_repetitions() -> None:
    values, weights = np.array([1.0, 2.0, 5.0]), np.array([3, 1, 6])
    repeated = np.repeat(values, weights)
    for percent in (1, 30, 31, 40, 41, 50, 99, 100):
        one = percentile(repeated, np.ones(10), percent)
        assert percentile(values, weights.astype(float), percent) == one


def test_a_stream_of_single_tokens() -> None:
    record = answered((0.5, token(1)), (0.6, token(2)), (0.8, token(3)), (0.9, end(3, num_prompt=7)))
    latencies = figures(record).lanes[0].latencies
    assert latencies["ttft_ms"].max == pytest.approx(500)
    assert (latencies["itl_ms"].p50, latencies["itl_ms"].max) == pytest.approx((100, 200))
    assert latencies["tpot_ms"].max == pytest.approx(150)
    assert latencies["e2e_ms"].max == pytest.approx(900)
    assert (record.num_prompt, record.num_output) == (7, 3)


def test_tokens_of_one_chunk_share_the_wait_for_it() -> None:
    record = answered((1.0, token(1, 2)), (1.4, token(3, 4, 5, 6)), (1.5, token(7)), (1.5, end(7)))
    found = figures(record)
    assert found.num_output_tokens == 7 and found.tokens_per_chunk == pytest.approx(7 / 3)
    latencies = found.lanes[0].latencies
    assert (latencies["itl_ms"].mean, latencies["itl_ms"].max) == pytest.approx((100, 100))
    assert latencies["gap_ms"].max == pytest.approx(400)
    assert latencies["tpot_ms"].max == pytest.approx(100)  # five tokens in half a second


def test_what_arrives_at_once_is_one_arrival() -> None:
    record = answered((1.0, token(1)), (2.0, token(2) + token(3)), (2.0, end(3)))
    assert (record.times, record.counts) == ([1.0, 2.0], [1, 2])


def test_events_may_be_cut_anywhere_and_end_in_carriage_returns() -> None:
    data = (b": ping\n\nevent: message\n" + token(1) + token(2) + end(2)).replace(b"\n", b"\r\n")
    for cut in range(len(data)):
        record = answered((1.0, data[:cut]), (1.0, data[cut:]))
        assert record.num_output == 2 and record.error is None


def test_the_usage_so_far_counts_where_there_are_no_ids() -> None:
    def chunk(total: int) -> bytes:
        usage = {"prompt_tokens": 3, "completion_tokens": total}
        return event({"choices": [{"delta": {"content": "ab"}}], "usage": usage})

    record = answered((1.0, chunk(1)), (2.0, chunk(4)), (2.0, end(4)))
    assert record.counts == [1, 3] and not record.is_spread


def test_the_usage_at_the_end_is_spread_where_chunks_do_not_count() -> None:
    says, silent = ({"choices": [{"delta": {"content": text}}]} for text in ("abc", ""))
    stream = [(0.5, silent), (1.0, says), (2.0, says)]
    record = answered(*((when, event(chunk)) for when, chunk in stream), (2.5, end(6)))
    assert (record.times, record.counts) == ([1.0, 2.0], [3, 3]) and record.is_spread
    assert figures(record).is_spread


def test_a_usage_that_is_not_what_came_is_told() -> None:
    assert figures(answered((1.0, token(1)), (1.0, end(2)))).num_miscounted == 1


def test_failed_requests_are_counted_and_nothing_else_of_them() -> None:
    good = answered((1.0, token(1)), (2.0, end(1)))
    cut = answered((0.1, token(1)), (0.2, token(2)))
    broken = answered((0.1, event({"error": {"message": "the engine has died"}}) + b"data: [DONE]\n\n"))
    found = figures(good, cut, broken)
    assert (found.num_requests, found.num_errors, found.num_output_tokens) == (3, 2, 1)
    assert set(found.errors) == {"the stream ended without an end", "in the stream: the engine has died"}
    assert found.lanes[0].latencies["ttft_ms"].p50 == pytest.approx(1000)


def test_lanes_are_told_apart() -> None:
    records = [
        answered((when, token(1)), (when, end(1)), lane=name) for when, name in ((1.0, "a"), (2.0, "b"))
    ]
    lanes = figures(*records).lanes
    assert [(lane.name, lane.latencies["ttft_ms"].max) for lane in lanes] == [("a", 1000), ("b", 2000)]
