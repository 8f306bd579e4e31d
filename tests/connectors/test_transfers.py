"""Blocks lent to a connector: asked for once, held until it says so, and nobody else's meanwhile."""

from __future__ import annotations

import pytest

from pellucid.schedule.plan import StepResult
from pellucid.types import FinishReason
from tests.schedule.device import Device, make_request, make_scheduler, run_to_end, step
from tests.schedule.store import Store


def test_a_request_waits_for_its_load_without_slot_and_then_computes_the_rest() -> None:
    store, device = Store(num_tokens=8), Device()
    scheduler = make_scheduler(connector=store)
    scheduler.add(make_request("a", 10))
    plan = scheduler.next_plan()
    assert plan and plan.kv_meta and not plan.rows, "a plan with nothing but the load is submitted, too"
    scheduler.commit(plan, StepResult(plan_id=plan.id))
    assert scheduler.next_plan() is None and scheduler.num_running == 0 and scheduler.has_transfers
    store.end()
    scheduler.poll()
    plan, updates = step(scheduler, device)
    assert plan.admitted[0].num_computed == 8 and updates[0].num_cached_tokens == 8


def test_a_load_never_covers_the_last_token() -> None:
    store = Store(num_tokens=8)
    scheduler = make_scheduler(connector=store)
    scheduler.add(make_request("a", 8))
    scheduler.next_plan()
    assert store.active[0].num_tokens == 4


def test_a_load_that_failed_means_recompute_and_is_not_tried_again() -> None:
    store, device = Store(num_tokens=8), Device()
    scheduler = make_scheduler(connector=store)
    scheduler.add(make_request("a", 10))
    step(scheduler, device)
    store.end(ok=False)
    scheduler.poll()
    plan, _ = step(scheduler, device)
    assert plan.admitted[0].num_computed == 0 and store.num_lookups == 1
    run_to_end(scheduler, device)
    assert scheduler.kv.usage == 0


@pytest.mark.parametrize("ok", [True, False])
def test_an_aborted_request_leaves_its_blocks_to_the_load_until_it_has_ended(ok: bool) -> None:
    store, device = Store(num_tokens=8), Device()
    scheduler = make_scheduler(connector=store, num_blocks=16)
    scheduler.add(make_request("a", 10))
    step(scheduler, device)
    update = scheduler.abort("a")
    assert update and update.finish_reason is FinishReason.ABORT
    assert scheduler.kv.usage == 2 / 16 and scheduler.has_transfers and not scheduler.has_unfinished
    store.end(ok)
    scheduler.poll()
    assert scheduler.kv.usage == 0 and not scheduler.has_transfers


def test_a_promise_of_nothing_new_is_asked_for_once() -> None:
    store, device = Store(num_tokens=0), Device()
    scheduler = make_scheduler(connector=store, num_slots=1)
    scheduler.add(make_request("a", 10, max_tokens=1))
    run_to_end(scheduler, device)
    assert store.num_lookups == 1


def test_blocks_that_are_saved_outlive_their_sequence() -> None:
    store, device = Store(saves=True), Device()
    scheduler = make_scheduler(connector=store)
    scheduler.add(make_request("a", 10, max_tokens=1))
    run_to_end(scheduler, device)
    assert len(store.active[0].pages) == 2, "full blocks only"
    assert scheduler.kv.usage == 2 / 100
    plan = scheduler.next_plan()
    assert plan and plan.kv_meta == [*store.active] and plan.retired == [0]
    store.end()
    scheduler.commit(plan, StepResult(plan_id=plan.id))
    assert scheduler.kv.usage == 0


def test_while_a_load_holds_the_blocks_the_others_wait_and_do_not_fail() -> None:
    store, device = Store(num_tokens=16), Device()
    scheduler = make_scheduler(connector=store, num_blocks=5, max_model_len=20)
    scheduler.add(make_request("a", 18, max_tokens=2))
    step(scheduler, device)
    store.num_tokens = 0
    scheduler.add(make_request("b", 10, max_tokens=2))
    assert scheduler.next_plan() is None, "1 block is free, 3 are needed"
    store.end()
    scheduler.poll()
    assert {name: len(t) for name, t in run_to_end(scheduler, device).items()} == {"a": 2, "b": 2}
