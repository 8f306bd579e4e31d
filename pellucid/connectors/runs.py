"""Pages and places side by side: what one copy moves, if both go on one behind the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def runs(pages: Sequence[int], places: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Pages and places side by side on both sides, as (first page, first place, how many)."""
    assert len(pages) == len(places), f"{len(pages)} pages, {len(places)} places"
    start = 0
    for i in range(1, len(pages) + 1):
        if i < len(pages) and pages[i] - pages[i - 1] == places[i] - places[i - 1] == 1:
            continue
        if start < i:
            yield pages[start], places[start], i - start
        start = i
