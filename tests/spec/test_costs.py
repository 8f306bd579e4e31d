"""What steps take is learnt from the clock, for each number of drafts."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pellucid.spec.costs import PROMPTS_SHARE, StepCosts, kinds_to_time, size_of
from pellucid.spec.drafter import Timed, Timings

PARTS = 0.3, 0.2, 0.1  # of a plain step: at all, each further pass, each draft of a row


def took(passes: int, drafts: float) -> float:
    """Plain steps, beside one."""
    return float(np.dot(PARTS, (1, passes - 1, drafts)))


def extra(costs: StepCosts, num_rows: int, passes: int, drafts: float) -> float:
    """And of several at once it is the same."""
    alone = costs.extra(num_rows, passes, drafts)
    assert costs.extras(num_rows, passes, np.array([drafts, drafts])) == pytest.approx([alone, alone])
    return alone


def learnt(num_rows: int = 8, noise: float = 0.03) -> StepCosts:
    costs, clock = StepCosts(4, 20, takes_passes=True), random.Random(1)
    for number in range(200):
        costs.add_plain(num_rows, 0.01 * clock.gauss(1, noise) * (10 if number % 50 == 7 else 1))
        passes = clock.randint(1, 4)
        seconds = 0.01 * (1 + took(passes, passes) + clock.gauss(0, noise))
        costs.add(num_rows, passes, passes, seconds * (10 if number % 50 == 9 else 1))
    return costs


def test_each_number_of_drafts_is_learnt() -> None:
    costs = learnt()
    assert costs.plain_seconds(8) == pytest.approx(0.01, rel=0.05)
    for num in range(1, 5):
        assert extra(costs, 8, num, num) == pytest.approx(took(num, num), abs=0.1)
    assert took(4, 0) < extra(costs, 8, 4, 2) < took(4, 4), "passes are made, also if fewer are verified"


def test_of_drafts_without_passes_what_is_verified_counts_alone() -> None:
    costs = StepCosts(4, 20)
    costs.add_plain(8, 0.01)
    for _ in range(50):
        costs.add(8, 4, 1, 0.012)
        costs.add(8, 4, 3, 0.016)
    assert extra(costs, 8, 4, 1) == extra(costs, 8, 1, 1) == pytest.approx(0.2, abs=0.01)
    assert extra(costs, 8, 4, 2.5) == pytest.approx((extra(costs, 8, 4, 2) + extra(costs, 8, 4, 3)) / 2)


@pytest.mark.parametrize("a_token", [4.6e-7, 0.0])
def test_plain_steps_say_what_longer_texts_take(a_token: float) -> None:
    """Of requests that come in waves, so that behind the longest texts come the shortest."""
    costs, clock = StepCosts(4, 256), random.Random(1)
    for _ in range(3):
        for num_tokens in range(2400, 10600, 512):  # eight steps of 64 rows
            took = [(0.006 + a_token * num_tokens) * clock.gauss(1, 0.04) for _ in range(8)]
            costs.add_plain(64, *took, num_tokens=num_tokens)
    last = costs.plain_seconds(64) or 0.0
    assert last == pytest.approx(0.006 + a_token * 10000, rel=0.05)
    for num_tokens in (2400, 6000):  # of the difference most is known, and never more than there is
        shorter = a_token * (10000 - num_tokens)
        assert 0.45 * shorter - 2e-4 < last - (costs.plain_seconds(64, num_tokens) or 0.0) < shorter + 2e-4
    assert costs.plain_seconds(64, 10**6) <= 2 * last, "not far beyond what was seen"
    took = costs.add(64, 4, 4, 0.012, num_tokens=2400)
    assert took == pytest.approx(0.012 / (costs.plain_seconds(64, 2400) or 1.0)), (
        "by a plain step of such texts"
    )


def test_plain_steps_are_looked_at_again_where_texts_are_much_shorter() -> None:
    costs, even = StepCosts(4, 256), StepCosts(4, 256)
    for num_tokens in range(2400, 10600, 512):
        costs.add_plain(64, *[0.006 + 4.6e-7 * num_tokens] * 8, num_tokens=num_tokens)
        even.add_plain(64, *[0.006] * 8, num_tokens=num_tokens)
    assert costs.is_doubtful(64, 2400) and not costs.is_doubtful(64, 9000), "about as long"
    assert not costs.is_doubtful(64, 20000), "drafts that look too dear wait for another look"
    assert not even.is_doubtful(64, 2400), "it makes no difference"
    assert not costs.is_doubtful(1, 2400), "nothing is known of it"
    costs.add_plain(64, 0.02, 0.0072, 0.0071, num_tokens=2400, is_usual=False)
    assert costs.plain_seconds(64) == 0.0071, "what was seen of long texts is gone"
    assert not costs.is_doubtful(64, 2400)


def test_what_was_timed_at_start_is_known() -> None:
    timed = [(0, 0.01), (1, 0.012), (2, 0.012), (3, 0.02), (4, 0.02)]
    costs = StepCosts(4, 256, Timings(True, tuple(Timed(8, num, num, seconds) for num, seconds in timed)))
    assert costs.plain_seconds(8) == 0.01 and costs.is_known(8)
    for num, seconds in timed[1:]:
        assert extra(costs, 8, 4, num) == pytest.approx(100 * seconds - 1)
    assert extra(costs, 8, 4, 2.1) == pytest.approx(1), "recorded steps are padded"
    assert extra(costs, 10, 4, 2) == pytest.approx(0.2), "as nearly as many rows"


def test_steps_that_are_not_padded_lie_on_lines_between_those_that_were_timed() -> None:
    assert kinds_to_time(8, 3)[:5] == [(1, 0, 0), (1, 3, 3), (1, 1, 1), (1, 0, 1), (1, 2, 2)]
    timed = Timed(8, 0, 0, 0.01), Timed(8, 0, 1, 0.011), Timed(8, 1, 1, 0.012), Timed(8, 4, 4, 0.03)
    costs = StepCosts(4, 27, Timings(steps=timed))
    assert extra(costs, 8, 1, 0) == pytest.approx(0.1) and extra(costs, 8, 1, 0.5) == pytest.approx(0.15)
    assert extra(costs, 8, 4, 1) == pytest.approx(0.2) and extra(costs, 8, 4, 4) == pytest.approx(2)
    assert [extra(costs, 8, 4, drafts) for drafts in (2, 3, 3.5)] == pytest.approx([0.8, 1.4, 1.7]), (
        "on a line"
    )


def test_longer_texts_make_plain_steps_longer_and_not_what_drafts_take_beside() -> None:
    timed = Timed(8, 0, 0, 0.01), Timed(8, 4, 4, 0.03)
    costs = StepCosts(4, 27, Timings(steps=timed))
    assert extra(costs, 8, 4, 4) == pytest.approx(2)
    for _ in range(16):
        costs.add_plain(8, 0.016)
    assert extra(costs, 8, 4, 4) == pytest.approx(2 / 1.6)
    for _ in range(200):
        costs.add(8, 4, 4, 0.032)
    assert extra(costs, 8, 4, 4) == pytest.approx(1, abs=0.01), "what steps take is learnt"


def test_what_was_not_timed_is_guessed() -> None:
    """All drafts do not fit into a step; time has ended behind the first step of more rows."""
    timed = Timed(8, 0, 0, 0.01), Timed(8, 1, 1, 0.012), Timed(8, 2, 2, 0.013), Timed(64, 0, 0, 0.02)
    costs = StepCosts(16, 27, Timings(steps=timed))
    assert extra(costs, 8, 16, 16) == pytest.approx(extra(StepCosts(16, 27), 8, 16, 16)) and costs.is_known(
        64
    )
    before = extra(costs, 64, 1, 1)
    for _ in range(16):
        costs.add_plain(64, 0.03)
    assert extra(costs, 64, 1, 1) == pytest.approx(before)


def test_a_plain_step_counts_behind_another_one_and_their_lower_quartile_is_what_they_take() -> None:
    costs = StepCosts(4, 20)
    costs.add_plain(8, 0.03, is_usual=False)
    assert costs.plain_seconds(8) == 0.03, "there are no others"
    costs.add_plain(8, 0.05, is_usual=False)
    for milliseconds in (10, 11, 12, 13, 14):
        costs.add_plain(8, milliseconds / 1000)
    assert costs.plain_seconds(8) == 0.011


def test_recorded_steps_with_a_drafter_make_one_draft_or_all() -> None:
    timed = Timed(8, 0, 0, 0.01), Timed(8, 1, 1, 0.012), Timed(8, 4, 4, 0.02)
    costs = StepCosts(4, 256, Timings(True, timed), takes_passes=True)
    assert costs.numbers == [1, 4]
    assert kinds_to_time(8, 4, all_or_one=True, is_padded=True)[:4] == [
        (1, 0, 0),
        (1, 4, 4),
        (1, 1, 1),
        (8, 0, 0),
    ]
    assert extra(costs, 8, 2, 0.5) == extra(costs, 8, 4, 4) == pytest.approx(1)


def test_more_drafts_take_no_less_and_fewer_no_more() -> None:
    costs = StepCosts(4, 20)
    costs.add_plain(8, 0.01)
    for _ in range(50):
        costs.add(8, 2, 2, 0.03)
    assert extra(costs, 8, 4, 4) >= extra(costs, 8, 2, 2) == pytest.approx(2, abs=0.1)
    for _ in range(50):
        costs.add(8, 4, 4, 0.0101)
    assert extra(costs, 8, 1, 1) <= extra(costs, 8, 4, 4) == pytest.approx(0.01, abs=0.01)


def test_what_is_not_known_is_guessed_or_as_in_the_nearest_crowd() -> None:
    costs = StepCosts(4, 20)
    assert costs.plain_seconds(8) is None and costs.add(8, 1, 1.0, 0.01) is None
    assert extra(costs, 20, 2, 2) - extra(costs, 20, 1, 1) == pytest.approx(0.5, abs=0.02)
    costs = learnt()
    assert costs.plain_seconds(16) == pytest.approx(0.01 * 36 / 28, rel=0.05)
    assert costs.is_known(15) and not costs.is_known(16)
    assert extra(costs, 16, 4, 4) == extra(costs, 8, 4, 4) < extra(costs, 64, 4, 4)
    costs.add_plain(32, 0.04)
    assert costs.plain_seconds(20) == pytest.approx(0.025, rel=0.02), "on a line between"


def test_a_step_that_was_held_up_says_little() -> None:
    costs = StepCosts(4, 256)
    costs.add_plain(8, 0.01)
    for _ in range(20):
        costs.add(8, 3, 3, 0.012)
    costs.add(8, 3, 3, 0.04)
    assert extra(costs, 8, 3, 3) < 0.3


def test_a_step_that_verifies_more_drafts_than_it_makes_says_nothing_of_others() -> None:
    costs = StepCosts(4, 20)
    costs.add_plain(8, 0.01)
    before = extra(costs, 8, 1, 1)
    assert costs.add(8, 1, 3, 0.014, is_usual=False) == pytest.approx(1.4)
    assert extra(costs, 8, 1, 1) == before


def test_a_proposer_takes_a_share_of_prompts() -> None:
    costs = StepCosts(4, 20, takes_passes=True)
    assert costs.prompts(5, 100) == pytest.approx(PROMPTS_SHARE * 4), "nothing is known"
    costs.add_plain(5, 0.1)
    costs.add_prompt(100, 1.0, is_followed=True)
    assert costs.prompts(5, 100) == pytest.approx(PROMPTS_SHARE * 10)
    costs.add_prompt(100, 0.9, is_followed=False)
    assert costs.prompts(5, 200) == pytest.approx(2)


def test_sizes_are_few() -> None:
    assert [size_of(n) for n in (1, 5, 7, 8, 9, 15, 17, 255, 256)] == [1, 5, 7, 8, 8, 14, 16, 224, 256]
