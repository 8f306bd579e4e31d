"""What a text has foretold of its own end is counted; drafts from the text begin where it is much."""

from __future__ import annotations

import numpy as np
import pytest

from pellucid.schedule.table import Table
from pellucid.spec import echoes
from pellucid.spec.drafter import Drafter
from pellucid.spec.echoes import LONGEST, NUM_TOKENS, Echoes, num_foretold
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


def test_finished_texts_foretell_others_until_they_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(echoes, "TEXTS", 3)
    texts = np.random.default_rng(0).integers(0, 1 << echoes.TOKEN_BITS, (8, 100)).astype(np.int32)
    found = Echoes()
    for text in texts:
        assert found.num_foretold(text) == 0
        found.remember(text)
    assert [found.num_foretold(text[:60]) for text in texts] == [0, 0, 0] + [NUM_TOKENS] * 5
    half = np.concatenate((texts[7, : 60 - NUM_TOKENS // 2], texts[0, : NUM_TOKENS // 2]))
    assert found.num_foretold(half) == NUM_TOKENS // 2
    assert found.num_foretold(np.tile(ROUND, 300)) == NUM_TOKENS, "by itself"
    found.remember(np.concatenate((texts[7, :50], ROUND)))
    assert found.num_foretold(texts[7, :52]) == NUM_TOKENS - 1, "what was said last counts"
    found.remember(ROUND[:2])
    assert found.num_foretold(ROUND[:3]) == 0


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


@pytest.mark.parametrize("is_again", [True, False])
def test_drafts_begin_where_finished_texts_return_though_nothing_is_saved(is_again: bool) -> None:
    table = Table(2, 300, 5)
    wants = Wants(table, 4, 20, drafter=Drafter.READS_TEXTS)
    wants.costs.add_plain(1, 0.01)
    wants.switch.left, wants.switch.credit = 0, 0.0
    text = np.random.default_rng(1).integers(0, 9999, (3, 200)).astype(np.int32)
    for slot in (0, 1):
        wants.begin(slot)
        table.token_ids[slot, :200], table.known[slot], table.computed[slot] = text[slot], 200, 199
    wants.end(0)
    table.token_ids[1, 50:100] = text[0 if is_again else 2, 50:100]
    table.known[1], table.computed[1] = 100, 99
    for _ in range(4):
        wants.choose(np.array([1]))
    assert wants.switch.is_on == is_again
    assert table.want[1] == (4 if is_again else 0)
    assert wants._first.tries == 0, "no draft was made"
    if is_again:
        wants.switch.give_up()
        assert wants.switch.credit == 0.0, "what was lent is not left"
