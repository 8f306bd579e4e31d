"""Sequences want as many drafts as are worth their tokens, and the others cost nothing."""

from __future__ import annotations

import numpy as np
import pytest

from pellucid.schedule.plan import StepPlan
from pellucid.schedule.step import Step
from pellucid.schedule.table import Table
from pellucid.spec.switch import Switch
from pellucid.spec.wants import Wants
from tests.schedule.device import Device, make_request, make_scheduler, step

MOST = 4


class Run:
    """Rows of which each draft stands with a chance of its own, in steps without a scheduler."""

    def __init__(self, chances: list[float], cheap_tokens: int = 256) -> None:
        self.chances, self.slots = np.array(chances), np.arange(len(chances))
        self.table = Table(len(chances), 16, 1 + MOST)
        self.wants = Wants(self.table, MOST, cheap_tokens)
        self.wants.switch = Switch(is_on=True)
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


@pytest.mark.parametrize(("chance", "wanted"), [(0.0, 0), (0.95, MOST)])
def test_a_new_sequence_goes_by_what_others_have_taught(chance: float, wanted: int) -> None:
    run = Run([chance] * 100)
    run.go(100)
    run.wants.begin(1)
    assert run.table.want[1] == wanted


def test_who_enters_while_drafts_lose_has_no_kv_of_the_drafters() -> None:
    """Unless there is enough for a trial, or a look is all."""
    table = Table(4, 16, 1 + MOST)
    wants = Wants(table, MOST, 20, keeps_kv=True)
    nobody = np.arange(0)
    for credit, is_looking, follows in ((1.0, False, 0), (3.5, False, 1), (1.0, True, 1)):
        wants.switch = Switch()
        wants.switch.credit, wants.switch.left = credit, int(is_looking)
        wants.begin(2)
        assert wants.num_propose(nobody, [2]) == follows
        assert wants.num_propose(nobody, []) == 0
    wants.switch = Switch(is_on=True)
    wants.begin(1)
    table.want[:] = 0
    assert wants.num_propose(np.array([1, 2]), []) == 1, "its KV stays whole"
    wants.switch = Switch()
    wants.switch.left = 0
    step = Step(0, 100)
    step.decodes = np.array([1, 2])
    wants.planned(step)
    wants.switch = Switch(is_on=True)
    wants.choose(step.decodes)
    assert not table.want.any() and wants.num_propose(step.decodes, []) == 0, "it is lost for good"


def plans_of(num_steps: int, accept: int) -> list[StepPlan]:
    """Of two requests that are long enough."""
    scheduler = make_scheduler(num_spec=MOST, max_model_len=400, num_blocks=300, cheap_tokens=20)
    scheduler.wants.switch = Switch(is_on=True)
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
