"""What kinds keep, and what they can go on from."""

from __future__ import annotations

import numpy as np
import pytest

from pellucid.kv.kinds import ENDLESS, Full, Kind, Window, most_pages, most_tokens

BLOCK = 4
NAMES = [bytes([i]) for i in range(9)]


def reach(kind: Kind, *there: int, most: int = 9) -> int:
    return kind.reach(NAMES[:most], {NAMES[i] for i in there})


def test_all_of_the_text_is_needed_to_go_on_from_it() -> None:
    full = Full(BLOCK)
    assert reach(full, 0, 1, 2) == 3 and reach(full, 1, 2) == 0 and reach(full, 0, 1, 3) == 2
    assert reach(full, *range(9), most=2) == 2


def test_a_window_goes_on_from_the_last_run_that_fills_it() -> None:
    window = Window(BLOCK, 1, 9)  # 8 tokens before the next query: two blocks
    assert reach(window, 7, 8) == 9 and reach(window, 6, 7) == 8
    assert reach(window, 4, 5, 7) == 6 and reach(window, 1, 3, 5) == 0
    assert reach(window, 0) == 1, "there is no more before it"
    assert reach(window, 7, 8, most=8) == 0


@pytest.mark.parametrize(("window", "blocks"), [(1, 0), (2, 1), (5, 1), (6, 2)])
def test_a_window_reaches_so_many_blocks_back(window: int, blocks: int) -> None:
    kind = Window(BLOCK, 1, window)
    assert reach(kind, *range(9 - blocks, 9)) == 9
    assert kind.first_kept(np.array([36])) == 9 - blocks


def test_what_is_kept_is_all_that_queries_from_there_on_see() -> None:
    for window in range(1, 12):
        for position in range(30):
            first_seen = max(0, position - window + 1)
            assert Window(BLOCK, 1, window).first_kept(np.array([position])) == first_seen // BLOCK
            assert Full(BLOCK).first_kept(np.array([position])) == 0


def test_a_window_never_holds_more_than_its_bound_and_at_some_time_as_much() -> None:
    for window in range(1, 12):
        for chunk in range(1, 9):
            kind = Window(BLOCK, 1, window)
            held = [
                -(-(start + chunk) // BLOCK) - int(kind.first_kept(np.array(start))) for start in range(40)
            ]
            assert max(held) == kind.most_blocks(1000, chunk)


def test_the_longest_sequence_is_what_all_its_kinds_find_room_for() -> None:
    kinds = Full(BLOCK, 2), Window(BLOCK, 3, 9)
    for num_pages in range(60):
        tokens = most_tokens(kinds, num_pages, 4)
        assert most_pages(kinds, tokens, 4) <= num_pages < most_pages(kinds, tokens + 1, 4)
    assert most_tokens(kinds[1:], 11, 4) == 3 * BLOCK
    assert most_tokens(kinds[1:], 12, 4) == ENDLESS
