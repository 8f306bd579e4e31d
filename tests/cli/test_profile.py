"""What a profile adds up."""

from __future__ import annotations

import pytest

from pellucid.cli.profile import Profile, Span, Total, idle_share, own_times, totals


def test_time_belongs_to_the_innermost_span_of_a_lane() -> None:
    spans = [
        Span("outer", 0, 100, "a"),
        Span("inner", 10, 30, "a"),
        Span("innermost", 20, 10, "a"),
        Span("inner", 50, 20, "a"),
        Span("elsewhere", 10, 90, "b"),
        Span("next", 100, 5, "a"),
    ]
    assert own_times(spans) == [50, 20, 10, 20, 90, 5]
    assert totals(spans)[:2] == [Total("elsewhere", 1, 90e-9), Total("outer", 1, 50e-9)]
    assert Total("inner", 2, 40e-9) in totals(spans)


def test_a_kernel_launched_early_has_what_it_adds() -> None:
    spans = [Span("x", 0, 10, "a"), Span("y", 4, 11, "a"), Span("z", 13, 7, "a"), Span("x", 30, 1, "a")]
    assert own_times(spans) == [10, 5, 5, 1]


def test_a_device_idles_where_no_lane_is_busy() -> None:
    spans = [Span("x", 10, 10, "a"), Span("y", 15, 10, "b"), Span("z", 40, 10, "a")]
    assert idle_share(spans) == pytest.approx(15 / 40)
    assert idle_share([]) == 0.0


def test_a_trace_begins_at_zero_and_names_its_lanes() -> None:
    profile = Profile(
        [Span("plan", 5000, 1000, "engine", {"rows": 2})], [Span("gemm", 7000, 500, "stream 7")]
    )
    events = profile.trace()["traceEvents"]
    assert isinstance(events, list)
    assert [(e["name"], e["ts"], e["dur"], e["args"]) for e in events if e["ph"] == "X"] == [
        ("plan", 0.0, 1.0, {"rows": 2}),
        ("gemm", 2.0, 0.5, {}),
    ]
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {"host", "device", "engine", "stream 7"}
