"""A queue in the order of age."""

from __future__ import annotations

import pytest

from pellucid.kv.manager import BlockTable
from pellucid.schedule.queue import AgeQueue
from pellucid.schedule.sequence import Key, Sequence
from tests.schedule.device import make_request


def make_sequence(key: Key) -> Sequence:
    return Sequence(
        id=key[2],
        request=make_request(str(key[2])),
        key=key,
        limit=8,
        table=BlockTable(b"", {}, [], []),
        prompt_len=5,
        tokens=[1, 2, 3, 4, 5],
        host_bound=False,
        stop_token_ids=frozenset(),
        min_len=5,
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
    assert queue.oldest is seqs[1]
    queue.add(seqs[0])
    assert queue.oldest is seqs[0] and len(queue) == 3


def test_the_loop_over_a_queue_may_change_it() -> None:
    queue = AgeQueue()
    for i in range(4):
        queue.add(make_sequence((0, 0.0, i)))
    for seq in queue:
        queue.remove(seq)
    assert len(queue) == 0


def test_a_stranger_cannot_be_removed() -> None:
    queue = AgeQueue()
    queue.add(make_sequence((0, 0.0, 1)))
    with pytest.raises(AssertionError, match="not in the queue"):
        queue.remove(make_sequence((0, 0.0, 1)))
