"""All kinds as one: a sequence grows in all, gives back what windows pass, and a hit is good for all."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pellucid.kv.hashes import Prefix, root_digest
from pellucid.kv.kinds import Full, Kind, Window
from pellucid.kv.manager import KVManager

FULL = Full(4)
HYBRID = Full(4), Window(4, 2, 9)  # 8 tokens before the next query: two blocks


def make_manager(num_pages: int = 40, *kinds: Kind, caching: bool = True, max_chunk: int = 8) -> KVManager:
    return KVManager(
        kinds or (FULL,), num_pages, num_slots=6, max_len=100, max_chunk=max_chunk,
        enable_prefix_caching=caching,
    )  # fmt: skip


def prefix(salt: str | None = None) -> Prefix:
    return Prefix(root_digest(None, salt), 4)


def grow(kv: KVManager, slot: int, num_tokens: int) -> int | None:
    """Grow one slot; the number of its new blocks."""
    if num_tokens <= kv.capacity[slot]:
        return 0
    new = kv.grow(np.array([slot]), np.array([num_tokens]))
    return None if new is None else len(new.pages)


def pass_windows(kv: KVManager, slot: int, position: int) -> bool:
    return kv.pass_windows(np.array([slot]), np.array([position]))


def write(kv: KVManager, slot: int, tokens: list[int]) -> int:
    """A sequence whose tokens are all computed and published.  Returns how many were cached."""
    names = prefix()
    hit = kv.match(names, tokens, len(tokens))
    kv.adopt(slot, hit)
    assert grow(kv, slot, len(tokens)) is not None
    kv.publish(slot, names, tokens)
    return hit.num_tokens


def num_cached(kv: KVManager, tokens: list[int], most: int | None = None) -> int:
    return kv.match(prefix(), tokens, len(tokens) if most is None else most).num_tokens


def test_a_sequence_grows_block_by_block() -> None:
    kv = make_manager()
    assert grow(kv, 0, 5) == 2
    assert grow(kv, 0, 8) == 0 and kv.capacity[0] == 8
    assert grow(kv, 0, 9) == 1
    kv.check([0])


def test_a_block_has_pages_of_all_kinds() -> None:
    kv = make_manager(40, *HYBRID)
    assert grow(kv, 0, 9) == 3 and kv.pool.num_used == 9
    assert (kv.pages[0, :3] > 0).all() and kv.capacity[0] == 12


def test_several_sequences_grow_at_once_each_by_what_it_lacks() -> None:
    kv = make_manager(40, *HYBRID)
    grow(kv, 1, 4)
    new = kv.grow(np.array([0, 1, 2]), np.array([5, 5, 9]))
    assert new is not None and new.slots.tolist() == [0, 0, 1, 2, 2, 2]
    assert kv.capacity.tolist()[:3] == [8, 8, 12]
    own = [kv.pages[0, :2], kv.pages[1, 1:2], kv.pages[2, :3]]
    assert new.pages.tolist() == np.concatenate(own).tolist()
    kv.check([0, 1, 2])


def test_nobody_grows_where_pages_are_short() -> None:
    kv = make_manager(8, *HYBRID)
    assert grow(kv, 0, 9) is None and kv.grow(np.array([0, 1]), np.array([4, 5])) is None and kv.usage == 0
    assert grow(kv, 0, 8) == 2 and kv.usage == 6 / 8


def test_an_equal_beginning_is_found_and_held() -> None:
    kv = make_manager()
    write(kv, 0, list(range(10)))
    hit = kv.match(prefix(), [*range(8), 99, 98], 9)
    assert hit.num_tokens == 8 and hit.pages.tolist() == kv.pages[0, :2].tolist()
    kv.adopt(1, hit)
    kv.release(0)
    assert kv.pool.num_used == 2
    kv.check([1])


def test_a_hit_leaves_the_last_token_to_be_computed() -> None:
    kv = make_manager()
    write(kv, 0, list(range(8)))
    assert num_cached(kv, list(range(8)), most=7) == 4


def test_the_prefix_outlives_the_tail() -> None:
    kv = make_manager(3)
    write(kv, 0, list(range(12)))
    kv.release(0)
    kv.pool.take(1)
    assert num_cached(kv, list(range(12))) == 8


def test_a_salt_keeps_requests_apart() -> None:
    kv = make_manager()
    write(kv, 0, list(range(8)))
    assert kv.match(prefix("mine"), list(range(8)), 8).num_tokens == 0


def test_pages_that_a_hit_would_wake_do_not_count_as_free() -> None:
    kv = make_manager(3)
    write(kv, 0, list(range(8)))
    kv.release(0)
    hit = kv.match(prefix(), list(range(12)), 11)
    assert hit.num_tokens == 8
    assert kv.lacking(hit, 12, 0) == 0  # two by the hit, one more
    assert kv.lacking(hit, 13, 0) == 1
    assert kv.lacking(hit, 12, 1) == 1


def test_without_prefix_caching_nothing_is_published_or_found() -> None:
    kv = make_manager(caching=False)
    write(kv, 0, list(range(8)))
    assert num_cached(kv, list(range(8))) == 0 and kv.is_private_from(0, 0)


def test_a_published_block_is_written_no_more() -> None:
    kv = make_manager()
    write(kv, 0, list(range(6)))
    assert kv.is_private_from(0, 6) and kv.is_private_from(0, 4)
    assert not kv.is_private_from(0, 3)


def test_only_new_full_blocks_are_published() -> None:
    kv, names = make_manager(), prefix()
    kv.adopt(0, kv.match(names, [], 0))
    grow(kv, 0, 8)
    kv.publish(0, names, list(range(6)))
    assert kv.publish_at[0] == 8 and num_cached(kv, list(range(8))) == 4
    kv.publish(0, names, list(range(8)))
    assert kv.publish_at[0] == 12 and num_cached(kv, list(range(8))) == 8


# Windows


def test_what_a_window_has_passed_is_free_and_the_rest_is_not() -> None:
    kv = make_manager(40, *HYBRID)
    grow(kv, 0, 24)
    assert not pass_windows(kv, 0, 11), "position 3 is seen from there"
    assert pass_windows(kv, 0, 12) and kv.pool.num_used == 18 - 2
    assert (kv.pages[0, 0] > 0).tolist() == [True, False, False], "all of the full kind stays"
    assert not pass_windows(kv, 0, 12) and pass_windows(kv, 0, 20) and kv.pool.num_used == 18 - 6
    assert kv.sees_from(0, 20) and not kv.sees_from(0, 19)
    kv.check([0])
    kv.release(0)
    assert kv.usage == 0


def test_several_pass_their_windows_at_once_each_as_far_as_it_has_come() -> None:
    kv = make_manager(60, *HYBRID)
    for slot in range(3):
        grow(kv, slot, 20)
    assert kv.pass_windows(np.array([2, 0, 1]), np.array([16, 3, 19]))
    assert [(kv.pages[slot, :5, 1] > 0).sum() for slot in range(3)] == [5, 3, 3]
    kv.check([0, 1, 2])


def test_what_several_share_is_free_when_the_last_has_passed_it() -> None:
    kv = make_manager(60, *HYBRID, caching=True)
    write(kv, 0, list(range(16)))
    for slot in (1, 2):
        assert write(kv, slot, list(range(16))) == 16
    pass_windows(kv, 0, 16)  # as far as the others' hit
    used = kv.pool.num_used
    for slot in (0, 1):
        assert pass_windows(kv, slot, 16 + 4) and kv.pool.num_used == used
    assert pass_windows(kv, 2, 16 + 4) and kv.pool.num_used == used - 2, "one block of the window"
    kv.check([0, 1, 2])


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_ten_windows_of_text_hold_the_pages_of_one(chunk: int) -> None:
    kv, most = make_manager(200, *HYBRID, max_chunk=chunk), 0
    for start in range(0, 90, chunk):
        pass_windows(kv, 0, start)
        grow(kv, 0, start + chunk)
        most = max(most, np.count_nonzero(kv.pages[0, :, 1:]))
    assert most == 2 * HYBRID[1].most_blocks(90, chunk) <= 2 * (1 + -(-(8 + chunk) // 4))


def test_what_is_published_behind_a_window_is_found_until_it_is_needed() -> None:
    kv = make_manager(30, *HYBRID)
    write(kv, 0, list(range(24)))
    pass_windows(kv, 0, 24)
    assert num_cached(kv, list(range(8))) == 8 and num_cached(kv, list(range(24))) == 24
    kv.pool.take(12 + 8)  # evicts what the window has passed: four blocks of two pages
    assert num_cached(kv, list(range(8))) == 0 and num_cached(kv, list(range(24))) == 24


def test_a_hit_is_what_all_kinds_can_go_on_from() -> None:
    kv = make_manager(30, *HYBRID)
    write(kv, 0, list(range(24)))
    kv.release(0)
    kv.pool.take(12)
    window, full = kv.pool.index(1), kv.pool.index(0)
    assert len(full) == len(window) == 6
    names = prefix()
    digests = kv.digests(names, list(range(24)))
    kv.pool._cached.move_to_end(window[digests[4]][0], last=False)
    kv.pool.take(1)
    assert num_cached(kv, list(range(24))) == 16, "no window before 20 nor before 24 is whole"
    kv.pool._cached.move_to_end(full[digests[3]][0], last=False)
    kv.pool.take(2)
    assert num_cached(kv, list(range(24))) == 12
    hit = kv.match(prefix(), list(range(24)), 24)
    assert (hit.pages[:, 0] > 0).tolist() == [True] * 3
    assert (hit.pages[:, 1] > 0).tolist() == [False, True, True], "what the window does not reach is left"


def test_who_comes_in_by_a_hit_holds_no_more_than_it_sees() -> None:
    kv = make_manager(40, *HYBRID)
    write(kv, 0, list(range(24)))
    kv.release(0)
    assert write(kv, 1, list(range(24))) == 24 and kv.pool.num_used == 6 + 2 * 2
    kv.check([1])
    kv.release(1)
    kv.check([])


def test_a_prompt_longer_than_its_window_needs_only_a_windows_pages_at_once() -> None:
    kv = make_manager(25 + 2 * 5, *HYBRID)
    none = kv.match(prefix(), [], 0)
    assert HYBRID[1].most_blocks(100, 8) == 5
    assert kv.lacking(none, 100, 0) == 0 and kv.max_tokens == 100 and kv.lacking(none, 100, 1) == 1


def test_whom_to_preempt_is_reckoned_in_pages_that_nobody_else_has() -> None:
    kv = make_manager(40, *HYBRID)
    write(kv, 0, list(range(8)))
    write(kv, 1, list(range(8)))  # the same pages
    grow(kv, 2, 8)
    assert kv.num_to_release([1], 1) is None
    assert kv.num_to_release([2, 1], 6) == 1 and kv.num_to_release([2, 1], 7) is None
    assert kv.num_to_release([1, 0], 6) == 2
    hit = kv.match(prefix(), list(range(8)), 8)
    assert kv.num_to_release([1, 0], 1, hit) is None, "they would be the hit's own"


def test_in_random_lives_no_page_is_lost_or_seen_too_late() -> None:
    rng, kv = random.Random(1), make_manager(60, Full(4), Window(4, 1, 3), Window(4, 2, 11))
    lives: dict[int, tuple[Prefix, list[int], int]] = {}
    for _ in range(1500):
        slot = rng.randrange(6)
        if slot not in lives:
            tokens = [rng.randrange(2) for _ in range(rng.randrange(60))]
            names = prefix()
            hit = kv.match(names, tokens, len(tokens))
            kv.adopt(slot, hit)
            lives[slot] = names, tokens, hit.num_tokens
        names, tokens, start = lives[slot]
        end = min(100, start + rng.randrange(1, 8))
        pass_windows(kv, slot, start)
        if end == start or grow(kv, slot, end) is None:
            kv.release(slot)
            del lives[slot]
        else:
            assert kv.sees_from(slot, start) and kv.is_private_from(slot, start)
            tokens += [rng.randrange(2) for _ in range(end - len(tokens))]
            kv.publish(slot, names, tokens[:end])
            lives[slot] = names, tokens, end
        kv.check(list(lives))


def test_clearing_forgets_prefixes_of_all_kinds() -> None:
    kv = make_manager(40, *HYBRID)
    write(kv, 0, list(range(16)))
    kv.release(0)
    kv.clear()
    assert num_cached(kv, list(range(16))) == 0
    kv.check([])
