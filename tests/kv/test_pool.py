"""A pool gives each block to one writer, shares what is published, and forgets the oldest first."""

from __future__ import annotations

import pytest

from pellucid.kv.pool import BlockPool


def published(pool: BlockPool, *names: bytes) -> list[int]:
    """Blocks that were written, published and dropped, in this order."""
    blocks = pool.take(len(names))
    pool.publish(blocks, names)
    for block in blocks:
        pool.drop(block)
    return blocks


def test_the_padding_block_is_never_handed_out() -> None:
    pool = BlockPool(3)
    assert sorted(pool.take(3)) == [1, 2, 3]
    assert pool.num_free == 0 and pool.num_used == 3


def test_a_dropped_block_is_free_when_its_last_owner_lets_go() -> None:
    pool = BlockPool(1)
    (block,) = pool.take(1)
    pool.hold(block)
    pool.drop(block)
    assert pool.num_free == 0
    pool.drop(block)
    assert pool.num_free == 1


def test_a_published_block_is_found_by_all_who_ask_also_when_nobody_owns_it() -> None:
    pool = BlockPool(4)
    first, second = published(pool, b"first", b"second")
    assert pool.match([b"first", b"second", b"third"]) == [first, second]
    assert pool.match([b"third", b"first"]) == []


def test_unpublished_blocks_go_before_any_prefix_is_forgotten() -> None:
    pool = BlockPool(3)
    (block,) = published(pool, b"prefix")
    assert block not in pool.take(2)
    assert pool.match([b"prefix"]) == [block]
    assert pool.take(1) == [block]
    assert pool.match([b"prefix"]) == []


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    pool = BlockPool(3)
    a, b, c = published(pool, b"a", b"b", b"c")
    pool.hold(a)  # used again
    pool.drop(a)
    assert pool.take(3) == [b, c, a]


def test_a_held_block_is_not_evicted() -> None:
    pool = BlockPool(2)
    a, b = published(pool, b"a", b"b")
    pool.hold(a)
    assert pool.num_free == 1 and pool.take(1) == [b] and pool.num_free == 0
    assert pool.match([b"a"]) == [a]


def test_the_second_block_with_the_same_content_stays_private() -> None:
    pool = BlockPool(2)
    one, two = pool.take(2)
    pool.publish([one], [b"same"])
    pool.publish([two], [b"same"])
    assert pool.match([b"same"]) == [one]
    assert pool.is_private(two) and not pool.is_private(one)
    pool.check([[one], [two]])


def test_a_reset_forgets_every_prefix_but_takes_no_block_from_its_owner() -> None:
    pool = BlockPool(3)
    resting, owned = published(pool, b"resting")[0], pool.take(1)[0]
    pool.publish([owned], [b"owned"])
    pool.reset()
    assert pool.match([b"resting"]) == pool.match([b"owned"]) == []
    assert pool.num_used == 1 and resting in pool.take(2)


def test_a_block_dropped_twice_is_our_bug() -> None:
    pool = BlockPool(1)
    (block,) = pool.take(1)
    pool.drop(block)
    with pytest.raises(AssertionError, match="dropped more often"):
        pool.drop(block)


def test_the_check_notices_a_forgotten_owner() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.check([[block]])
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check([])
