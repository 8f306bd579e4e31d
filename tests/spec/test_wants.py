"""Sequences want as many drafts as are worth their tokens, and the others cost nothing."""

from __future__ import annotations

import numpy as np
import pytest

from pellucid.schedule.plan import StepPlan
from pellucid.schedule.step import Step
from pellucid.schedule.table import Table
from pellucid.spec.drafter import Drafter
from pellucid.spec.switch import Switch
from pellucid.spec.wants import TRIAL_ROWS, Wants
from tests.schedule.device import Device, make_request, make_scheduler, step
from tests.spec.runs import MOST, Machine, tokens_a_second

MACHINES = {
    "a head on a CPU": Machine(20, 0.3, 0.2, prompt=0.12, keeps_kv=True),
    "text on a CPU": Machine(20, 0.05, 0.0),
    "a head on a GPU": Machine(160, 0.06, 0.045, prompt=0.04, keeps_kv=True, noise=0.03),
    "text on a GPU": Machine(160, 0.02, 0.0, noise=0.03),
}


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("num_rows", [1, 8, 64])
@pytest.mark.parametrize(
    "chances", [[0.0] * 8, [0.9] * 8, [0.0] * 4 + [0.9] * 4], ids=["bad", "good", "both"]
)
def test_drafts_are_never_slower_than_none_and_nearly_as_fast_as_the_best_number(
    machine: Machine, num_rows: int, chances: list[float]
) -> None:
    off = tokens_a_second(machine, chances, num_rows, fixed=0)
    best = max(tokens_a_second(machine, chances, num_rows, fixed=num) for num in (1, MOST))
    speed = tokens_a_second(machine, chances, num_rows)
    assert speed > 0.97 * off and speed > 0.94 * best, (speed / off, speed / best)


class Run:
    """Rows of which each draft stands with a chance of its own, in steps that take no time."""

    def __init__(self, chances: list[float], cheap_tokens: int = 256) -> None:
        self.chances, self.slots = np.array(chances), np.arange(len(chances))
        self.table = Table(len(chances), 16, 1 + MOST)
        self.wants = Wants(self.table, MOST, cheap_tokens)
        self.wants.switch = Switch(is_on=True)
        self.wants.costs.add_plain(len(chances), 0.01)
        self.wants.costs.add(len(chances), MOST, 1.0, 0.0105)
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


@pytest.mark.parametrize("num_rows", [1, 64])
def test_drafts_that_mostly_stand_are_all_wanted(num_rows: int) -> None:
    drafts = Run([0.9] * num_rows).go(1000)
    assert drafts.mean() > 0.9 * MOST


@pytest.mark.parametrize("num_rows", [1, 64])
def test_drafts_that_never_stand_are_given_up(num_rows: int) -> None:
    run = Run([0.0] * num_rows)
    assert not run.go(100)[80:].any() and not run.wants.switch.is_on


def test_each_sequence_has_its_own_rate() -> None:
    drafts = Run([0.95, 0.6, 0.0] * 4).go(600)[100:].reshape(500, 4, 3).mean(axis=(0, 1))
    assert drafts[0] > drafts[1] > drafts[2]


def test_without_a_price_all_are_always_wanted() -> None:
    assert (Run([0.0] * 8, cheap_tokens=0).go(100) == MOST).all()


def test_in_a_trial_few_rows_have_one_draft_each() -> None:
    run = Run([0.5] * 64)
    run.wants.switch = Switch()
    while not run.wants.switch.is_trying:
        run.wants.switch.plain()
    run.wants.choose(run.slots)
    assert run.table.want.max() == 1 and run.table.want.sum() == TRIAL_ROWS


def test_a_new_sequence_goes_by_what_others_have_taught() -> None:
    run = Run([0.95] * 100)
    run.go(100)
    run.wants.begin(1)
    assert run.table.want[1] == MOST


def test_who_enters_while_drafts_lose_has_no_kv_of_the_drafters() -> None:
    """Unless there is enough for a trial, or a look is all."""
    table = Table(4, 16, 1 + MOST)
    wants = Wants(table, MOST, 20, drafter=Drafter.KEEPS_KV)
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
    scheduler.wants.costs.add_plain(2, 0.01)
    scheduler.wants.costs.add(2, MOST, 1.0, 0.0105)
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
