"""All KV groups as one: a prefix hit is what every group holds, and a sequence grows in all or in none."""

from __future__ import annotations

import random

import numpy as np

from pellucid.kv.manager import BlockTable, KVManager, NewBlocks, Transfer
from pellucid.kv.specs import KVGroupSpec


def make_manager(*pools: tuple[int, int], caching: bool = True) -> KVManager:
    """A manager with a group for each (block size, number of blocks)."""
    groups = tuple(
        KVGroupSpec(block_size=size, num_layers=1, num_kv_heads=1, head_dim=1, dtype="int8", itemsize=1)
        for size, _ in pools
    )
    return KVManager(groups, tuple(num for _, num in pools), enable_prefix_caching=caching)


def write(kv: KVManager, tokens: list[int], table: BlockTable | None = None) -> BlockTable:
    """A sequence whose tokens are all computed and published."""
    table = table or kv.new_table()
    kv.adopt(table, kv.match(table, tokens, len(tokens)))
    assert kv.grow(table, len(tokens)) is not None
    kv.publish(table, tokens)
    return table


def grow(kv: KVManager, table: BlockTable, num_tokens: int) -> list[int] | None:
    """Grow one table; of each group the number of its new blocks."""
    grown = kv.grow(table, num_tokens)
    return None if grown is None else [len(blocks) for blocks in grown]


def grow_all(kv: KVManager, tables: list[BlockTable], num_tokens: list[int]) -> NewBlocks | None:
    return kv.grow_all(tables, np.array([kv.capacity(table) for table in tables]), np.array(num_tokens))


def test_a_sequence_grows_block_by_block() -> None:
    kv = make_manager((4, 8))
    table = kv.new_table()
    assert grow(kv, table, 5) == [2]
    assert grow(kv, table, 8) == [0] and kv.capacity(table) == 8
    assert grow(kv, table, 9) == [1]


def test_groups_with_their_own_block_sizes_grow_together() -> None:
    kv = make_manager((4, 8), (8, 4))
    table = kv.new_table()
    assert grow(kv, table, 9) == [3, 2]
    assert kv.capacity(table) == 12
    assert grow(kv, table, 13) == [1, 0]


def test_several_sequences_grow_at_once_each_by_what_it_lacks() -> None:
    kv = make_manager((4, 8), (8, 8))
    tables = [kv.new_table() for _ in range(3)]
    grow(kv, tables[1], 4)
    new = grow_all(kv, tables, [5, 5, 9])
    assert new is not None
    assert [counts.tolist() for counts in new.counts] == [[2, 1, 3], [1, 0, 2]]
    assert new.capacity.tolist() == [kv.capacity(table) for table in tables] == [8, 8, 12]
    assert new.blocks[0] == tables[0].blocks[0] + tables[1].blocks[0][1:] + tables[2].blocks[0]
    kv.check(table.blocks for table in tables)


def test_several_tables_get_the_blocks_that_each_would_get_alone() -> None:
    rng = random.Random(0)
    for pools in (
        [(4, 4000)],
        [(4, 4000), (8, 4000)],
        [(8, 4000), (4, 4000)],
        [(4, 4000), (6, 4000), (16, 4000)],
    ):
        kv, tables, alone = make_manager(*pools), list[BlockTable](), list[BlockTable]()
        for _ in range(50):
            first = rng.randrange(1, 60)
            last = rng.randrange(first, 90)
            for each in (tables, alone):
                each.append(kv.new_table())
                grow(kv, each[-1], first)
            grow(kv, alone[-1], last)
            if last > kv.capacity(tables[-1]):
                assert grow_all(kv, tables[-1:], [last]) is not None
        assert [list(map(len, table.blocks)) for table in tables] == [list(map(len, t.blocks)) for t in alone]


def test_no_group_grows_where_one_of_them_is_short() -> None:
    kv = make_manager((4, 8), (4, 2))
    assert grow(kv, kv.new_table(), 9) is None and kv.usage == 0
    assert grow_all(kv, [kv.new_table(), kv.new_table()], [4, 5]) is None and kv.usage == 0
    assert grow(kv, kv.new_table(), 8) is not None
    assert kv.max_tokens == 8


def test_an_equal_beginning_is_found_and_held() -> None:
    kv = make_manager((4, 8))
    first = write(kv, list(range(10)))
    hit = kv.match(kv.new_table(), [*range(8), 99, 98], 9)
    assert hit.num_tokens == 8 and hit.blocks[0] == first.blocks[0][:2]


