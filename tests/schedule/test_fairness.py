"""Nobody starves: neither prompts beside decodes, nor decodes beside prompts, nor one decode beside many."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.schedule.device import Device, make_request, make_scheduler, step


@pytest.mark.parametrize("budget,num_seqs", [(2, 7), (5, 17), (16, 40)])
def test_each_decode_has_its_turn_when_the_budget_is_smaller_than_their_number(
    budget: int, num_seqs: int
) -> None:
    scheduler = make_scheduler(num_slots=num_seqs, budget=budget, num_blocks=2000)
    device = Device()
    for i in range(num_seqs):
        scheduler.add(make_request(f"r{i}", 1, max_tokens=None))
    while scheduler.num_waiting:
        step(scheduler, device)
    rounds = -(-num_seqs // budget)
    for _ in range(3):
        turns = Counter(row.slot for _ in range(rounds) for row in step(scheduler, device)[0].rows)
        assert len(turns) == num_seqs, "within as many steps as it takes at least, everybody had a turn"


@pytest.mark.parametrize("num_spec", [0, 3])
def test_a_prompt_goes_on_while_decodes_fill_the_budget(num_spec: int) -> None:
    scheduler, device = make_scheduler(num_slots=20, budget=16, num_blocks=500, num_spec=num_spec), Device()
    for i in range(16):
        scheduler.add(make_request(f"decode{i}", 1, max_tokens=None))
    step(scheduler, device)
    scheduler.add(make_request("prompt", 20))
    chunks = list[int]()
    while sum(chunks) < 20:
        plan, _ = step(scheduler, device)
        chunks += [row.num_query for row in plan.rows if row.slot == 16]
        assert sum(row.num_query for row in plan.rows) <= 16
    assert chunks == [2] * 10, "an eighth of the budget, each step"


def test_decodes_go_on_while_prompts_fill_the_budget() -> None:
    scheduler, device = make_scheduler(num_slots=20, budget=8, num_blocks=500), Device()
    scheduler.add(make_request("decode", 4, max_tokens=None))
    step(scheduler, device)
    for i in range(5):
        scheduler.add(make_request(f"prompt{i}", 30, max_tokens=1))
    for _ in range(15):
        plan, updates = step(scheduler, device)
        assert plan.rows[0].slot == 0 and "decode" in [update.request_id for update in updates]


def test_no_budget_is_kept_for_prompts_that_cannot_enter() -> None:
    scheduler, device = make_scheduler(num_slots=4, budget=4), Device()
    for i in range(5):
        scheduler.add(make_request(f"r{i}", 1, max_tokens=None))
    step(scheduler, device)
    assert len(step(scheduler, device)[0].rows) == 4


def test_drafts_are_dealt_out_evenly_where_the_budget_ends() -> None:
    scheduler, device = make_scheduler(num_spec=3, budget=6), Device()
    for name in "ab":
        scheduler.add(make_request(name, 2, max_tokens=None))
    step(scheduler, device)
    assert [row.num_query for row in step(scheduler, device)[0].rows] == [3, 3]


def num_steps(num_spec: int, num_prompt: int, accept: int = 0) -> int:
    """Of 32 requests of 40 tokens, of which a step has room for 32."""
    scheduler = make_scheduler(num_slots=32, budget=32, num_blocks=2000, num_spec=num_spec, max_model_len=200)
    device = Device(accept=accept)
    for i in range(32):
        scheduler.add(make_request(f"r{i}", num_prompt, max_tokens=40))
    for num in range(1, 1000):
        step(scheduler, device)
        if not scheduler.has_unfinished:
            return num
    raise AssertionError("they do not end")


@pytest.mark.parametrize("num_prompt", [2, 10, 100])
@pytest.mark.parametrize("accept", [0, 1, 4])
def test_drafts_never_take_the_place_of_a_token_that_is_sure(num_prompt: int, accept: int) -> None:
    assert num_steps(4, num_prompt, accept) <= num_steps(0, num_prompt)


def test_drafts_have_what_decodes_and_prompts_leave() -> None:
    scheduler, device = make_scheduler(num_spec=3, budget=16, max_model_len=64), Device()
    for name in "ab":
        scheduler.add(make_request(name, 2, max_tokens=None))
    step(scheduler, device)
    scheduler.add(make_request("c", 10))
    plan, _ = step(scheduler, device)
    assert [(row.num_query, row.num_draft) for row in plan.rows] == [(3, 2), (3, 2), (10, 0)]


def test_first_come_first_served() -> None:
    scheduler, device = make_scheduler(num_slots=1), Device()
    for name, arrival in (("a", 3.0), ("b", 1.0), ("c", 2.0)):
        scheduler.add(make_request(name, max_tokens=1, arrival=arrival, priority=-int(arrival)))
    order = [update.request_id for _ in range(3) for update in step(scheduler, device)[1]]
    assert order == ["a", "b", "c"]


def test_under_the_priority_policy_the_lower_number_goes_first_then_the_earlier_arrival() -> None:
    scheduler, device = make_scheduler(num_slots=1, policy="priority"), Device()
    for name, priority, arrival in (("a", 1, 1.0), ("b", 0, 3.0), ("c", 0, 2.0)):
        scheduler.add(make_request(name, max_tokens=1, priority=priority, arrival=arrival))
    order = [update.request_id for _ in range(3) for update in step(scheduler, device)[1]]
    assert order == ["c", "b", "a"]
