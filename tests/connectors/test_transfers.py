"""Blocks lent to a connector: asked for once, held until every rank says so, and nobody else's meanwhile."""

from __future__ import annotations

import pytest

from pellucid.connectors.base import KEEP, Ended, Jobs
from pellucid.schedule.plan import StepPlan, StepResult
from pellucid.types import FinishReason
from tests.schedule.device import Device, make_request, make_scheduler, run_to_end, step
from tests.schedule.store import Store, StoreTransfer


def jobs_of(plan: StepPlan | None) -> Jobs:
    assert plan is not None
    ride = plan.ride["kv_transfer"]
    assert isinstance(ride, Jobs)
    return ride


def test_a_request_waits_for_its_load_without_slot_and_then_computes_the_rest() -> None:
    door, device = StoreTransfer(Store(num_tokens=8)), Device()
    scheduler = make_scheduler(store=door)
    scheduler.add(make_request("a", 10))
    plan = scheduler.next_plan()
    assert plan and not plan.rows, "a plan with nothing but the load is submitted, too"
    (job,) = jobs_of(plan).jobs
    assert job.is_load and len(job.pages) == 2 and job.what == {"load": 2}
    scheduler.commit(plan, StepResult(plan_id=plan.id))
    assert scheduler.next_plan() is None and scheduler.num_running == 0 and scheduler.features.are_busy
    door.say_all()
    assert not scheduler.features.are_busy
    plan, updates = step(scheduler, device)
    assert plan.admitted[0].num_computed == 8 and updates[0].num_cached_tokens == 8


def test_a_load_never_covers_the_last_token() -> None:
    store = Store(num_tokens=8)
    scheduler = make_scheduler(store=StoreTransfer(store))
    scheduler.add(make_request("a", 8))
    scheduler.next_plan()
    assert store.active[0].num_tokens == 4


def test_a_transfer_has_ended_when_every_rank_has_said_so_and_one_failure_is_its() -> None:
    store = Store(num_tokens=8)
    door = StoreTransfer(store, num_ranks=3)
    scheduler = make_scheduler(store=door)
    scheduler.add(make_request("a", 10))
    number = jobs_of(scheduler.next_plan()).jobs[0].number
    for rank, ok, seconds in ((2, True, 1.0), (0, False, 3.0)):
        door.hear(rank, Ended(number, ok, seconds))
        assert store.active and scheduler.kv.usage > 0
    door.hear(1, Ended(number, True))
    assert [(each.copy_seconds, ok) for each, ok in store.over] == [(3.0, False)] and scheduler.kv.usage == 0
    assert not scheduler.kv.pool.num_cached, "one rank's part is missing"


def test_a_load_that_failed_means_recompute_and_is_not_tried_again() -> None:
    store, device = Store(num_tokens=8), Device()
    door = StoreTransfer(store)
    scheduler = make_scheduler(store=door)
    scheduler.add(make_request("a", 10))
    step(scheduler, device)
    assert door.say_all(ok=False) == {}
    plan, _ = step(scheduler, device)
    assert plan.admitted[0].num_computed == 0 and store.num_lookups == 1
    run_to_end(scheduler, device)
    assert scheduler.kv.usage == 0


def test_or_it_ends_the_request_if_that_is_the_policy() -> None:
    door = StoreTransfer(Store(num_tokens=8), fails=True)
    scheduler = make_scheduler(store=door)
    scheduler.add(make_request("a", 10))
    step(scheduler, Device())
    (error,) = door.say_all(ok=False).items()
    assert error[0] == "a" and "could not be loaded" in (error[1] or "")


@pytest.mark.parametrize("fails", [False, True])
def test_a_load_that_never_comes_is_given_up_and_keeps_its_pages(fails: bool) -> None:
    store, device = Store(num_tokens=8), Device()
    door = StoreTransfer(store, fails=fails)
    scheduler, now = make_scheduler(store=door, num_blocks=16), [0.0]
    door.clock = lambda: now[0]  # type: ignore[method-assign]
    scheduler.add(make_request("a", 10))
    step(scheduler, device)
    now[0] = door.seconds - 1
    assert door.poll() == {} and scheduler.next_plan() is None
    now[0] = door.seconds
    assert list(door.poll()) == ["a"] * fails and door.poll() == {}
    if fails:
        scheduler.abort("a")
    scheduler.add(make_request("b", 10))
    run_to_end(scheduler, device)
    assert store.num_lookups == 1, "one that may hang is asked for nothing"
    assert door.counters()["kv_loads_late_now"] == 1
    assert scheduler.kv.usage == 2 / 16 and scheduler.features.are_busy, "workers may still write there"
    num_cached = scheduler.kv.pool.num_cached
    door.say_all()
    assert scheduler.kv.usage == 0 and not scheduler.features.are_busy
    assert door.counters()["kv_loads_late_now"] == 0
    assert scheduler.kv.pool.num_cached == num_cached, "what comes too late is not published"
    scheduler.add(make_request("c", 10))
    step(scheduler, device)
    assert store.num_lookups == 2


