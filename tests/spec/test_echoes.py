"""What a text has foretold of its own end is counted; drafts from the text begin where it is much."""

from __future__ import annotations

import numpy as np
import pytest

from pellucid.schedule.table import Table
from pellucid.spec.drafter import Drafter
from pellucid.spec.echoes import LONGEST, NUM_TOKENS, num_foretold
from pellucid.spec.wants import Wants

ROUND = np.arange(10, 20, dtype=np.int32)


def plainly(tokens: list[int]) -> int:
    found = 0
    for place in range(len(tokens) - NUM_TOKENS, len(tokens)):
        for before in range(place - 1, 1, -1):
            if tokens[before - 2 : before] == tokens[place - 2 : place]:
                found += tokens[before] == tokens[place]
                break
    return found


@pytest.mark.parametrize("num_kinds", [2, 4, 30])
def test_it_is_what_the_last_occurrence_says(num_kinds: int) -> None:
    rng = np.random.default_rng(num_kinds)
    for length in (NUM_TOKENS + 3, 60, 400):
        text = rng.integers(0, num_kinds, length).astype(np.int32)
        assert num_foretold(text) == plainly(text.tolist())


def test_what_goes_in_circles_is_foretold_and_what_is_new_or_short_is_not() -> None:
    assert num_foretold(np.tile(ROUND, 300)) == NUM_TOKENS, f"in a text of more than {LONGEST}"
    assert num_foretold(np.arange(3000, dtype=np.int32)) == 0
    assert num_foretold(ROUND) == 0


ALMOST_NEW = np.concatenate((np.arange(82), [5, 6, 7], np.arange(82, 97))).astype(np.int32)  # one is foretold


@pytest.mark.parametrize("does_repeat", [True, False])
def test_drafts_begin_where_texts_repeat(does_repeat: bool) -> None:
    table = Table(8, 200, 5)
    wants, slots = Wants(table, 4, 20, drafter=Drafter.READS_TEXT), np.arange(8)
    wants._first.add(64, 64)  # the first drafts of others say nothing of these texts
    for slot in slots.tolist():
        wants.begin(slot)
        table.token_ids[slot, :100] = np.tile(ROUND, 10) if does_repeat else ALMOST_NEW
        table.known[slot], table.computed[slot] = 100, 99
    for _ in range(50):
        wants.switch.plain()
        wants.costs.add_plain(8, 0.01)
        wants.choose(slots)
        assert not wants.switch.is_trying, "no trial is needed"
    assert wants.switch.is_on == does_repeat
    wants.choose(slots)
    assert (table.want[slots].min() > 0) == does_repeat
