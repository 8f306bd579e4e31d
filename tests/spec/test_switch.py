"""An account says whether drafts are made at all: trials are short, and grow rare if they find nothing."""

from __future__ import annotations

import pytest

from pellucid.spec.switch import (
    FIRST,
    LOOK,
    MOST,
    MOST_AHEAD,
    MOST_LENT,
    PAYS_WITHIN,
    REST,
    SHARE,
    TRIAL,
    Switch,
)


def plain(switch: Switch, num_steps: int) -> int:
    """So many plain steps, or until drafts are wanted; how many there were."""
    for number in range(num_steps):
        if switch.is_on:
            return number
        switch.plain()
    return num_steps


def fail(switch: Switch) -> None:
    """A trial that costs half a step with each of its own, and finds nothing."""
    while switch.is_trying:
        switch.drafted(1.0, 1.5, 0.01, has_drafts=True)
    switch.give_up()


def test_first_is_a_look_then_a_trial() -> None:
    switch = Switch()
    assert not switch.may_try(0.5)
    assert plain(switch, 100) == LOOK and switch.may_try(0.5)
    switch.trial_steps = 5
    for _ in range(3):
        switch.drafted(1.0, 1.1, 0.01, has_drafts=False)  # the proposer alone
    for _ in range(5):
        assert switch.is_trying
        switch.drafted(2.0, 1.5, 0.01, has_drafts=True)
    assert switch.is_on and not switch.is_trying
    switch.keep()
    for _ in range(100):
        switch.drafted(2.0, 1.5, 0.01, has_drafts=True)
    assert switch.is_on and switch.credit == MOST
    assert switch.saved == pytest.approx(0.005 * 105 - 0.003)


def test_a_trial_waits_for_what_it_takes() -> None:
    switch = Switch()
    switch.may_try(3.0)
    assert plain(switch, 1000) == pytest.approx((3 - FIRST) / SHARE, abs=2)
    assert not switch.may_try(4.0) and not switch.is_on, "it has grown dearer, and is put off"
    assert plain(switch, 1000) == pytest.approx(1 / SHARE, abs=2) and switch.may_try(4.0)


def test_trials_that_find_nothing_do_not_follow_each_other_because_their_own_tokens_pay_for_them() -> None:
    switch = Switch()
    switch.give_up()
    switch.may_try(2.0)
    plain(switch, 100)
    while switch.is_trying:
        switch.drafted(1.5, 1.5, 0.01, has_drafts=True)
    switch.give_up()
    assert plain(switch, 1000) >= TRIAL / SHARE


def test_behind_a_trial_that_finds_nothing_are_plain_steps_also_if_the_account_is_full() -> None:
    switch = Switch()
    switch.give_up()
    switch.may_try(1.0)
    switch.credit, waits = MOST, list[int]()
    plain(switch, 10)
    for _ in range(3):
        fail(switch)
        waits.append(plain(switch, 100))
    assert waits == [2 * REST, 4 * REST, 4 * REST]


def test_an_empty_account_ends_drafts() -> None:
    """A trial may lose a little more, which is saved for before the next one."""
    switch = Switch(is_on=True)
    num_steps = 0
    while switch.is_on:
        switch.drafted(1.0, 1.5, 0.01, has_drafts=True)
        num_steps += 1
    assert num_steps == pytest.approx(FIRST / 0.49, abs=1)
    switch.may_try(0.5)
    debt = -switch.credit
    assert plain(switch, 10_000) == pytest.approx((0.5 + debt) / SHARE, abs=2)
    switch.trial_steps = 100
    while switch.is_on:
        switch.drafted(1.0, 1.1, 0.01, has_drafts=True)
    assert switch.credit == pytest.approx(-TRIAL, abs=0.1)


def test_what_is_too_dear_is_saved_for() -> None:
    switch = Switch(is_on=True)
    switch.give_up()
    assert switch.may_follow(FIRST - TRIAL, 1.0) and not switch.may_follow(2 * MOST, 1.0)
    switch.passed(10 * MOST / SHARE)
    assert switch.may_follow(2 * MOST, 1.0)


