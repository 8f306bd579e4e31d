"""Drafts that cost more than they bring are given up, those that pay are kept, whatever the clock's noise."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from pellucid.spec.switch import Switch

Cost = Callable[
    [int], tuple[float, float]
]  # of step number n with drafts: times a plain one's seconds, and tokens


def run(drafts: Cost, num_steps: int, *, num_rows: int = 4, noise: float = 0.05) -> tuple[float, float]:
    """Tokens a second relative to plain steps alone, and the share of steps with drafts."""
    switch, rng = Switch(), random.Random(1)
    seconds, tokens, num_drafting = 0.0, 0.0, 0
    for number in range(num_steps):
        is_drafting = switch.is_on
        ratio, new = drafts(number) if is_drafting else (1.0, 1.0)
        took = 0.01 * ratio * max(0.5, rng.gauss(1, noise)) * (10 if rng.random() < 0.002 else 1)
        num_new = sum(1 + (rng.random() < (new - 1) % 1) + int(new - 1) for _ in range(num_rows))
        switch.took(took, num_rows, num_new, is_drafting=is_drafting)
        seconds, tokens, num_drafting = seconds + 0.01 * ratio, tokens + new, num_drafting + is_drafting
    return tokens / (seconds / 0.01), num_drafting / num_steps


@pytest.mark.parametrize(("ratio", "tokens"), [(1.4, 1.0), (1.5, 1.2), (2.5, 1.3), (1.1, 1.05)])
def test_drafts_that_do_not_pay_cost_next_to_nothing(ratio: float, tokens: float) -> None:
    speed, share = run(lambda _: (ratio, tokens), 10_000)
    assert speed > 0.98 and share < 0.05


@pytest.mark.parametrize(("ratio", "tokens"), [(1.4, 3.0), (1.1, 1.3), (2.0, 4.5)])
def test_drafts_that_pay_are_kept(ratio: float, tokens: float) -> None:
    speed, share = run(lambda _: (ratio, tokens), 10_000)
    assert speed > 0.97 * tokens / ratio and share > 0.97


def test_what_changes_in_mid_run_is_followed() -> None:
    """Good drafts, then such as never stand, then good ones again; 4,000 steps each."""
    good, bad = (1.4, 3.0), (1.4, 1.0)
    speed, share = run(lambda n: bad if 4000 <= n < 8000 else good, 16_000)
    assert speed > 1.5 and 0.5 < share < 0.9


def test_what_has_lost_often_is_seldom_tried() -> None:
    _, early = run(lambda _: (2.0, 1.0), 2_000)
    _, late = run(lambda _: (2.0, 1.0), 50_000)
    assert late < early / 4
