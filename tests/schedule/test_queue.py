"""A queue in the order of age."""

from __future__ import annotations

import random
import time
from copy import copy

import pytest

from pellucid.kv.hashes import Prefix
from pellucid.schedule.plan import ints
from pellucid.schedule.queue import AgeQueue
from pellucid.schedule.sequence import Key, Sequence
from tests.schedule.device import make_request


def make_sequence(key: Key) -> Sequence:
    return Sequence(
        id=key[2],
        request=make_request(str(key[2])),
        key=key,
        limit=8,
        prefix=Prefix(b"", 4),
        prompt_len=5,
        tokens=ints([1, 2, 3, 4, 5]),
        stop_token_ids=frozenset(),
    )


def test_the_oldest_is_the_one_with_the_lowest_priority_number_then_the_first_to_arrive() -> None:
    keys: list[Key] = [(1, 0.0, 0), (0, 2.0, 1), (0, 1.0, 2), (0, 1.0, 3)]
    queue = AgeQueue()
    for key in keys:
        queue.add(make_sequence(key))
    assert [seq.id for seq in queue] == [2, 3, 1, 0] and queue.oldest.id == 2


def test_who_returns_takes_its_old_place() -> None:
    queue, seqs = AgeQueue(), [make_sequence((0, 0.0, i)) for i in range(3)]
    for seq in seqs:
        queue.add(seq)
    queue.remove(seqs[0])
    queue.remove(seqs[2])
    assert queue.oldest is seqs[1] and list(reversed(queue)) == [seqs[1]]
    queue.add(seqs[2])
    queue.add(seqs[0])
    assert queue.oldest is seqs[0] and list(reversed(queue)) == seqs[::-1]


def test_the_loop_over_a_queue_may_change_it() -> None:
    queue = AgeQueue()
    for i in range(4):
        queue.add(make_sequence((0, 0.0, i)))
    for seq in queue:
        queue.remove(seq)
    assert len(queue) == 0


def test_any_order_of_coming_and_going_keeps_the_order_of_age() -> None:
    rng, queue = random.Random(0), AgeQueue()
    here, away = list[Sequence](), [make_sequence((rng.randrange(3), 0.0, i)) for i in range(300)]
    for turn in range(3000):
        source, target = (away, here) if rng.random() < (0.7, 0.3)[turn // 300 % 2] else (here, away)
        if not source:
            continue
        seq = source.pop(rng.randrange(len(source)))
        target.append(seq)
        (queue.add if target is here else queue.remove)(seq)
        here.sort(key=lambda seq: seq.key)
        assert list(queue) == here and len(queue) == len(here) and queue.first(2) == here[:2]
        assert list(reversed(queue)) == here[::-1] and (not here or queue.oldest is here[0])


def seconds_to_remove(num: int) -> float:
    """Of all that wait, in the order of a set."""
    queue, first, seqs = AgeQueue(), make_sequence((0, 0.0, 0)), list[Sequence]()
    for i in range(num):
        seqs.append(copy(first))
        seqs[i].id, seqs[i].key = i, (0, 0.0, i)
        queue.add(seqs[i])
    random.Random(0).shuffle(seqs)
    since = time.thread_time()
    for seq in seqs:
        queue.remove(seq)
    return time.thread_time() - since


def test_to_remove_one_takes_no_longer_where_many_wait() -> None:
    few, many = (min(seconds_to_remove(num) / num for _ in range(3)) for num in (1_000, 50_000))
    assert many < 5 * few, f"{1e6 * many:.1f} us, and {1e6 * few:.1f} where a thousand wait"


def test_a_stranger_cannot_be_removed() -> None:
    queue = AgeQueue()
    queue.add(make_sequence((0, 0.0, 1)))
    with pytest.raises(AssertionError, match="not in the queue"):
        queue.remove(make_sequence((0, 0.0, 1)))
