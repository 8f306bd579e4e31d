"""What counts where nobody waits: how soon the last answer ends, and what of a step's time rows take."""

from __future__ import annotations

import numpy as np
import pytest

from pellucid.spec.costs import StepCosts
from pellucid.spec.drafter import Timed, Timings
from pellucid.spec.worth import best_of

ROWS, MOST = 64, 4


def costs_of(one: float, all: float) -> StepCosts:
    """Of steps that take so many seconds for one row and for all; any drafts take half as long again."""
    took = {1: one, ROWS: all}
    plain = [Timed(rows, 0, 0, took[rows]) for rows in took]
    drafts = [Timed(rows, num, MOST, 1.5 * took[rows]) for rows in took for num in range(1 + MOST)]
    return StepCosts(MOST, 100, Timings(is_padded=True, steps=(*plain, *drafts)))


def worth(costs: StepCosts, *, waits: bool) -> tuple[float, int]:
    """Where no draft of an eighth of the rows stands, and each other one: the gain, and drafts of all."""
    chances = np.ones((ROWS, MOST))
    chances[::8] = 0.0
    found = best_of(chances, costs, [MOST], ROWS, np.inf, waits=waits, proposed=0)
    return found.gain, int(found.drafts.sum())


def test_rows_without_drafts_hold_all_up_only_where_a_step_takes_as_long_without_the_others() -> None:
    each = 1 / 5 * 7 / 8 + 1 / 8  # steps for a token, on the mean
    assert worth(costs_of(1.0, 1.0), waits=False)[0] == pytest.approx(0.125 ** (-1 / 8) / 1.5, rel=0.01)
    gain, num_drafts = worth(costs_of(1e-3, 1.0), waits=False)
    assert gain == pytest.approx(1 / each / 1.5, rel=0.01)
    assert num_drafts == MOST * ROWS * 7 // 8
    assert worth(costs_of(1.0, 1.0), waits=True)[0] == pytest.approx((5 * 7 / 8 + 1 / 8) / 1.5, rel=0.01)


def test_what_rows_take_of_a_step() -> None:
    assert costs_of(1.0, 4.0).share_of_rows(ROWS) == 0.75
    assert costs_of(1.0, 4.0).share_of_rows(1) == 0.0
    assert costs_of(1.0, 0.9).share_of_rows(ROWS) == 0.0
    assert StepCosts(MOST, 100).share_of_rows(ROWS) == 0.0
