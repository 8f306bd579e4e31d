"""Sequences want as many drafts as are worth their tokens, and the others cost nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pellucid.schedule.plan import StepPlan
from pellucid.schedule.step import Step
from pellucid.schedule.table import Table
from pellucid.spec.costs import StepCosts
from pellucid.spec.drafter import Drafter, Timed, Timings
from pellucid.spec.switch import Switch
from pellucid.spec.wants import TRIAL_ROWS, Wants
from tests.schedule.device import Device, make_request, make_scheduler, step
from tests.spec.runs import MACHINES, Rates, Run, Work, compare, constant, mixed, never_slower, turns

MOST = 4
# Beside it: rows, tokens of an answer, least throughput of none, of the best number.
CASES = {
    "a head, good": ("eagle3", constant(0.8), ((1, 96),), 2.0, 0.95),
    "a head, good for many": ("eagle3", constant(0.8), ((8, 96), (64, 96)), 1.25, 0.93),
    "a head, middling": ("eagle3", constant(0.5), ((1, 768),), 1.1, 0.95),
    # Whose recorded steps make one pass or all; those of the best number make as many as it is.
    "a head, best with two drafts": ("eagle3", constant(0.5), ((32, 96),), 1.1, 0.93),
    "a head, bad": ("eagle3", constant(0.2), ((1, 96), (64, 96), (256, 96)), 0.98, 0.95),
    "a head, by turns": ("eagle3", turns(32, 0.8, 0.5, 0.2), ((1, 768), (8, 96), (256, 96)), 0.98, 0.95),
    "a head, long turns": ("eagle3", turns(96, 0.9, 0.1), ((1, 768),), 1.25, 0.95),
    "a head, of rows that differ": ("eagle3", mixed(0.9, 0.5, 0.0), ((8, 96), (32, 96)), 0.93, 0.93),
    "a head on a CPU, bad": ("eagle3 on a CPU", constant(0.0), ((1, 96), (8, 96)), 0.98, 0.95),
    "a head on a CPU, middling": ("eagle3 on a CPU", constant(0.7), ((1, 768),), 1.1, 0.95),
    "a head on a CPU, too dear": ("eagle3 on a CPU", constant(0.8), ((256, 96),), 1.0, 0.95),
    # Which would pay if all drafts stood: that is worth a trial.
    "a head on a CPU, dear": ("eagle3 on a CPU", constant(0.8), ((64, 96),), 0.98, 0.95),
    "a head on Zen 5, good": ("eagle3 on Zen 5", constant(0.9), ((1, 768),), 1.22, 0.94),
    "a head on Zen 5, bad": ("eagle3 on Zen 5", constant(0.0), ((1, 768), (64, 96)), 0.98, 0.95),
    "finished texts on Zen 5, good": ("suffix on Zen 5", constant(0.8), ((1, 96), (8, 96)), 1.05, 0.94),
    "small networks on a CPU, bad": ("medusa on a CPU", constant(0.2), ((8, 96), (64, 96)), 0.98, 0.95),
    "small networks on a CPU, good": ("medusa on a CPU", constant(0.8), ((1, 96),), 1.6, 0.95),
    "finished texts on a CPU, bad": ("suffix on a CPU", constant(0.0), ((1, 96), (8, 96)), 0.98, 0.95),
    "a small model, best with three": ("draft model", constant(0.8), ((8, 96),), 1.45, 0.92),
    "a block, good": ("dflash", constant(0.9), ((1, 768),), 5.0, 0.93),
    "finished texts, good": ("suffix", constant(0.8), ((1, 768), (8, 96)), 2.5, 0.9),
    "finished texts, bad": ("suffix", constant(0.0), ((1, 96), (64, 96)), 0.98, 0.95),
    "finished texts, long turns": ("suffix", turns(96, 0.9, 0.1), ((1, 768),), 1.5, 0.9),
}


@pytest.mark.parametrize(
    "machine,rates,rows,answer,of_off,of_best",
    [
        pytest.param(machine, rates, rows, answer, of_off, of_best, id=f"{name}, {rows} rows")
        for name, (machine, rates, sizes, of_off, of_best) in CASES.items()
        for rows, answer in sizes
    ],
)
def test_drafts_are_never_slower_than_none_and_nearly_as_fast_as_the_best_number(
    machine: str, rates: Rates, rows: int, answer: int, of_off: float, of_best: float
) -> None:
    """Whole runs; short answers in three waves, so that what one has taught is there in the next."""
    work = Work(rows=rows, answer=answer, rates=(rates,) * (3 if answer < 200 else 1))
    ratios = compare(MACHINES[machine], work)
    assert ratios.of_off >= of_off and ratios.of_best >= of_best, ratios


@pytest.mark.parametrize("rows", [(32,), (64,), (32, 256)])
def test_engines_that_live_on_lose_at_most_a_fiftieth_and_follow_rates_that_change(
    rows: tuple[int, ...],
) -> None:
    for task, ratios in never_slower(MACHINES["eagle3"], rows).items():
        assert not ratios.falls_short, (task, ratios)


def test_a_wave_of_bad_drafts_behind_good_ones_is_not_spent_on_trials() -> None:
    """Though the account is full, and it begins as those before it did: on the mean of some runs."""
    work = Work(rows=8, answer=128, rates=(constant(0.9), constant(0.9), constant(0.3)))
    machine = MACHINES["medusa on a CPU"]
    seeds = range(4)
    waves = [[Run(machine, work, fixed=num, seed=seed).waves[2] for seed in seeds] for num in (None, 0)]
    assert np.mean(np.divide(*waves)) > 0.9


def test_one_draft_of_each_row_is_found_to_be_the_best_number() -> None:
    """Which has steps of its own, and which a trial of more has not shown."""
    work = Work(rows=64, answer=192, rates=(constant(0.8), constant(0.5)))
    fixed = Run(MACHINES["eagle3"], work, fixed=3).waves
    assert Run(MACHINES["eagle3"], work).waves[1] > 1.05 * fixed[1]


@pytest.mark.parametrize(
    "machine,rate,rows,prompt,of_off",
    [
        ("eagle3", 0.8, 1, 4000, 1.65),
        ("eagle3", 0.8, 32, 512, 1.2),
        ("eagle3", 0.0, 8, 4000, 0.98),
        ("draft model", 0.8, 8, 512, 1.25),
        ("eagle3 on a CPU", 0.8, 1, 512, 1.2),
        ("eagle3 on a CPU", 0.0, 8, 512, 0.97),  # of which a hundredth is what the drafter takes of prompts
    ],
)
def test_prompts_of_any_length_are_followed_where_drafts_pay_for_that(
    machine: str, rate: float, rows: int, prompt: int, of_off: float
) -> None:
    work = Work(rows=rows, prompt=prompt, rates=(constant(rate),) * 3)
    assert compare(MACHINES[machine], work).of_off >= of_off


@pytest.mark.parametrize(
    "prompt,answers,budget",
    [
        pytest.param(2000, (3, 3, 3, 96, 96), 16384, id="answers too short to pay for prompts, first"),
        pytest.param(8000, (12, 96), 512, id="prompts in parts, which drafts have not yet paid for"),
    ],
)
def test_drafts_come_back_that_have_not_yet_paid_for_prompts(
    prompt: int, answers: tuple[int, ...], budget: int
) -> None:
    work = Work(
        rows=1,
        prompt=prompt,
        answer=max(answers),
        answers=answers,
        budget=budget,
        rates=(constant(0.8),) * len(answers),
    )
    machine = MACHINES["eagle3"]
    assert Run(machine, work).waves[-1] > 1.4 * Run(machine, work, fixed=0).waves[-1]


def test_a_drafter_no_longer_follows_prompts_whose_answers_are_too_short_to_pay() -> None:
    """Also where each step has prompts and some row has drafts, so that no step with drafts alone tells."""
    answers = (96, 4, 4, 4)
    work = Work(rows=4, requests=64, prompt=1000, answer=96, answers=answers, budget=512)
    work = replace(work, rates=(constant(0.8),) * len(answers))
    machine = MACHINES["draft model"]
    waves, off = Run(machine, work).waves, Run(machine, work, fixed=0).waves
    assert waves[0] > 1.3 * off[0] and waves[-1] > 0.97 * off[-1]


def test_rows_of_all_kinds_behind_a_queue_are_faster_together() -> None:
    work = Work(rows=8, answer=96, requests=34, rates=(mixed(0.9, 0.5, 0.0),))
    assert compare(MACHINES["eagle3"], work).of_off > 1.2


@pytest.mark.parametrize(
    "machine,rate,prompt,least,most",
    [
        ("eagle3", 0.8, 1000, 0.8, 1.2),
        ("eagle3 on a CPU", 0.0, 1000, 0.7, 1.4),
        ("suffix", 0.0, 64, 0.8, 1.2),
    ],
)
def test_what_drafts_are_said_to_have_saved_is_what_answers_without_them_take_longer(
    machine: str, rate: float, prompt: int, least: float, most: float
) -> None:
    """Or have cost, with what a drafter takes of prompts."""
    work = Work(rows=8, prompt=prompt, answer=96, rates=(constant(rate),) * 3)
    steady = replace(MACHINES[machine], noise=0.0, held_up=0.0)
    run, off = Run(steady, work), Run(steady, work, fixed=0)
    saved = sum(work.rows * work.answer * (1 / a - 1 / b) for a, b in zip(off.waves, run.waves, strict=True))
    assert least < run.scheduler.wants.switch.saved / saved < most


class Steps:
    """Rows of which each draft stands with a chance of its own, in steps that take no time."""

    def __init__(
        self,
        chances: list[float],
        cheap_tokens: int = 256,
        *,
        tree_depth: int = 0,
        drafter: Drafter = Drafter.STATELESS,
    ) -> None:
        self.chances, self.slots = np.array(chances), np.arange(len(chances))
        self.table = Table(len(chances), 16, 1 + MOST)
        self.wants = Wants(self.table, MOST, cheap_tokens, tree_depth=tree_depth, drafter=drafter)
        self.wants.switch = Switch(is_on=True)
        self.wants.costs.add_plain(len(chances), 0.01)
        for _ in range(8):
            self.wants.costs.add(len(chances), MOST, MOST, 0.0105)
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
    drafts = Steps([0.9] * num_rows).go(1000)
    assert drafts.mean() > 0.9 * MOST


@pytest.mark.parametrize("num_rows", [1, 64])
def test_drafts_that_never_stand_are_given_up(num_rows: int) -> None:
    run = Steps([0.0] * num_rows)
    assert not run.go(100)[80:].any() and not run.wants.switch.is_on


def test_drafts_of_a_tree_are_worth_less_than_those_of_a_chain() -> None:
    """In a tree of depth 2 the third and the fourth add little to the first two."""
    wanted = list[float]()
    for depth in (0, 2):
        run = Steps([0.8] * 64, tree_depth=depth)
        for num in (1, 2, 3, MOST) * 50:
            run.wants.costs.add(64, num, num, 0.01 * (1 + 0.3 * num))
        run.wants.choose(run.slots)
        wanted.append(float(run.table.want[run.slots].mean()))
    assert wanted[0] > wanted[1] > 0


def test_each_sequence_has_its_own_rate() -> None:
    drafts = Steps([0.95, 0.6, 0.0] * 4).go(600)[100:].reshape(500, 4, 3).mean(axis=(0, 1))
    assert drafts[0] > drafts[1] > drafts[2]


def test_rows_that_differ_teach_each_other_less() -> None:
    """Half of them never have a draft that stands: a few verifications tell, as all is alike in each half.

    Behind a queue, where these do not hold the others back.
    """
    alike, different = Steps([0.5] * 16), Steps([1.0, 0.0] * 8)
    for run in (alike, different):
        steps = tuple(Timed(16, num, num, 0.01 + 0.002 * num) for num in range(1 + MOST))
        run.wants.costs = StepCosts(MOST, 256, Timings(steps=steps))
        run.wants.choose(run.slots, waits=True)
        run.go(16)
    assert different.table.want[0:16:2].min() > 0 and not different.table.want[1:16:2].any()
    assert alike.table.want[:16].min() > 0


def test_where_nobody_waits_it_counts_how_soon_all_answers_end() -> None:
    """Drafts that help one row of four, and delay the others, are for those behind a queue."""
    for waits in (False, True):
        run = Steps([1.0, 0.0, 0.0, 0.0])
        steps = Timed(4, 0, 0, 0.01), Timed(4, 1, 1, 0.015), Timed(4, MOST, MOST, 0.015)
        run.wants.costs = StepCosts(MOST, 256, Timings(steps=steps))
        slots = run.slots
        for _ in range(8):
            run.wants.learn(slots, np.full(4, MOST), np.array([1 + MOST, 1, 1, 1], dtype=np.int32))
        run.wants.choose(slots, waits=waits)
        assert run.wants.switch.is_on == (run.table.want[0] > 0) == waits


def test_who_has_no_drafts_and_wants_none_rests() -> None:
    run = Steps([0.5] * 4)
    wants, step = run.wants, Step(0, 100)
    step.decodes, wants.switch = run.slots, Switch()
    wants.switch.left = 0
    run.table.want[:] = 0
    wants.planned(step)
    assert wants.rests(step)
    wants.begin(2)
    assert not wants.rests(step), "somebody new may want some"
    wants.planned(step)
    wants.switch.begin()
    assert not wants.rests(step)


def test_who_runs_in_any_plan_that_rests_has_no_kv_of_the_drafters() -> None:
    """And where nobody has any a trial waits for others, which is rest, too, until one enters."""
    run = Steps([0.5] * 4, drafter=Drafter.KEEPS_KV)
    wants, step = run.wants, Step(0, 100)
    wants.switch = Switch()
    wants.switch.left, run.table.want[:] = 0, 0
    step.decodes = run.slots
    wants.planned(step)
    for slots in (run.slots[:2], run.slots[2:]):
        step.decodes = slots
        assert wants.rests(step)
        wants.planned(step)
    for _ in range(100):
        wants.switch.plain()
    assert wants.switch.is_trying
    wants.choose(run.slots)
    assert not wants.rests(step) and not run.table.want.any(), "nobody can take part"
    wants.planned(step)
    assert wants.rests(step)
    wants.begin(2)
    assert not wants.rests(step)


def test_without_a_price_all_are_always_wanted() -> None:
    assert (Steps([0.0] * 8, cheap_tokens=0).go(100) == MOST).all()


def test_in_a_trial_few_rows_have_few_drafts_until_enough_are_under_way() -> None:
    run = Steps([0.5] * 64)
    run.wants.costs = StepCosts(MOST, 256)
    wants, want, decodes = run.wants, run.table.want, Step(0, 100)
    decodes.decodes = run.slots
    wants.switch = Switch()
    wants.choose(run.slots)
    while not wants.switch.is_trying:
        wants.switch.plain()
    wants.choose(run.slots)
    num = int(want.max())
    assert want.sum() == TRIAL_ROWS * num and num < MOST
    for left in reversed(range(wants.switch.trial_steps)):
        assert want.any()
        wants.planned(decodes)
        assert bool(want.any()) == (left > 0)


def test_no_more_is_at_risk_than_the_account_has() -> None:
    run = Steps([0.95] * 64)
    run.go(50)
    assert run.table.want[run.slots].min() == MOST
    for num in (1, 2, 3, MOST) * 50:
        run.wants.costs.add(64, num, num, 0.01 * (1 + 0.25 * num))
    run.wants.switch.credit = 0.1
    run.wants.choose(run.slots)
    assert 0.5 < run.table.want[run.slots].mean() <= 1
    run.wants.switch.credit = 4.0
    run.wants.choose(run.slots)
    assert run.table.want[run.slots].mean() > 3


def test_where_nobody_waits_the_row_that_is_helped_least_counts_by_half() -> None:
    run = Steps([0.5] * 4)
    wants, first, last = run.wants, np.array([4, 4, 4, 1]), np.array([1, 4, 4, 4])
    wants.costs.add_plain(1, 0.01)  # a step of one row takes as long
    assert wants._lost(run.slots, first, 2.0) == pytest.approx((1.25 - -1) / 2)
    assert wants._lost(run.slots, last, 2.0) == pytest.approx((1.25 - 2) / 2), "it has caught up"
    assert wants._lost(run.slots, None, 1.5) == 0.0, "all are as far behind"
    for slot in run.slots.tolist():
        wants.begin(slot)
    for _ in range(20):
        wants.costs.add_plain(1, 0.0025)  # a quarter
    assert wants._lost(run.slots, first, 2.0) == pytest.approx((1.25 - -1) / 8)
    wants.choose(run.slots, waits=True)
    assert wants._lost(run.slots, first, 2.0) == 0.0


def test_a_trial_that_has_waited_for_somebody_begins_as_soon_as_there_is_one() -> None:
    run = Steps([0.5] * 4)
    wants, step = run.wants, Step(0, 100)
    wants.switch = Switch()
    wants.choose(run.slots[:0])
    while not wants.switch.is_trying:
        wants.switch.plain()
    wants.choose(run.slots[:0])
    step.decodes, step.num_propose = run.slots, 1
    wants.planned(step)
    wants.took(0.01)
    wants.landed(np.arange(4), None)
    assert wants.has_switched
    wants.choose(run.slots)
    assert run.table.want[run.slots].all()


def test_a_new_sequence_goes_by_what_others_have_taught() -> None:
    run = Steps([0.95] * 100)
    run.go(100)
    run.wants.begin(1)
    assert run.table.want[1] == MOST


def test_who_enters_while_drafts_lose_has_no_kv_of_the_drafters() -> None:
    """Unless there is enough for a trial and for the prompt, or nothing is known of drafts."""
    table = Table(4, 1016, 1 + MOST)
    wants = Wants(table, MOST, 20, drafter=Drafter.KEEPS_KV)
    nobody = np.arange(0)
    for credit, is_known, num_tokens, follows in (
        (0.0, True, 5, 0), (2.0, True, 5, 1), (2.0, True, 1000, 0),
        (0.0, False, 5, 1), (0.0, False, 1000, 1),
    ):  # fmt: skip
        wants.switch = Switch()
        if is_known:
            wants.switch.begin()
            wants.switch.give_up()
        wants.switch.credit, wants.switch.left = credit, 0
        table.known[2] = num_tokens
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
    for _ in range(8):
        scheduler.wants.costs.add(2, MOST, MOST, 0.0105)
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
