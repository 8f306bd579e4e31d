"""Sequences that decode in step are planned as one, and nobody can tell from what comes of it."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from pellucid.schedule.chorus import AHEAD, NEIGHBOURS
from pellucid.schedule.plan import StepPlan
from pellucid.schedule.scheduler import Scheduler
from pellucid.types import FinishReason
from tests.schedule.device import BLOCK, Device, make_request, make_scheduler, run_to_end, step

STOP = 77
MOST_UNREAD = make_scheduler().options.most_unread


def scheduler_with(*names: str, max_tokens: int = 40) -> Scheduler:
    scheduler = make_scheduler()
    for name in names:
        scheduler.add(make_request(name, 5, max_tokens=max_tokens))
    return scheduler


def test_its_plans_share_their_rows_and_give_blocks_to_all_at_once_ahead_of_need() -> None:
    scheduler, device = scheduler_with("a", "b", max_tokens=3 * AHEAD), Device()
    for _ in range(3):
        step(scheduler, device)
    plans = [step(scheduler, device)[0] for _ in range(2 * AHEAD)]
    assert all(plan.rows is plans[0].rows for plan in plans) and len(plans[0].rows) == 2
    grown = [plan.grown for plan in plans if plan.grown]
    assert len(grown) == 2 and all(set(growth.slots) == {0, 1} for (growth,) in grown)


def test_without_blocks_to_spare_each_gets_one_when_it_needs_it() -> None:
    num_tokens = 5 + AHEAD + BLOCK
    scheduler, device = make_scheduler(num_blocks=2 * -(-num_tokens // BLOCK)), Device()
    for name in ("a", "b"):
        scheduler.add(make_request(name, 5, max_tokens=num_tokens - 5))
    assert {len(new) for new in run_to_end(scheduler, device).values()} == {num_tokens - 5}
    assert scheduler.counters.num_preemptions == 0


def test_long_texts_are_whole_and_their_blocks_are_published_on_the_way() -> None:
    scheduler, device = make_scheduler(max_model_len=1000, num_blocks=500), Device()
    scheduler.add(make_request("a", 5, max_tokens=3 * MOST_UNREAD))
    for _ in range(2 * MOST_UNREAD):
        step(scheduler, device)
    (seq,) = scheduler.running()
    assert len(seq.tokens) > MOST_UNREAD and seq.table.num_published[0] * BLOCK > MOST_UNREAD - BLOCK
    scheduler.settle()
    assert len(seq.tokens) == 5 + 2 * MOST_UNREAD == seq.num_computed + 1
    positions = range(5, len(seq.tokens))
    assert seq.tokens[5:].tolist() == [device.next_token(seq.id, position) for position in positions]
    update = scheduler.abort("a")
    assert update is not None and scheduler.num_running == 0


@pytest.mark.parametrize(
    "num_seqs", [NEIGHBOURS - 1, 2 * NEIGHBOURS, 2 * NEIGHBOURS + 3, 5 * MOST_UNREAD // 2]
)
def test_each_of_many_reads_once_a_round(num_seqs: int) -> None:
    scheduler = make_scheduler(max_model_len=1000, num_slots=num_seqs, num_blocks=100 * num_seqs, budget=4096)
    device = Device()
    for i in range(num_seqs):
        scheduler.add(make_request(str(i), 5, max_tokens=4 * MOST_UNREAD, is_quiet=i % 3 > 0))
    told: list[str] = []
    for _ in range(2 * MOST_UNREAD + 7):
        told += [update.request_id for update in step(scheduler, device)[1]]
    assert min(len(seq.tokens) for seq in scheduler.running()) > MOST_UNREAD
    scheduler.settle()
    for seq in scheduler.running():
        positions = range(5, 5 + 2 * MOST_UNREAD + 7)
        assert seq.tokens[5:].tolist() == [device.next_token(seq.id, position) for position in positions]
    num_streams = -(-num_seqs // 3)
    assert len(told) == num_streams * (2 * MOST_UNREAD + 7) + num_seqs - num_streams


def test_a_failure_answers_with_all_that_has_landed() -> None:
    scheduler, device = make_scheduler(), Device()
    scheduler.add(make_request("a", 5, max_tokens=40, is_quiet=True))
    updates = [update for _ in range(12) for update in step(scheduler, device)[1]]
    updates += scheduler.fail_all("it failed")
    assert sum(len(update.new_token_ids) for update in updates) == 12


def test_an_arrival_is_admitted_at_once_and_sings_along_later() -> None:
    scheduler, device = scheduler_with("a", "b"), Device()
    for _ in range(6):
        step(scheduler, device)
    scheduler.add(make_request("c", 5, max_tokens=40))
    plan, _ = step(scheduler, device)
    assert [row.num_query for row in plan.rows] == [1, 1, 5]
    for _ in range(3):
        step(scheduler, device)
    first, second = step(scheduler, device)[0], step(scheduler, device)[0]
    assert first.rows is second.rows and len(first.rows) == 3


def test_one_that_leaves_takes_the_counts_of_its_rows_in_flight_with_it() -> None:
    scheduler, device = scheduler_with("a", "b"), Device()
    for _ in range(6):
        step(scheduler, device)
    plans: list[StepPlan] = [plan for _ in range(3) if (plan := scheduler.next_plan())]
    update = scheduler.abort("a")
    assert update is not None and update.finish_reason is FinishReason.ABORT
    scheduler.check(plans)
    updates = [scheduler.commit(plan, device.run(plan)) for plan in plans]
    assert [[update.request_id for update in each] for each in updates] == [["b"]] * 3
    scheduler.check([])


def test_a_failure_while_it_reads_is_answered_all_the_same() -> None:
    scheduler, device = make_scheduler(), Device()
    for name in ("a", "b"):
        scheduler.add(make_request(name, 5, max_tokens=40, is_quiet=True))
    told = {"a": 0, "b": 0}
    for _ in range(12):
        for update in step(scheduler, device)[1]:
            told[update.request_id] += len(update.new_token_ids)
    with patch.object(scheduler.kv, "publish", side_effect=MemoryError), pytest.raises(MemoryError):
        scheduler.settle()
    for update in scheduler.fail_all("it failed"):
        told[update.request_id] += len(update.new_token_ids)
    assert told == {"a": 12, "b": 12}


def test_a_stop_token_ends_one_of_them() -> None:
    scheduler = scheduler_with("a")
    scheduler.add(make_request("b", 5, max_tokens=40, eos=(STOP,)))
    device = Device(next_token=lambda seq_id, position: STOP if (seq_id, position) == (1, 20) else 1)
    tokens = run_to_end(scheduler, device)
    assert tokens == {"a": [1] * 40, "b": [1] * 15 + [STOP]}


def test_all_end_at_their_limits() -> None:
    scheduler = scheduler_with("a", "b")
    scheduler.add(make_request("c", 5, max_tokens=31))
    tokens = run_to_end(scheduler, Device())
    assert {name: len(new) for name, new in tokens.items()} == {"a": 40, "b": 40, "c": 31}
