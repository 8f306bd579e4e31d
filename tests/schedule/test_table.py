"""Sequences in columns: what is counted for all at once is what each one, looked at alone, would have."""

from __future__ import annotations

import mmap
import random
import sys
from collections import deque
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from pellucid.sampling_params import SamplingParams
from pellucid.schedule.plan import StepPlan
from pellucid.schedule.scheduler import UPKEEP, Scheduler
from pellucid.schedule.sequence import Sequence
from pellucid.schedule.step import deal
from pellucid.schedule.stop_tokens import FEW, StopTokens
from pellucid.schedule.table import Table
from pellucid.types import FinishReason
from tests.schedule.device import BLOCK, Device, make_request, make_scheduler, run_to_end, step

STOP = 77


def scheduler_with(*names: str, max_tokens: int = 40) -> Scheduler:
    scheduler = make_scheduler()
    for name in names:
        scheduler.add(make_request(name, 5, max_tokens=max_tokens))
    return scheduler


# Blocks


def published(scheduler: Scheduler, seq: Sequence) -> int:
    """Tokens whose blocks have been offered."""
    return int(scheduler.kv.publish_at[seq.slot]) - BLOCK


def test_blocks_are_taken_for_all_at_once_and_ahead_of_need() -> None:
    scheduler, device = scheduler_with("a", "b", max_tokens=7 * UPKEEP), Device()
    for _ in range(UPKEEP + 3):
        step(scheduler, device)
    plans = [step(scheduler, device)[0] for _ in range(3 * UPKEEP)]
    assert all(plan.rows.slots is plans[0].rows.slots for plan in plans)
    grown = [plan for plan in plans if len(plan.grown.slots)]
    assert [later.id - plan.id for plan, later in pairwise(grown)] == [UPKEEP] * (len(grown) - 1)
    assert len(grown) == 3 and all(set(plan.grown.slots) == {0, 1} for plan in grown)


