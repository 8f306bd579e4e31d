"""Pages out of stream order: taken for loads, held for saves, and given back."""

from __future__ import annotations

from pellucid.connectors.lending import Transfer, lend_for_load, lend_for_save, take_back
from pellucid.kv.manager import KVManager
from tests.kv.test_manager import HYBRID, grow, make_manager, num_cached, prefix, write


def load_of(kv: KVManager, num_cached: int, num_tokens: int) -> Transfer:
    digests = kv.digests(prefix(), list(range(num_tokens)))[num_cached // 4 :]
    return Transfer(is_load=True, num_cached=num_cached, num_tokens=num_tokens, digests=digests)


def test_a_load_takes_pages_and_is_found_once_it_has_landed() -> None:
    kv = make_manager(4)
    load = load_of(kv, 0, 8)
    assert not lend_for_load(kv, load, 3)
    assert lend_for_load(kv, load, 2) and kv.pool.num_used == 2
    assert num_cached(kv, list(range(8))) == 0
    kv.check([])
    take_back(kv, load, publish=True)
    assert num_cached(kv, list(range(8))) == 8 and kv.usage == 0


def test_of_windows_a_load_brings_what_the_next_query_sees() -> None:
    kv = make_manager(40, *HYBRID)
    load = load_of(kv, 0, 20)
    assert lend_for_load(kv, load, 0)
    assert (load.pages[:, 1] > 0).tolist() == [False] * 3 + [True] * 2 and kv.pool.num_used == 5 + 4
    take_back(kv, load, publish=True)
    assert num_cached(kv, list(range(20))) == 20
    more = load_of(kv, 20, 24)
    assert lend_for_load(kv, more, 0) and kv.pool.num_used == 3
    take_back(kv, more, publish=True)
    assert num_cached(kv, list(range(24))) == 24


def test_what_a_save_reads_outlives_its_sequence() -> None:
    kv = make_manager(2)
    write(kv, 0, list(range(8)))
    save = Transfer(digests=kv.digests(prefix(), list(range(8))), pages=kv.pages[0, :2].copy())
    lend_for_save(kv, save)
    kv.release(0)
    assert grow(kv, 1, 1) is None
    take_back(kv, save, publish=False)
    assert grow(kv, 1, 8) == 2
