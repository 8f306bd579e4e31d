"""Sequences want as many drafts as are worth their tokens, and the others cost nothing."""

from __future__ import annotations

import numpy as np
import pytest

from pellucid.schedule.plan import StepPlan
from pellucid.schedule.table import Table
from pellucid.spec.wants import Wants
from tests.schedule.device import Device, make_request, make_scheduler, step

MOST = 4


class Run:
    """Rows of which each draft stands with a chance of its own, in steps without a scheduler."""

    def __init__(self, chances: list[float], cheap_tokens: int = 256) -> None:
        self.chances, self.slots = np.array(chances), np.arange(len(chances))
        self.table = Table(len(chances), 16, 1 + MOST)
        self.wants = Wants(self.table, MOST, cheap_tokens)
        for slot in self.slots.tolist():
            self.wants.begin(slot)
        self.rng = np.random.default_rng(0)

    def go(self, num_steps: int) -> np.ndarray:
        """[steps, rows]: the drafts that were verified."""
        drafts: list[np.ndarray] = []
        for number in range(1, 1 + num_steps):
            draft = self.table.want[self.slots]
            stands = self.rng.random((len(self.slots), MOST)) < self.chances[:, None]
            stands &= np.arange(MOST) < draft[:, None]
            self.wants.learn(self.slots, draft, 1 + stands.cumprod(axis=1).sum(axis=1).astype(np.int32))
            drafts.append(draft)
            if number % 8 == 0:
                self.wants.choose(self.slots)
        return np.array(drafts)


@pytest.mark.parametrize("num_rows", [1, 64, 256])
def test_drafts_that_never_stand_are_tried_now_and_then(num_rows: int) -> None:
    drafts = Run([0.0] * num_rows).go(2000)
    assert not drafts[64:80].any(), "the first ones are not given up"
    later = drafts[400:]
    assert (later.max(axis=0) > 0).all(), "never tried again"
    assert later.mean() < 0.25 and later.max() <= 2


@pytest.mark.parametrize("num_rows", [1, 64])
def test_drafts_that_mostly_stand_are_all_wanted(num_rows: int) -> None:
    drafts = Run([0.9] * num_rows).go(1000)
    assert drafts.mean() > 0.9 * MOST


def test_each_sequence_has_its_own_rate_and_a_crowd_wants_less() -> None:
    few = Run([0.9, 0.5, 0.0]).go(600)[100:].mean(axis=0)
    crowd = Run([0.9, 0.5, 0.0] * 100).go(600)[100:].reshape(500, 100, 3).mean(axis=(0, 1))
    assert few[0] > few[1] > few[2] and crowd[0] > crowd[1] > crowd[2]
    assert (crowd < few).all()


def test_whose_drafts_stand_again_wants_them_again() -> None:
    run = Run([0.0] * 8)
    run.go(400)
    run.chances[:] = 0.9
    assert run.go(600)[-100:].mean() > 0.75 * MOST


def test_without_a_price_all_are_always_wanted() -> None:
    assert (Run([0.0] * 8, cheap_tokens=0).go(100) == MOST).all()


def test_a_new_sequence_knows_nothing_of_the_one_before_it() -> None:
    run = Run([0.0, 0.0])
    run.go(100)
    assert not run.table.want[:2].any()
    run.wants.begin(1)
    run.wants.choose(run.slots)
    assert run.table.want[:2].tolist() == [0, MOST]


def plans_of(num_steps: int, accept: int) -> list[StepPlan]:
    """Of two requests that are long enough."""
    scheduler = make_scheduler(num_spec=MOST, max_model_len=400, num_blocks=300, cheap_tokens=20)
    for name in "ab":
        scheduler.add(make_request(name, 5, max_tokens=390))
    device = Device(accept=accept)
    return [step(scheduler, device)[0] for _ in range(num_steps)]


def test_a_step_in_which_nobody_wants_drafts_is_a_plain_one() -> None:
    plans = plans_of(60, accept=0)
    assert plans[0].num_propose == plans[4].num_propose == MOST
    assert plans[4].rows.num_draft is not None
    assert plans[-1].num_propose == 0
    assert plans[-1].rows.num_query is None and plans[-1].rows.num_draft is None


def test_whose_drafts_all_stand_goes_on_with_all_of_them() -> None:
    plan = plans_of(60, accept=MOST)[-1]
    assert plan.num_propose == MOST and [row.num_draft for row in plan.rows] == [MOST, MOST]