def test_prompts_are_followed_at_first_if_drafts_may_soon_pay_for_it() -> None:
    switch = Switch()
    assert switch.may_follow(0.5 * PAYS_WITHIN, 1.6) and not switch.may_follow(0.5 * PAYS_WITHIN, 1.4)


def test_trials_that_find_nothing_grow_rare_until_others_run() -> None:
    switch = Switch()
    switch.may_try(2.0)
    plain(switch, 100)
    fail(switch)
    waits = list[int]()
    for _ in range(5):
        waits.append(plain(switch, 100_000))
        fail(switch)
    assert waits[1:] == sorted(waits[1:]) and waits[-1] > 3 * waits[0]
    for _ in range(4):
        switch.entered(8)
    assert plain(switch, 100_000) < waits[-1] / 3


def test_what_a_drafter_takes_of_prompts_is_lent_until_drafts_pay_or_do_not() -> None:
    switch = Switch(is_on=True)
    switch.followed(1.0)
    assert switch.credit == FIRST and not switch.may_follow(0.1, 1.03)
    assert switch.may_follow(0.1, 1.04), "drafts may soon pay for both"
    switch.drafted(2.5, 1.3, 0.01, has_drafts=True)
    assert switch.may_follow(0.1, 1.0), "it has been paid for"
    switch.followed(1.2)
    switch.give_up()
    assert switch.credit == pytest.approx(FIRST + SHARE + 1.2 - 1.0)
    before = switch.credit
    switch.followed(0.5)
    assert switch.credit == before - 0.5, "it is known, and paid at once"


def test_no_more_is_lent_for_prompts_than_drafts_may_yet_pay_for() -> None:
    switch = Switch(is_on=True)
    for _ in range(1000):
        switch.drafted(2.5, 1.3, 0.01, has_drafts=True)
    switch.followed(MOST_AHEAD + MOST_LENT)
    assert switch.is_on, "of what was gained so much counts"
    switch.followed(1.0, gained=1.0)
    assert switch.is_on
    switch.followed(1.0)
    assert not switch.is_on and switch.credit == -MOST
    switch.credit = TRIAL
    switch.plain()
    assert switch.is_on and switch.is_resting
    switch.followed(0.5, gained=-0.6)
    assert not switch.is_on, "a trial whose account is empty ends beside prompts, too"


def test_what_plain_steps_take_is_looked_at_now_and_then() -> None:
    switch, num_steps = Switch(is_on=True), 0
    while not switch.is_stale(1.5):
        switch.drafted(2.0, 1.3, 0.01, has_drafts=True)
        num_steps += 1
    assert num_steps == LOOK * 100, "a plain step at half the speed is half a hundredth of so many"
    switch.look()
    assert switch.is_looking and not switch.is_on
    assert plain(switch, 100) == LOOK and not switch.is_trying, "what is known is known"


def test_what_is_lent_is_taken_back_and_a_certain_start_is_no_trial() -> None:
    for least in (0.5, 8.0, 12.0):
        switch = Switch()
        switch.left, switch.credit, switch.trial_steps = 0, 0.0, 1  # a trial that has grown too dear
        switch.begin(least)
        assert switch.is_on and not switch.is_trying
        assert switch.credit == least
        for _ in range(50):
            switch.drafted(2.0, 1.5, 0.01, has_drafts=True)
        switch.give_up()
        assert switch.credit > 10, "by then it was its own"
    switch = Switch()
    switch.left, switch.credit = 0, 0.0
    switch.begin(12.0)
    for _ in range(3):
        switch.drafted(1.0, 3.0, 0.01, has_drafts=True)
    assert switch.is_on, "what is lent is there to be lost"
    switch.give_up()
    assert switch.credit < -5.5 and not switch.may_borrow
