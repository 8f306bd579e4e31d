"""What steps take is learnt from the clock, in parts."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pellucid.spec.costs import PROMPTS_SHARE, StepCosts, size_of

PARTS = 0.3, 0.2, 0.1  # of a plain step: at all, each further pass, each draft of a row


def learnt(num_rows: int = 8, noise: float = 0.03) -> StepCosts:
    costs, clock = StepCosts(20, takes_passes=True), random.Random(1)
    for number in range(200):
        costs.add_plain(num_rows, 0.01 * clock.gauss(1, noise) * (10 if number % 50 == 7 else 1))
        passes = clock.randint(1, 4)
        drafts = clock.uniform(0, passes)
        took = 1 + np.dot(PARTS, (1, passes - 1, drafts)) + clock.gauss(0, noise)
        costs.add(num_rows, passes, drafts, 0.01 * took * (10 if number % 50 == 9 else 1))
    return costs


def test_parts_are_told_apart() -> None:
    costs = learnt()
    assert costs.plain_seconds(8) == pytest.approx(0.01, rel=0.03)
    assert costs.extra(8, np.array([1, 4]), np.array([1, 3])) == pytest.approx([0.4, 1.2], abs=0.1)
    assert list(costs.surprise(8, np.array([4, 5]))) == pytest.approx([0, 8 / 28]), "four have been seen"


@pytest.mark.parametrize("passes,drafts", [(1, 1.0), (4, 4.0), (1, 0.5)])
def test_steps_that_are_all_alike_tell_their_sum(passes: int, drafts: float) -> None:
    """However many: of which part it is only the guess says anything."""
    costs = StepCosts(20, takes_passes=True)
    for _ in range(5000):
        costs.add_plain(8, 0.01)
        costs.add(8, passes, drafts, 0.015)
        parts = costs.parts(8)  # at each step, as it is asked for
    assert costs.extra(8, np.array([passes]), np.array([drafts])) == pytest.approx([0.5], abs=0.01)
    assert parts.max() < 1, parts


def test_what_is_not_known_is_guessed_or_as_in_the_nearest_crowd() -> None:
    costs = StepCosts(20)
    assert costs.plain_seconds(8) is None and costs.add(8, 1, 1.0, 0.01) is None
    assert costs.parts(20)[2] == pytest.approx(0.5)
    costs = learnt()
    assert costs.plain_seconds(16) == pytest.approx(0.01 * 36 / 28, rel=0.03)
    assert costs.is_known(15) and not costs.is_known(16)
    assert costs.parts(16) == pytest.approx(costs.parts(8) * (1, 1, 16 / 36 / (8 / 28)))
    costs.add_plain(32, 0.04)
    assert costs.plain_seconds(20) == pytest.approx(0.025, rel=0.02), "on a line between"


def test_what_lies_on_no_line_is_learnt_by_passes_of_steps_in_which_most_rows_have_so_many_drafts() -> None:
    """As of recorded steps, whose shapes are few."""
    took = {1: 1.2, 2: 1.3, 3: 2.5, 4: 2.6}  # plain steps
    costs = StepCosts(20)
    for _ in range(50):
        costs.add_plain(8, 0.01)
        for passes, steps in took.items():
            costs.add(8, passes, passes, 0.01 * steps)
            costs.add(8, passes, passes / 8, 0.011)
    passes = np.array(list(took))
    assert costs.extra(8, passes, passes) == pytest.approx([steps - 1 for steps in took.values()], abs=0.08)


def test_numbers_of_passes_that_have_not_been_seen_are_worth_a_try() -> None:
    """Fewer may take their share of what is known, and more no longer: as recorded steps of their own."""
    costs, passes = StepCosts(20), np.arange(1.0, 5)
    costs.add_plain(8, 0.01)
    dear = np.full(4, 3.0)
    assert (costs.hoped(8, passes, dear) == dear).all()
    for _ in range(10):
        costs.add(8, 2, 2, 0.016)
    assert costs.extra(8, passes, passes)[:2] == pytest.approx([0.3, 0.6], abs=0.05)
    assert costs.hoped(8, passes, dear) == pytest.approx([3.0, 3.0, 0.6, 0.6], abs=0.05)
    for _ in range(10):
        costs.add(8, 4, 4, 0.03)
        costs.add(8, 1, 1, 0.015)
    assert costs.hoped(8, passes, dear)[3] == 3.0
    assert costs.extra(8, passes, passes)[0] == pytest.approx(0.5, abs=0.05), "it has been tried"


def test_a_step_that_was_held_up_says_little_of_its_passes() -> None:
    costs, three = StepCosts(256), np.array([3.0])
    for _ in range(20):
        costs.add_plain(8, 0.01)
        costs.add(8, 2, 2, 0.012)
    costs.add(8, 3, 3, 0.04)
    assert costs.extra(8, three, three) < 0.6


def test_a_step_that_verifies_more_drafts_than_it_makes_says_nothing_of_others() -> None:
    costs, one = StepCosts(20), np.array([1.0])
    costs.add_plain(8, 0.01)
    before = costs.extra(8, one, one)
    assert costs.add(8, 1, 3, 0.014, is_usual=False) == pytest.approx(1.4)
    assert costs.extra(8, one, one) == before


def test_a_proposer_takes_a_share_of_prompts() -> None:
    costs = StepCosts(20, takes_passes=True)
    assert costs.prompts(5, 100) == pytest.approx(PROMPTS_SHARE * 4), "nothing is known"
    costs.add_plain(5, 0.1)
    costs.add_prompt(100, 1.0, is_followed=True)
    assert costs.prompts(5, 100) == pytest.approx(PROMPTS_SHARE * 10)
    costs.add_prompt(100, 0.9, is_followed=False)
    assert costs.prompts(5, 200) == pytest.approx(2)


def test_sizes_are_few() -> None:
    assert [size_of(n) for n in (1, 5, 7, 8, 9, 15, 17, 255, 256)] == [1, 5, 7, 8, 8, 14, 16, 224, 256]
