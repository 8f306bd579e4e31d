"""A pool gives each page to one writer, shares what is published, and forgets the oldest first."""

from __future__ import annotations

import numpy as np
import pytest

from pellucid.kv.pool import PagePool, Pages


def blocks_of(pool: PagePool, num: int, stripes: int = 1) -> Pages:
    return pool.take(num * stripes).reshape(num, stripes)


def published(pool: PagePool, *names: bytes, kind: int = 0, stripes: int = 1) -> list[list[int]]:
    """Blocks that were written, published and dropped, in this order."""
    blocks = blocks_of(pool, len(names), stripes)
    pool.publish(kind, blocks, names)
    pool.drop(blocks)
    return blocks.tolist()


def found(pool: PagePool, *names: bytes, kind: int = 0) -> list[list[int] | None]:
    return [pool.index(kind).get(name) for name in names]  # type: ignore[misc]


def test_the_padding_page_is_never_handed_out() -> None:
    pool = PagePool(3)
    assert sorted(pool.take(3).tolist()) == [1, 2, 3]
    assert pool.num_free == 0 and pool.num_used == 3


def test_a_dropped_page_is_free_when_its_last_owner_lets_go() -> None:
    pool = PagePool(2)
    block = blocks_of(pool, 1, stripes=2)
    pool.hold(block)
    pool.drop(block)
    assert pool.num_free == 0
    pool.drop(block)
    assert pool.num_free == 2


def test_a_published_block_is_found_by_all_who_ask_also_when_nobody_owns_it() -> None:
    pool = PagePool(4)
    first, second = published(pool, b"first", b"second", stripes=2)
    assert found(pool, b"first", b"second", b"third") == [first, second, None]


def test_kinds_do_not_find_each_others_blocks() -> None:
    pool = PagePool(3, num_kinds=2)
    (a,), (b,) = published(pool, b"same"), published(pool, b"same", kind=1, stripes=2)
    assert found(pool, b"same") == [a] and found(pool, b"same", kind=1) == [b]


def test_free_pages_go_before_any_prefix_is_forgotten() -> None:
    pool = PagePool(3)
    ((page,),) = published(pool, b"prefix")
    assert page not in pool.take(2)
    assert found(pool, b"prefix") == [[page]]
    assert pool.take(1).tolist() == [page]
    assert found(pool, b"prefix") == [None]


def test_the_least_recently_used_prefix_is_evicted_first_with_all_its_pages() -> None:
    pool = PagePool(6, num_kinds=2)
    a, b = published(pool, b"a", b"b", stripes=2)
    (c,) = published(pool, b"c", kind=1, stripes=2)
    pool.hold(np.array([a], dtype=np.int32))  # used again
    pool.drop(np.array([a], dtype=np.int32))
    assert set(pool.take(1).tolist()) < set(b) and pool.num_free == 5
    assert found(pool, b"b", b"a") == [None, a] and found(pool, b"c", kind=1) == [c]
    pool.take(3)
    assert found(pool, b"a") == [a] and found(pool, b"c", kind=1) == [None]


def test_a_held_block_is_not_evicted() -> None:
    pool = PagePool(2)
    a, b = published(pool, b"a", b"b")
    pool.hold(np.array([a], dtype=np.int32))
    assert pool.num_free == 1 and pool.take(1).tolist() == b and pool.num_free == 0
    assert found(pool, b"a") == [a]


def test_the_second_block_with_the_same_content_stays_private() -> None:
    pool = PagePool(2)
    blocks = blocks_of(pool, 2)
    pool.publish(0, blocks[:1], [b"same"])
    pool.publish(0, blocks[1:], [b"same"])
    assert found(pool, b"same") == blocks[:1].tolist()
    assert pool.is_published[blocks[:, 0]].tolist() == [True, False]
    pool.check([*blocks])


def test_a_reset_forgets_every_prefix_but_takes_no_page_from_its_owner() -> None:
    pool = PagePool(3)
    ((resting,),), owned = published(pool, b"resting"), blocks_of(pool, 1)
    pool.publish(0, owned, [b"owned"])
    pool.reset()
    assert found(pool, b"resting", b"owned") == [None, None]
    assert pool.num_used == 1 and resting in pool.take(2)


def test_a_block_dropped_twice_is_our_bug() -> None:
    pool = PagePool(1)
    block = blocks_of(pool, 1)
    pool.drop(block)
    with pytest.raises(AssertionError, match="dropped more often"):
        pool.drop(block)


def test_the_check_notices_a_forgotten_owner() -> None:
    pool = PagePool(2)
    page = pool.take(1)
    pool.check([page])
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check([])
