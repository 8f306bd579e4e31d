"""Layers of any shapes in equal pages."""

from __future__ import annotations

import pytest

from pellucid.kv.kinds import Full, Window
from pellucid.kv.layout import LayerCache, Layout, choose_kinds, lay_out

BLOCK = 64


def layers(num: int, num_bytes: int = 100, window: int | None = None) -> list[LayerCache]:
    return [LayerCache(num_bytes, window)] * num


def padding(layout: Layout, caches: list[LayerCache]) -> int:
    """Bytes of a block of all kinds that are nobody's."""
    return layout.pages_a_block * layout.page_bytes - sum(cache.num_bytes for cache in caches)


def check(layout: Layout, caches: list[LayerCache], num_pages: int = 5) -> None:
    """Every layer finds every page's part of it through its table, and nobody else's is there."""
    first = [sum(kind.stripes for kind in layout.kinds[:i]) for i in range(len(layout.kinds) + 1)]
    taken = set[tuple[int, int]]()  # stripe, byte
    for cache, (index, unit) in zip(caches, layout.places, strict=True):
        stripe, factor, num_bytes = layout.tables[index]
        kind = next(i for i, end in enumerate(first[1:]) if stripe < end)
        assert getattr(layout.kinds[kind], "window", None) == cache.window and num_bytes == cache.num_bytes
        start = unit * layout.unit_bytes
        for page in range(num_pages):
            assert start + page * factor * num_bytes == page * layout.page_bytes + start
        assert start + num_bytes <= layout.page_bytes
        mine = {(stripe, byte) for byte in range(start, start + num_bytes)}
        assert not mine & taken
        taken |= mine


@pytest.mark.parametrize(
    ("caches", "stripes", "most_padding"),
    [
        (layers(36), [1], 0),
        (layers(12) + layers(12, window=128), [1, 1], 0),
        (layers(10) + layers(52, window=1024), [1, 6], 800),
        (layers(21) + layers(7, window=128), [3, 1], 0),
        (layers(1) + layers(3, window=8), [1, 3], 0),
        (layers(8) + layers(8, window=8) + layers(8, window=16), [1, 1, 1], 0),
        (layers(4, 400) + layers(8, 200, window=16), [1, 1], 0),
        (layers(32, window=4096), [1], 0),
        (layers(36, 400) + layers(16, 100), [1], 0),  # a draft model
        (layers(6, 300) + layers(1, 200), [1], 400),
    ],
)
def test_layers_are_dealt_into_few_stripes_with_little_padding(
    caches: list[LayerCache], stripes: list[int], most_padding: int
) -> None:
    kinds = choose_kinds(caches, BLOCK)
    layout = lay_out(kinds, caches)
    assert [kind.stripes for kind in kinds] == stripes
    assert padding(layout, caches) <= most_padding
    check(layout, caches)


def test_what_sees_all_comes_first_and_then_windows_by_size() -> None:
    caches = layers(1, window=9) + layers(1) + layers(1, window=7)
    assert choose_kinds(caches, BLOCK) == (Full(BLOCK, 1), Window(BLOCK, 1, 7), Window(BLOCK, 1, 9))


def test_a_pipelines_stages_have_the_same_stripes_whatever_layers_they_have() -> None:
    caches = layers(2) + layers(6, window=8)
    kinds = choose_kinds(caches, BLOCK)
    stages = [lay_out(kinds, part) for part in (caches[:1], caches[1:5], caches[5:])]
    for stage, part in zip(stages, (caches[:1], caches[1:5], caches[5:]), strict=True):
        assert stage.pages_a_block == 4
        check(stage, part)
    assert [stage.page_bytes for stage in stages] == [100, 100, 100]


def test_models_of_one_shape_have_one_table_and_of_two_shapes_two_with_the_same_pages() -> None:
    for num_bytes, num_tables in ((100, 1), (50, 2)):
        caches = layers(4) + layers(2, num_bytes)
        layout = lay_out(choose_kinds(caches, BLOCK), caches)
        assert len(layout.tables) == num_tables and {table.stripe for table in layout.tables} == {0}