def test_a_hit_leaves_the_last_token_to_be_computed() -> None:
    kv = make_manager((4, 8))
    write(kv, list(range(8)))
    assert kv.match(kv.new_table(), list(range(8)), 7).num_tokens == 4


def test_a_hit_is_what_all_groups_hold() -> None:
    kv = make_manager((4, 8), (4, 3))
    kv.release(write(kv, list(range(12))))
    (taken,) = kv.pools[1].take(1)  # evicts the last block of the second group
    hit = kv.match(kv.new_table(), list(range(12)), 12)
    assert hit.num_tokens == 8 and [len(blocks) for blocks in hit.blocks] == [2, 2]
    kv.pools[1].drop(taken)


def test_a_hit_ends_at_a_block_of_every_size() -> None:
    kv = make_manager((4, 8), (8, 8))
    write(kv, list(range(12)))
    hit = kv.match(kv.new_table(), list(range(12)), 12)
    assert hit.num_tokens == 8 and [len(blocks) for blocks in hit.blocks] == [2, 1]


def test_the_prefix_outlives_the_tail() -> None:
    kv = make_manager((4, 3))
    kv.release(write(kv, list(range(12))))
    kv.pools[0].take(1)
    assert kv.match(kv.new_table(), list(range(12)), 12).num_tokens == 8


def test_a_salt_keeps_requests_apart() -> None:
    kv = make_manager((4, 8))
    write(kv, list(range(8)))
    assert kv.match(kv.new_table(cache_salt="mine"), list(range(8)), 8).num_tokens == 0
    assert kv.match(kv.new_table(lora="mine"), list(range(8)), 8).num_tokens == 0


def test_blocks_that_a_hit_would_wake_do_not_count_as_free() -> None:
    kv = make_manager((4, 3))
    kv.release(write(kv, list(range(8))))
    hit = kv.match(kv.new_table(), list(range(12)), 11)
    assert hit.num_tokens == 8
    assert kv.lacking(hit, 12, [0]) == [0]  # two by the hit, one more
    assert kv.lacking(hit, 13, [0]) == [1]
    assert kv.lacking(hit, 12, [1]) == [1]


def test_without_prefix_caching_nothing_is_published_or_found() -> None:
    kv = make_manager((4, 8), caching=False)
    table = write(kv, list(range(8)))
    assert kv.match(kv.new_table(), list(range(8)), 8).num_tokens == 0
    assert kv.is_private_from(table, 0)


def test_a_published_block_is_written_no_more() -> None:
    kv = make_manager((4, 8))
    table = write(kv, list(range(6)))
    assert kv.is_private_from(table, 6) and kv.is_private_from(table, 4)
    assert not kv.is_private_from(table, 3)


def test_only_new_full_blocks_are_published() -> None:
    kv = make_manager((4, 8))
    table = write(kv, list(range(6)))
    assert table.num_published == [1] and kv.publish_at(table) == 8
    kv.publish(table, list(range(8)))
    assert table.num_published == [2] and kv.publish_at(table) == 12


def test_a_load_takes_blocks_and_is_found_once_it_has_landed() -> None:
    kv = make_manager((4, 4))
    tokens = list(range(8))
    digests = kv.digests(kv.new_table(), tokens)
    load = Transfer(
        seq_id=0, is_load=True, num_cached=0, num_tokens=8, blocks=(), digests=kv.span(digests, 0, 8)
    )
    assert not kv.lend_for_load(load, [3])
    assert kv.lend_for_load(load, [2]) and kv.pools[0].num_used == 2
    assert kv.match(kv.new_table(), tokens, 8).num_tokens == 0
    kv.take_back(load, publish=True)
    assert kv.match(kv.new_table(), tokens, 8).num_tokens == 8 and kv.usage == 0


def test_what_a_save_reads_outlives_its_sequence() -> None:
    kv = make_manager((4, 2))
    table = write(kv, list(range(8)))
    save = Transfer(
        seq_id=0,
        is_load=False,
        num_cached=0,
        num_tokens=8,
        blocks=kv.span(table.blocks, 0, 8),
        digests=kv.span(kv.digests(table, list(range(8))), 0, 8),
    )
    kv.lend_for_save(save)
    kv.release(table)
    assert grow(kv, kv.new_table(), 1) is None
    kv.take_back(save, publish=False)
    assert grow(kv, kv.new_table(), 8) is not None


def test_clearing_forgets_prefixes_in_all_groups() -> None:
    kv = make_manager((4, 8), (8, 8))
    kv.release(write(kv, list(range(16))))
    kv.clear()
    assert kv.match(kv.new_table(), list(range(16)), 16).num_tokens == 0
    kv.check([])