def test_without_blocks_to_spare_each_gets_one_when_it_needs_it() -> None:
    num_tokens = 5 + 3 * UPKEEP + BLOCK
    scheduler, device = make_scheduler(num_blocks=2 * -(-num_tokens // BLOCK)), Device()
    for name in ("a", "b"):
        scheduler.add(make_request(name, 5, max_tokens=num_tokens - 5))
    assert {len(new) for new in run_to_end(scheduler, device).values()} == {num_tokens - 5}
    assert scheduler.counters.num_preemptions == 0


def test_long_texts_are_whole_and_their_blocks_are_published_on_the_way() -> None:
    scheduler, device = make_scheduler(max_model_len=1000, num_blocks=500), Device()
    scheduler.add(make_request("a", 5, max_tokens=900))
    for _ in range(500):
        step(scheduler, device)
    (seq,) = scheduler.running()
    tokens = scheduler.table.tokens(seq.slot)
    assert tokens[5:].tolist() == [device.next_token(seq.id, position) for position in range(5, 505)]
    assert 504 - UPKEEP - BLOCK < published(scheduler, seq) <= 504
    assert scheduler.abort("a") is not None and scheduler.num_running == 0


def test_of_many_overdue_blocks_each_is_published_in_time_and_few_at_once() -> None:
    num_seqs = 64
    scheduler = make_scheduler(max_model_len=1000, num_slots=num_seqs, num_blocks=8000, budget=4096)
    device = Device()
    for i in range(num_seqs):
        scheduler.add(make_request(str(i), 5, max_tokens=900, is_quiet=i % 3 > 0))
    at_once = list[int]()
    for _ in range(400):
        before = [published(scheduler, seq) for seq in scheduler.running()]
        step(scheduler, device)
        after = [published(scheduler, seq) for seq in scheduler.running()]
        at_once.append(sum(a > b for a, b in zip(after, before, strict=False)))
    assert max(at_once[2:]) == num_seqs // 16, "no step publishes for many"
    longest_wait = UPKEEP * 16 + UPKEEP
    assert min(published(scheduler, seq) for seq in scheduler.running()) > 400 - longest_wait - BLOCK


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_all_that_decode_publish_whatever_they_ask_for_and_wherever_they_are_planned(pp: int) -> None:
    scheduler, device = make_scheduler(pp=pp, max_model_len=1000, num_blocks=2000), Device()
    for name in "abcd":
        sampling = SamplingParams(max_tokens=900, logprobs=1 if name < "c" else None)
        scheduler.add(make_request(name, 5, sampling=sampling))
    inflight: deque[StepPlan] = deque()
    while not scheduler.num_running or min(scheduler.table.computed[:4]) < 200:
        if plan := scheduler.next_plan():
            inflight.append(plan)
        if inflight and (len(inflight) == pp or plan is None):
            scheduler.commit(inflight[0], device.run(inflight.popleft()))
    least = min(published(scheduler, seq) for seq in scheduler.running())
    assert least >= 200 - pp * UPKEEP - BLOCK


def test_a_row_that_grows_for_its_token_and_for_its_drafts_gets_its_blocks_side_by_side() -> None:
    scheduler, device = make_scheduler(num_spec=4, num_blocks=10, num_slots=3), Device()
    for name, num_tokens in (("a", 3), ("b", 4), ("c", 2)):
        scheduler.add(make_request(name, num_tokens, max_tokens=30))
    twice = 0
    for _ in range(12):
        plan, _ = step(scheduler, device)
        slots = plan.grown.slots.tolist()
        twice += len(set(slots)) < len(slots)
        assert slots == sorted(slots)
    assert twice, "no plan had two blocks for one slot"


def test_who_leaves_publishes_what_has_landed() -> None:
    scheduler, device = make_scheduler(max_model_len=64), Device()
    scheduler.add(make_request("a", 5, max_tokens=2 * UPKEEP - 1))
    tokens = run_to_end(scheduler, device)["a"]
    prompt = [*make_request("a", 5).prompt_token_ids, *tokens, 1]
    scheduler.add(make_request("b", prompt))
    plan, _ = step(scheduler, device)
    assert plan.admitted[0].num_computed == (5 + len(tokens) - 1) // BLOCK * BLOCK


# Who waits, comes and goes


def test_who_waits_for_blocks_disturbs_nobody_and_comes_in_when_there_are_some() -> None:
    scheduler, device = make_scheduler(num_blocks=26), Device()
    for name, num_tokens in (("a", 20), ("b", 20), ("c", 5)):
        scheduler.add(make_request(name, num_tokens, max_tokens=30))
    scheduler.add(make_request("head", 60, max_tokens=4))
    for _ in range(4):
        step(scheduler, device)
    plans = [step(scheduler, device)[0] for _ in range(3)]
    scheduler.add(make_request("next", 5, max_tokens=9))  # there are blocks for this one
    plans += [step(scheduler, device)[0] for _ in range(3)]
    assert all(plan.rows.slots is plans[0].rows.slots for plan in plans) and len(plans[0].rows) == 3
    scheduler.abort("a")
    scheduler.abort("b")
    plan, _ = step(scheduler, device)
    assert [device.seq_ids[row.slot] for row in plan.rows] == [2, 3, 4]


def test_decodes_have_the_whole_budget_while_nobody_can_come_in() -> None:
    scheduler, device = make_scheduler(num_blocks=20, budget=4, num_slots=5), Device()
    for name in "abcd":
        scheduler.add(make_request(name, 4, max_tokens=9))
    for _ in range(5):
        step(scheduler, device)
    scheduler.add(make_request("head", 50, max_tokens=9))
    step(scheduler, device)
    assert len(step(scheduler, device)[0].rows) == 4


def test_a_blocked_head_that_goes_lets_the_next_one_in() -> None:
    scheduler, device = make_scheduler(num_blocks=14), Device()
    scheduler.add(make_request("a", 5, max_tokens=40))
    scheduler.add(make_request("head", 50, max_tokens=2))
    scheduler.add(make_request("small", 5, max_tokens=2))
    for _ in range(5):
        assert len(step(scheduler, device)[0].rows) == 1
    scheduler.abort("head")
    assert len(step(scheduler, device)[0].rows) == 2


def test_rows_in_flight_of_one_that_leaves_are_nobodys() -> None:
    scheduler, device = scheduler_with("a", "b"), Device()
    for _ in range(6):
        step(scheduler, device)
    plans: list[StepPlan] = [plan for _ in range(3) if (plan := scheduler.next_plan())]
    update = scheduler.abort("a")
    assert update is not None and update.finish_reason is FinishReason.ABORT
    scheduler.check(plans)
    news = [scheduler.commit(plan, device.run(plan)).one_by_one() for plan in plans]
    assert [[update.request_id for update in each] for each in news] == [["b"]] * 3
    scheduler.check([])


def test_a_failure_answers_with_all_that_has_landed() -> None:
    scheduler, device = make_scheduler(), Device()
    scheduler.add(make_request("a", 5, max_tokens=40, is_quiet=True))
    updates = [update for _ in range(12) for update in step(scheduler, device)[1]]
    updates += scheduler.fail_all("it failed")
    assert sum(len(update.new_token_ids) for update in updates) == 12


# Ends


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


def test_nobody_is_looked_at_for_anothers_stop_token() -> None:
    scheduler = make_scheduler(num_slots=8)
    scheduler.add(make_request("stops", 5, sampling=SamplingParams(max_tokens=40, stop_token_ids=[STOP])))
    for i in range(7):
        scheduler.add(make_request(str(i), 5, max_tokens=40, is_quiet=True))
    device = Device(next_token=lambda seq_id, position: STOP if seq_id else 1)
    for _ in range(4):
        step(scheduler, device)
    with patch.object(scheduler, "_land_row", side_effect=AssertionError("looked at")):
        _, updates = step(scheduler, device)
    assert [update.request_id for update in updates] == ["stops"]


@pytest.mark.parametrize("num_ids", [0, 1, FEW, 5 * FEW, 200])
def test_no_stop_token_is_overlooked_while_somebody_has_it(num_ids: int) -> None:
    rng, stops = random.Random(num_ids), StopTokens()
    sets = [frozenset(rng.choices([-1, *range(500), 151_645], k=2)) for _ in range(num_ids)]
    for ids in sets:
        stops.add(ids)
    for ids in sets[: num_ids // 2]:
        stops.remove(ids)
    left = set().union(*sets[num_ids // 2 :])
    tokens = np.array([[rng.choice([*range(500), 151_645, 151_644]) for _ in range(3)] for _ in range(300)])
    expected = [bool(left & set(row)) for row in tokens.tolist()]
    assert stops.are_in(tokens.astype(np.int32)).tolist() == expected
    assert bool(stops) == (len(left) > 0)


# Columns


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_tokens_take_memory_for_those_that_there_are() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = resident()
    scheduler = make_scheduler(num_slots=512, max_model_len=1 << 20, num_blocks=300_000, budget=1 << 14)
    for i in range(512):
        scheduler.add(make_request(str(i), 8, max_tokens=9))
    plan, _ = step(scheduler, Device())
    assert len(plan.rows) == 512 and resident() - before < 64 << 20


@pytest.mark.parametrize("width", [1, 2, 5])
def test_landed_tokens_lie_where_they_belong(width: int) -> None:
    table, rng = Table(num_slots=6, max_len=40, most_new=width), np.random.default_rng(width)
    expected = np.zeros_like(table.token_ids)
    for _ in range(50):
        slots = rng.permutation(6)[: rng.integers(1, 6)]
        starts = rng.integers(0, 40, len(slots))
        tokens = rng.integers(1, 1000, (len(slots), width)).astype(np.int32)
        table.land(slots, starts, tokens)
        for slot, start, row in zip(slots, starts, tokens, strict=True):
            expected[slot, start : start + width] = row
        assert (table.token_ids == expected).all()


@pytest.mark.parametrize("seed", range(20))
def test_drafts_are_dealt_in_rounds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    wanted, left = rng.integers(0, 6, 12), int(rng.integers(0, 40))
    dealt = deal(wanted, left)
    assert dealt.sum() == min(left, wanted.sum()) and (dealt <= wanted).all()
    for mine, my_wish in zip(dealt, wanted, strict=True):
        assert mine == my_wish or mine >= dealt.max() - 1, "who wants more has hardly fewer than another"