@pytest.mark.parametrize("ok", [True, False])
def test_an_aborted_request_leaves_its_blocks_to_the_load_until_it_has_ended(ok: bool) -> None:
    door, device = StoreTransfer(Store(num_tokens=8), num_ranks=2), Device()
    scheduler = make_scheduler(store=door, num_blocks=16)
    scheduler.add(make_request("a", 10))
    step(scheduler, device)
    update = scheduler.abort("a")
    assert update and update.finish_reason is FinishReason.ABORT
    door.say_all(ok=ok, ranks=1)
    assert scheduler.kv.usage == 2 / 16 and scheduler.features.are_busy and not scheduler.has_unfinished
    door.say_all(ok=ok, ranks=1)
    assert scheduler.kv.usage == 0 and not scheduler.features.are_busy


def test_a_promise_of_nothing_new_is_asked_for_once() -> None:
    store, device = Store(num_tokens=0), Device()
    scheduler = make_scheduler(store=StoreTransfer(store), num_slots=1)
    scheduler.add(make_request("a", 10, max_tokens=1))
    run_to_end(scheduler, device)
    assert store.num_lookups == 1


def test_blocks_that_are_saved_outlive_their_sequence() -> None:
    store, device = Store(saves=True), Device()
    door = StoreTransfer(store)
    scheduler = make_scheduler(store=door)
    scheduler.add(make_request("a", 10, max_tokens=1))
    run_to_end(scheduler, device)
    assert len(store.active[0].pages) == 2, "full blocks only"
    assert scheduler.kv.usage == 2 / 100
    plan = scheduler.next_plan()
    (job,) = jobs_of(plan).jobs
    assert plan and not job.is_load and plan.retired == [0]
    scheduler.commit(plan, StepResult(plan_id=plan.id))
    door.say_all()
    assert scheduler.kv.usage == 0


def test_blocks_that_are_kept_are_held_without_a_job_until_the_connector_lets_go_of_them() -> None:
    store, device = Store(saves=True, keeps=KEEP), Device()
    door = StoreTransfer(store)
    scheduler = make_scheduler(store=door)
    scheduler.add(make_request("a", 10, max_tokens=1))
    run_to_end(scheduler, device)
    assert scheduler.next_plan() is None and scheduler.kv.usage == 2 / 100 and scheduler.features.are_busy
    door.end(store.active[0])
    assert scheduler.kv.usage == 0 and not scheduler.features.are_busy


def test_what_can_be_found_is_offered_once_what_a_load_brings_included() -> None:
    store, device = Store(num_tokens=4), Device()
    door = StoreTransfer(store)
    scheduler = make_scheduler(store=door)
    scheduler.add(make_request("a", 13, max_tokens=1))
    step(scheduler, device)
    door.say_all()
    assert len(store.published_digests) == 1
    run_to_end(scheduler, device)
    assert len(store.published_digests) == len(set(store.published_digests)) == 3


def test_a_job_without_pages_goes_with_the_next_plan() -> None:
    store = Store()
    door = StoreTransfer(store)
    scheduler = make_scheduler(store=door)
    store.active.append(door.start({"write": 7}))
    assert scheduler.features.are_busy
    plan = scheduler.next_plan()
    assert jobs_of(plan).jobs[0].what == {"write": 7} and not scheduler.features.are_busy
    door.say_all()
    assert len(store.over) == 1


def test_what_is_loaded_while_prefixes_are_forgotten_is_not_found() -> None:
    store, device = Store(num_tokens=8), Device()
    door = StoreTransfer(store)
    scheduler = make_scheduler(store=door)
    scheduler.add(make_request("a", 10))
    step(scheduler, device)
    scheduler.clear_prefix_cache()
    assert store.num_forgotten == 1
    door.say_all()
    plan, _ = step(scheduler, device)
    assert plan.admitted[0].num_computed == 0


def test_while_a_load_holds_the_blocks_the_others_wait_and_do_not_fail() -> None:
    store, device = Store(num_tokens=16), Device()
    door = StoreTransfer(store)
    scheduler = make_scheduler(store=door, num_blocks=5, max_model_len=20)
    scheduler.add(make_request("a", 18, max_tokens=2))
    step(scheduler, device)
    store.num_tokens = 0
    scheduler.add(make_request("b", 10, max_tokens=2))
    assert scheduler.next_plan() is None, "1 block is free, 3 are needed"
    door.say_all()
    assert {name: len(t) for name, t in run_to_end(scheduler, device).items()} == {"a": 2, "b": 2}
