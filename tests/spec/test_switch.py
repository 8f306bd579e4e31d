"""Drafts that cost more than they bring are given up, those that pay are kept, whatever the clock's noise."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from pellucid.spec.switch import MOST, Switch, size_of

Cost = Callable[
    [int], tuple[float, float]
]  # of step number n with drafts: times a plain one's seconds, and tokens


def run(
    drafts: Cost, num_steps: int, *, num_rows: int = 4, noise: float = 0.05, switch: Switch | None = None
) -> tuple[float, float]:
    """Tokens a second relative to plain steps alone, and the share of steps with drafts."""
    switch, rng = switch or Switch(), random.Random(1)
    seconds, tokens, num_drafting = 0.0, 0.0, 0
    for number in range(num_steps):
        is_drafting = switch.is_on
        ratio, new = drafts(number) if is_drafting else (1.0, 1.0)
        took = 0.01 * ratio * max(0.5, rng.gauss(1, noise)) * (10 if rng.random() < 0.002 else 1)
        num_new = sum(1 + (rng.random() < (new - 1) % 1) + int(new - 1) for _ in range(num_rows))
        num_drafts = 4 * num_rows if is_drafting else 0
        switch.took(took, num_rows, num_new, num_drafts, is_plain=not is_drafting)
        seconds, tokens, num_drafting = seconds + 0.01 * ratio, tokens + new, num_drafting + is_drafting
    return tokens / (seconds / 0.01), num_drafting / num_steps


@pytest.mark.parametrize(("ratio", "tokens"), [(1.4, 1.0), (1.5, 1.2), (2.5, 1.3), (1.1, 1.05), (1.02, 1.0)])
@pytest.mark.parametrize("num_rows", [1, 64])
def test_drafts_that_do_not_pay_cost_a_hundredth(ratio: float, tokens: float, num_rows: int) -> None:
    speed, _ = run(lambda _: (ratio, tokens), 10_000, num_rows=num_rows)
    assert speed > 0.985


def test_nor_do_they_cost_much_at_first() -> None:
    speed, _ = run(lambda _: (2.0, 1.0), 300)
    assert speed > 0.97


@pytest.mark.parametrize(("ratio", "tokens"), [(1.4, 3.0), (1.1, 1.3), (2.0, 4.5)])
@pytest.mark.parametrize("num_rows", [1, 64])
def test_drafts_that_pay_are_kept(ratio: float, tokens: float, num_rows: int) -> None:
    speed, share = run(lambda _: (ratio, tokens), 10_000, num_rows=num_rows)
    assert speed > 0.97 * tokens / ratio and share > 0.95


def test_what_changes_in_mid_run_is_followed() -> None:
    """Good drafts, then such as never stand, then good ones again; 4,000 steps each."""
    good, bad = (1.4, 3.0), (1.4, 1.0)
    speed, share = run(lambda n: bad if 4000 <= n < 8000 else good, 16_000)
    assert speed > 1.7 and 0.6 < share < 0.9


def test_a_clock_that_jumps_about_costs_no_more() -> None:
    speed, _ = run(lambda _: (1.5, 1.2), 10_000, noise=0.5)
    assert speed > 0.98


def test_what_was_saved_is_known_in_seconds() -> None:
    switch = Switch()
    run(lambda _: (1.5, 3.0), 1000, noise=0.0, switch=switch)
    assert switch.saved == pytest.approx(0.015 * 1000, rel=0.1)
    assert switch.credit == MOST
    assert switch.price(4) == pytest.approx(0.005 / 4 * 3 / 0.015, rel=0.1)


def test_a_crowd_of_another_size_is_looked_at_first() -> None:
    """Nothing is known of its plain steps; between two that are known it is."""
    switch = Switch()
    run(lambda _: (1.5, 3.0), 20, num_rows=4, switch=switch)
    assert switch.is_on
    switch.took(0.02, 40, 120, 160, is_plain=False)
    assert switch.is_looking and not switch.is_on
    run(lambda _: (1.5, 3.0), 20, num_rows=40, switch=switch)
    assert switch.is_on
    switch.took(0.02, 20, 60, 80, is_plain=False)
    assert switch.is_on


def test_sizes_are_few() -> None:
    assert [size_of(n) for n in (1, 5, 7, 8, 9, 15, 17, 255, 256)] == [1, 5, 7, 8, 8, 14, 16, 224, 256]
