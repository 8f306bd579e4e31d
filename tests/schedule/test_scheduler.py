"""What a plan contains, what ends a request, and what happens when blocks or slots run out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from pellucid.features.base import HostFeature
from pellucid.sampling_params import SamplingParams
from pellucid.schedule.plan import Row, StepPlan
from pellucid.schedule.scheduler import UPKEEP, Scheduler, SchedulerOptions
from pellucid.schedule.sequence import Sequence
from pellucid.types import FinishReason, Request
from tests.schedule.device import BLOCK, Device, make_request, make_scheduler, run_to_end, step


def shape(row: Row) -> tuple[int, int, int]:
    return row.num_query, row.num_draft, row.num_logits


# The vocabulary of work


def test_a_prompt_is_computed_at_once_if_it_fits_and_its_last_token_samples() -> None:
    scheduler, device = make_scheduler(), Device()
    scheduler.add(make_request("a", 5))
    plan, updates = step(scheduler, device)
    assert [shape(row) for row in plan.rows] == [(5, 0, 1)]
    assert [len(update.new_token_ids) for update in updates] == [1]
    plan, _ = step(scheduler, device)
    assert [shape(row) for row in plan.rows] == [(1, 0, 1)] and not plan.admitted


def test_a_long_prompt_is_computed_in_chunks_of_which_only_the_last_samples() -> None:
    scheduler, device = make_scheduler(budget=8), Device()
    scheduler.add(make_request("a", 20))
    plans = [step(scheduler, device)[0] for _ in range(3)]
    assert [shape(plan.rows[0]) for plan in plans] == [(8, 0, 0), (8, 0, 0), (4, 0, 1)]


def test_chunks_ride_beside_decodes_and_decodes_come_first() -> None:
    scheduler, device = make_scheduler(budget=8), Device()
    scheduler.add(make_request("a", 4))
    step(scheduler, device)
    scheduler.add(make_request("b", 20))
    plan, updates = step(scheduler, device)
    assert [shape(row) for row in plan.rows] == [(1, 0, 1), (7, 0, 0)]
    assert [update.request_id for update in updates] == ["a"]


def test_chunks_of_one_prompt_may_be_in_flight_together() -> None:
    scheduler = make_scheduler(budget=8)
    scheduler.add(make_request("a", 20))
    plans = [scheduler.next_plan() for _ in range(3)]
    assert [shape(plan.rows[0]) for plan in plans if plan] == [(8, 0, 0), (8, 0, 0), (4, 0, 1)]
    scheduler.check([plan for plan in plans if plan])


def test_a_decode_row_is_planned_before_the_last_one_came_home() -> None:
    scheduler, device = make_scheduler(), Device()
    scheduler.add(make_request("a", 5, max_tokens=3))
    plans = [scheduler.next_plan() for _ in range(3)]
    assert [shape(plan.rows[0]) for plan in plans if plan] == [(5, 0, 1), (1, 0, 1), (1, 0, 1)]
    assert scheduler.next_plan() is None, "the rows in flight finish it"
    news = [scheduler.commit(plan, device.run(plan)).one_by_one() for plan in plans if plan]
    assert news[-1][0].finish_reason is FinishReason.LENGTH


def test_of_those_that_decode_the_longest_have_the_first_rows() -> None:
    scheduler, device = make_scheduler(), Device()
    for name, num_tokens in (("a", 5), ("b", 9), ("c", 2)):
        scheduler.add(make_request(name, num_tokens, max_tokens=None))
    step(scheduler, device)
    scheduler.add(make_request("d", 7, max_tokens=None))
    for _ in range(UPKEEP + 2):
        step(scheduler, device)
    for _ in range(12):
        _, updates = step(scheduler, device)
        assert [update.request_id for update in updates] == ["b", "d", "a", "c"]


def test_steps_of_the_same_decodes_share_their_column_of_slots() -> None:
    scheduler, device = make_scheduler(), Device()
    scheduler.add(make_request("a", 5))
    step(scheduler, device)
    first, second = step(scheduler, device)[0].rows, step(scheduler, device)[0].rows
    assert first.slots is second.slots and first.num_query is None


def test_a_verification_row_carries_the_drafts_of_the_step_before() -> None:
    scheduler, device = make_scheduler(num_spec=3), Device(accept=2)
    scheduler.add(make_request("a", 5, max_tokens=20))
    plan, updates = step(scheduler, device)
    assert plan.num_propose == 3 and shape(plan.rows[0]) == (5, 0, 1)
    plan, updates = step(scheduler, device)
    assert shape(plan.rows[0]) == (4, 3, 4) and len(updates[0].new_token_ids) == 3


def test_in_a_pipeline_a_sequence_waits_for_its_feedback_and_each_plan_takes_its_share() -> None:
    scheduler, device = make_scheduler(pp=2), Device()
    for name in "abcd":
        scheduler.add(make_request(name, 4))
    first = scheduler.next_plan()
    assert first and len(first.rows) == 4 and scheduler.next_plan() is None
    scheduler.commit(first, device.run(first))
    plans = [scheduler.next_plan() for _ in range(2)]
    seq_ids = [[row.slot for row in plan.rows] for plan in plans if plan]
    assert [len(ids) for ids in seq_ids] == [2, 2] and not set(seq_ids[0]) & set(seq_ids[1])


def test_a_grammar_keeps_its_sequence_and_no_other_out_of_flight() -> None:
    scheduler, device = make_scheduler(), Device()
    scheduler.add(make_request("free", 4))
    scheduler.add(make_request("bound", 4, grammar="json"))
    first, second = scheduler.next_plan(), scheduler.next_plan()
    assert first and second
    bit = scheduler.features.bits["grammar"]
    assert first.is_open and first.asked == bit and [row.slot for row in first.rows] == [0, 1]
    assert not second.is_open and not second.asked and [row.slot for row in second.rows] == [0]
    (row,) = scheduler.rows_asking(first, bit)
    assert row.request.id == "bound" and row.index == 1 and row.samples
    scheduler.commit(first, device.run(first))
    third = scheduler.next_plan()
    assert third and sorted(row.slot for row in third.rows) == [0, 1]


def test_a_grammars_sequence_is_verified_with_the_drafts_that_the_host_has_seen() -> None:
    scheduler, device = make_scheduler(num_spec=3), Device()
    scheduler.add(make_request("bound", 4, grammar="json", eos=(99,)))
    first = scheduler.next_plan()
    assert first
    show_drafts(scheduler, first, device, [7, 8])
    second, _ = step(scheduler, device)
    assert shape(second.rows[0]) == (3, 2, 3)
    third, _ = step(scheduler, device)
    assert shape(third.rows[0]) == (1, 0, 1), "this time the device has sent none"


def show_drafts(scheduler: Scheduler, plan: StepPlan, device: Device, drafts: list[int]) -> None:
    """The first row of the plan comes home, and the host has seen what it drafted."""
    news = scheduler.commit(plan, device.run(plan))
    scheduler.expect_drafts(news.landed[0].seq, len(drafts))


def test_what_a_prompt_asks_for_is_asked_of_its_chunks_alone() -> None:
    scheduler, device = make_scheduler(budget=4), Device()
    scheduler.add(make_request("a", 6, sampling=SamplingParams(max_tokens=3, prompt_logprobs=0, logprobs=0)))
    bits = scheduler.features.bits
    asked = [step(scheduler, device)[0].asked for _ in range(4)]
    both = bits["prompt_logprobs"] | bits["logprobs"]
    assert asked == [bits["prompt_logprobs"], both, bits["logprobs"], bits["logprobs"]]


class OneAtATime(HostFeature):
    def asks(self, request: Request) -> bool:
        return request.sampling.extra_args is not None

    def gate(self, seq: Sequence, beside: Collection[Sequence]) -> bool:
        return not beside


def test_a_gate_keeps_a_request_out_until_another_has_left() -> None:
    unused: Any = None
    scheduler, device = make_scheduler(features={"alone": OneAtATime(unused)}), Device()
    wish = SamplingParams(max_tokens=2, extra_args={"alone": True})
    for name in "abc":
        scheduler.add(make_request(name, 4, sampling=wish if name != "c" else None))
    admitted = [[a.seq_id for a in step(scheduler, device)[0].admitted] for _ in range(3)]
    assert admitted == [[0], [], [1, 2]]


# The end of a request


def test_the_length_ends_a_request() -> None:
    scheduler, device = make_scheduler(), Device()
    scheduler.add(make_request("a", 5, max_tokens=3))
    assert len(run_to_end(scheduler, device)["a"]) == 3


def test_max_model_len_ends_a_request_that_names_no_length() -> None:
    scheduler, device = make_scheduler(max_model_len=16), Device()
    scheduler.add(make_request("a", 5, max_tokens=None))
    assert len(run_to_end(scheduler, device)["a"]) == 11


@pytest.mark.parametrize("num_drafts", [0, 1, 2, 3])
def test_a_sequence_within_k_of_its_end_yields_no_token_too_many(num_drafts: int) -> None:
    scheduler, device = make_scheduler(num_spec=3, max_model_len=16), Device(accept=num_drafts)
    scheduler.add(make_request("a", 5, max_tokens=None))
    assert len(run_to_end(scheduler, device)["a"]) == 11


def stop_at(token: int, sampling: SamplingParams, eos: tuple[int, ...] = (), accept: int = 0):
    """The update that ends a request whose tokens are 1, 2, 3...; and all its tokens."""
    scheduler, device = make_scheduler(num_spec=3), Device(lambda _, position: position - 4, accept)
    scheduler.add(make_request("a", 5, sampling=sampling, eos=eos))
    tokens = list[int]()
    while True:
        for update in step(scheduler, device)[1]:
            tokens += update.new_token_ids
            if update.finish_reason is not None:
                return update, tokens


def test_the_models_end_of_text_is_kept_and_gives_no_stop_reason() -> None:
    update, tokens = stop_at(3, SamplingParams(max_tokens=9), eos=(3,))
    assert tokens == [1, 2, 3]
    assert update.finish_reason is FinishReason.STOP and update.stop_reason is None


def test_a_stop_token_of_the_request_is_named_as_the_stop_reason() -> None:
    update, tokens = stop_at(3, SamplingParams(max_tokens=9, stop_token_ids=[3]))
    assert tokens == [1, 2, 3] and update.stop_reason == 3


def test_ignore_eos_goes_on_to_the_length() -> None:
    update, tokens = stop_at(3, SamplingParams(max_tokens=5, ignore_eos=True), eos=(3,))
    assert tokens == [1, 2, 3, 4, 5] and update.finish_reason is FinishReason.LENGTH


def test_no_stop_counts_before_min_tokens() -> None:
    update, tokens = stop_at(3, SamplingParams(max_tokens=9, min_tokens=4, stop_token_ids=[2, 3, 6]))
    assert tokens == [1, 2, 3, 4, 5, 6] and update.stop_reason == 6


def test_tokens_accepted_behind_a_stop_are_dropped() -> None:
    update, tokens = stop_at(3, SamplingParams(max_tokens=9, stop_token_ids=[3]), accept=3)
    assert tokens == [1, 2, 3] and update.new_token_ids == [2, 3]


def test_an_abort_answers_at_once_and_gives_everything_back() -> None:
    scheduler, device = make_scheduler(), Device()
    scheduler.add(make_request("a"))
    scheduler.add(make_request("b"))
    step(scheduler, device)
    update = scheduler.abort("a")
    assert update and update.finish_reason is FinishReason.ABORT
    assert scheduler.abort("a") is None and scheduler.abort("never seen") is None
    assert list(run_to_end(scheduler, device)) == ["b"]
    assert scheduler.kv.usage == 0


def test_what_ends_a_request_early_may_give_another_reason() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a"))
    update = scheduler.abort("a", FinishReason.STOP)
    assert update and update.finish_reason is FinishReason.STOP


def test_rows_in_flight_of_an_aborted_request_are_dropped_and_its_slot_rests_until_then() -> None:
    scheduler, device = make_scheduler(num_slots=1), Device()
    scheduler.add(make_request("a"))
    inflight = scheduler.next_plan()
    assert inflight
    scheduler.abort("a")
    scheduler.add(make_request("b"))
    assert scheduler.next_plan() is None, "the only slot still has a row in flight"
    assert scheduler.commit(inflight, device.run(inflight)).one_by_one() == []
    plan, updates = step(scheduler, device)
    assert plan.retired == [0] and [update.request_id for update in updates] == ["b"]


@pytest.mark.parametrize(
    "prompt_len,max_tokens,words",
    [
        (16, 1, "prompt has 16 tokens, max_model_len is 16"),
        (0, 1, "no tokens"),
        (8, None, "the KV cache holds 12"),
    ],
)
def test_a_request_that_could_never_run_is_answered_with_the_reason(
    prompt_len: int, max_tokens: int | None, words: str
) -> None:
    scheduler = make_scheduler(max_model_len=16, num_blocks=3)
    update = scheduler.add(make_request("a", prompt_len, max_tokens=max_tokens))
    assert update and update.finish_reason is FinishReason.ERROR and update.error and words in update.error
    assert not scheduler.has_unfinished


def test_a_budget_of_one_token_is_refused() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens is 1, must be at least 2"):
        SchedulerOptions(max_model_len=8, num_slots=1, max_num_batched_tokens=1)


# Sharing


def test_requests_of_one_step_share_their_beginning() -> None:
    scheduler, device = make_scheduler(), Device()
    prompt = list(range(20))
    scheduler.add(make_request("a", prompt))
    scheduler.add(make_request("b", prompt))
    plan, _ = step(scheduler, device)
    assert [shape(row) for row in plan.rows] == [(20, 0, 1), (4, 0, 1)]
    one, two = plan.admitted
    assert two.num_computed == 16 and not one.pages
    assert two.pages.tolist() == plan.grown.pages[:4].tolist()


def test_a_prompt_that_is_all_cached_computes_its_last_block_anew() -> None:
    scheduler, device = make_scheduler(), Device()
    scheduler.add(make_request("a", list(range(8)), max_tokens=1))
    step(scheduler, device)
    scheduler.add(make_request("b", list(range(8)), max_tokens=1))
    plan, updates = step(scheduler, device)
    assert shape(plan.rows[0]) == (4, 0, 1) and updates[0].num_cached_tokens == 4


def test_a_prefix_still_in_flight_is_shared() -> None:
    scheduler, device = make_scheduler(), Device()
    scheduler.add(make_request("a", list(range(9))))
    first = scheduler.next_plan()
    scheduler.add(make_request("b", list(range(9))))
    second = scheduler.next_plan()
    assert first and second and second.admitted[0].num_computed == 8
    scheduler.commit(first, device.run(first))
    updates = scheduler.commit(second, device.run(second)).one_by_one()
    assert [len(update.new_token_ids) for update in updates] == [1, 1]


def test_the_next_turn_of_a_chat_finds_the_answer_of_the_last_one() -> None:
    scheduler, device = make_scheduler(), Device()
    scheduler.add(make_request("a", list(range(6)), max_tokens=7))
    answer = run_to_end(scheduler, device)["a"]
    scheduler.add(make_request("b", [*range(6), *answer, 77, 78]))
    plan, _ = step(scheduler, device)
    assert plan.admitted[0].num_computed == 12


def test_prompt_logprobs_skip_the_cache_and_come_once_for_each_position() -> None:
    scheduler, device = make_scheduler(budget=6), Device()
    scheduler.add(make_request("a", list(range(15)), max_tokens=1))
    run_to_end(scheduler, device)
    wants = SamplingParams(max_tokens=2, prompt_logprobs=0)
    scheduler.add(make_request("b", list(range(15)), sampling=wants))
    shapes, positions = [], []
    while scheduler.has_unfinished:
        plan, updates = step(scheduler, device)
        shapes += map(shape, plan.rows)
        positions += [e.token_ids[0] for u in updates for e in u.prompt_logprobs or ()]
    assert shapes == [(6, 0, 6), (6, 0, 6), (3, 0, 3), (1, 0, 1)]
    assert positions == list(range(1, 15))


# Shortage


def test_a_pool_that_runs_dry_preempts_the_youngest_and_everybody_finishes() -> None:
    scheduler, device = make_scheduler(num_blocks=6), Device()
    for name in "abc":
        scheduler.add(make_request(name, 6, max_tokens=12))
    tokens = run_to_end(scheduler, device)
    assert {name: len(t) for name, t in tokens.items()} == {"a": 12, "b": 12, "c": 12}
    assert scheduler.counters.num_preemptions > 0
    again = make_scheduler()
    for name in "abc":
        again.add(make_request(name, 6, max_tokens=12))
    assert run_to_end(again, Device()) == tokens


def test_drafts_are_told_of_texts_that_end_and_of_slots_before_they_are_entered() -> None:
    """So steps of the text before count by its length, and what comes back has not foretold itself."""
    scheduler, device, ended, entered = make_scheduler(num_blocks=6), Device(), list[int](), list[bool]()
    begin = scheduler.wants.begin

    def begins(slot: int) -> None:
        entered.append(scheduler.table.seqs[slot] is not None)
        begin(slot)

    scheduler.wants.begin, scheduler.wants.end = begins, ended.append
    for name in "abc":
        scheduler.add(make_request(name, 6, max_tokens=12))
    run_to_end(scheduler, device)
    assert scheduler.counters.num_preemptions > 0
    assert len(ended) == 3 < len(entered) and not any(entered)


def test_the_oldest_is_never_preempted_by_a_younger_one() -> None:
    scheduler, device = make_scheduler(num_blocks=5), Device()
    for name in "abc":
        scheduler.add(make_request(name, 4, max_tokens=16))
    ends = []
    while scheduler.has_unfinished:
        _, updates = step(scheduler, device)
        ends += [update.request_id for update in updates if update.finish_reason]
    assert ends == ["a", "b", "c"]


def test_who_was_preempted_ships_its_tokens_again_and_finds_its_blocks() -> None:
    scheduler, device = make_scheduler(num_blocks=8, max_model_len=32), Device()
    scheduler.add(make_request("a", 8, max_tokens=20))
    scheduler.add(make_request("b", 8, max_tokens=20))
    plans = list[tuple[int, int, int]]()
    while scheduler.has_unfinished:
        plan, _ = step(scheduler, device)
        plans += [(new.seq_id, len(new.token_ids), new.num_computed) for new in plan.admitted]
    assert scheduler.counters.num_preemptions == 1
    (again,) = [p for p in plans if p[1] > 8]
    assert again[0] == 1, "the younger one"
    assert again[1] > 8 and again[2] >= BLOCK, "sampled tokens travel back, the cached prefix does not"


def test_an_arrival_of_higher_priority_takes_the_blocks_of_a_lower_one() -> None:
    scheduler, device = make_scheduler(num_blocks=5, max_model_len=20, policy="priority"), Device()
    scheduler.add(make_request("low", 12, priority=1, max_tokens=4))
    step(scheduler, device)
    scheduler.add(make_request("high", 12, priority=0, max_tokens=4))
    plan, _ = step(scheduler, device)
    assert [new.seq_id for new in plan.admitted] == [1] and scheduler.counters.num_preemptions == 1
    assert {name: len(t) for name, t in run_to_end(scheduler, device).items()} == {"high": 3, "low": 3}


def test_a_chunk_that_this_step_has_planned_is_not_taken_back_for_a_higher_priority() -> None:
    scheduler, device = make_scheduler(num_blocks=5, budget=8, max_model_len=20, policy="priority"), Device()
    scheduler.add(make_request("low", 12, priority=1, max_tokens=4))
    step(scheduler, device)
    scheduler.add(make_request("high", 12, priority=0, max_tokens=4))
    plan, updates = step(scheduler, device)
    assert [shape(row) for row in plan.rows] == [(4, 0, 1)] and updates[0].request_id == "low"
    assert step(scheduler, device)[0].admitted[0].seq_id == 1, "now it is a decode, and gives way"


def test_an_equal_arrival_waits_for_blocks_and_preempts_nobody() -> None:
    scheduler, device = make_scheduler(num_blocks=5, max_model_len=20, policy="priority"), Device()
    scheduler.add(make_request("first", 12, max_tokens=4))
    step(scheduler, device)
    scheduler.add(make_request("second", 12, max_tokens=4))
    run_to_end(scheduler, device)
    assert scheduler.counters.num_preemptions == 0


def test_nobody_is_preempted_for_one_for_whom_all_of_them_are_not_enough() -> None:
    scheduler, device = make_scheduler(num_blocks=10, max_model_len=40, policy="priority"), Device()
    scheduler.add(make_request("elder", 12, max_tokens=20))
    scheduler.add(make_request("low", 6, max_tokens=20, priority=1))
    step(scheduler, device)
    scheduler.add(make_request("high", 30, max_tokens=2))
    step(scheduler, device)
    assert scheduler.counters.num_preemptions == 0 and scheduler.num_waiting == 1
    ends = []
    while scheduler.has_unfinished:
        ends += [u.request_id for u in step(scheduler, device)[1] if u.finish_reason]
    assert ends == ["elder", "high", "low"] and scheduler.counters.num_preemptions == 1


def test_blocks_that_a_victim_shares_are_not_reckoned_to_come_free() -> None:
    scheduler, device = make_scheduler(num_blocks=8, max_model_len=32, policy="priority"), Device()
    prompt = list(range(16))
    scheduler.add(make_request("elder", prompt, max_tokens=9))
    step(scheduler, device)
    scheduler.add(make_request("low", [*prompt, 1], max_tokens=2, priority=1))
    step(scheduler, device)
    scheduler.add(make_request("high", 16, max_tokens=2))
    plan, _ = step(scheduler, device)
    assert not plan.admitted and scheduler.counters.num_preemptions == 0, "low has one block of its own"


def test_as_many_are_preempted_as_are_needed_the_youngest_first() -> None:
    scheduler, device = make_scheduler(num_blocks=9, max_model_len=32, policy="priority"), Device()
    for name, arrival in (("a", 0.0), ("b", 1.0), ("c", 2.0)):
        scheduler.add(make_request(name, 9, max_tokens=3, priority=1, arrival=arrival))
    step(scheduler, device)
    scheduler.add(make_request("high", 20, max_tokens=3))
    plan, _ = step(scheduler, device)
    assert [device.seq_ids[row.slot] for row in plan.rows] == [0, 3]
    assert scheduler.counters.num_preemptions == 2


def test_an_arrival_may_take_the_place_of_all_that_run() -> None:
    scheduler = make_scheduler(num_blocks=10, max_model_len=40, policy="priority", watermark=0.3)
    device = Device()
    for name in "ab":
        scheduler.add(make_request(name, 9, max_tokens=3, priority=1))
    step(scheduler, device)
    scheduler.add(make_request("high", 36, max_tokens=3))
    plan, _ = step(scheduler, device)
    running = [device.seq_ids[row.slot] for row in plan.rows]
    assert running == [2], "where nobody runs, no block need be spared"


def test_nobody_is_preempted_for_blocks_to_spare() -> None:
    scheduler = make_scheduler(num_blocks=10, max_model_len=40, policy="priority", watermark=0.3)
    device = Device()
    scheduler.add(make_request("low", 5, max_tokens=3, priority=1))
    step(scheduler, device)
    scheduler.add(make_request("high", 32, max_tokens=1))
    plan, _ = step(scheduler, device)
    assert [new.seq_id for new in plan.admitted] == [1], "8 blocks are free, and who runs gives way to it"
    assert scheduler.counters.num_preemptions == 0


def test_nobody_is_preempted_for_drafts() -> None:
    scheduler, device = make_scheduler(num_spec=3, num_blocks=5, max_model_len=17), Device()
    for name in "abc":
        scheduler.add(make_request(name, 4 if name < "c" else 1, max_tokens=5))
    shapes = [[shape(row) for row in step(scheduler, device)[0].rows] for _ in range(2)]
    assert shapes == [[(4, 0, 1), (4, 0, 1), (1, 0, 1)], [(1, 0, 1), (1, 0, 1)]]
    assert scheduler.counters.num_preemptions == 0


def test_a_high_priority_waits_for_a_slot_like_everybody_but_gets_the_next_one() -> None:
    scheduler, device = make_scheduler(num_slots=1, policy="priority"), Device()
    scheduler.add(make_request("running", max_tokens=2, priority=5))
    step(scheduler, device)
    scheduler.add(make_request("low", priority=3, max_tokens=1))
    scheduler.add(make_request("high", priority=1, max_tokens=1))
    order = []
    while scheduler.has_unfinished:
        order += [u.request_id for u in step(scheduler, device)[1] if u.finish_reason]
    assert order == ["running", "high", "low"]


def test_the_watermark_keeps_blocks_for_those_that_run() -> None:
    scheduler, device = make_scheduler(num_blocks=10, watermark=0.2), Device()
    scheduler.add(make_request("a", 16, max_tokens=4))
    step(scheduler, device)
    scheduler.add(make_request("b", 20, max_tokens=4))
    assert not step(scheduler, device)[0].admitted, "5 blocks are free, 5 needed, 2 to spare"
    run_to_end(scheduler, device)


def test_clearing_the_cache_forgets_prefixes_and_disturbs_nobody() -> None:
    scheduler, device = make_scheduler(), Device()
    scheduler.add(make_request("a", list(range(16)), max_tokens=9))
    step(scheduler, device)
    scheduler.clear_prefix_cache()
    scheduler.add(make_request("b", list(range(16)), max_tokens=9))
    plan, _ = step(scheduler, device)
    assert plan.admitted[0].num_computed == 0
    assert {name: len(t) for name, t in run_to_end(scheduler, device).items()} == {"a": 7, "b": 8}


# Quiet requests


def quiet_scheduler() -> Scheduler:
    scheduler = make_scheduler()
    scheduler.add(replace(make_request("a", 5, max_tokens=20), is_quiet=True))
    return scheduler


def test_a_quiet_request_is_told_of_its_first_token_and_of_all_others_at_its_end() -> None:
    scheduler, device = quiet_scheduler(), Device()
    updates = [update for _ in range(20) for update in step(scheduler, device)[1]]
    assert [len(update.new_token_ids) for update in updates] == [1, 19]
    assert updates[-1].finish_reason is FinishReason.LENGTH


def test_an_aborted_quiet_request_is_told_what_it_has_got() -> None:
    scheduler, device = quiet_scheduler(), Device()
    for _ in range(7):
        step(scheduler, device)
    update = scheduler.abort("a")
    assert update is not None and len(update.new_token_ids) == 6
