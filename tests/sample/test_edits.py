"""Each edit and filter against its plain meaning, against transformers, and at its ties."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from pellucid.sample.edits import Rows, mask_bad_words, penalize
from pellucid.sample.filters import filter_logits
from pellucid.sampling_params import SamplingParams

V = 50
NEVER = -float("inf")


def rows_of(world, slots, positions) -> Rows:
    longest = world.state.lists.longest(np.array(slots))
    slots, positions = torch.tensor(slots), torch.tensor(positions)
    return Rows(world.state, world.token_ids, slots, positions, world.state.params(slots), longest)


def random_logits(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * 3


def filtered(stage, logits: torch.Tensor, width: int | None, **options) -> torch.Tensor:
    world = stage(logits.shape[-1])
    world.admit(0, SamplingParams(**options))
    logits = logits[None].clone()
    filter_logits(logits, world.state.params(torch.tensor([0])), width)
    return logits[0]


def test_repetition_penalty_is_transformers(stage):
    world, logits = stage(V), random_logits(2, V)
    world.admit(0, SamplingParams(repetition_penalty=1.4), prompt=[1, 2, 2, 3], output=[9, 2, 11])
    world.admit(1, SamplingParams(repetition_penalty=0.7), prompt=[20, 1], output=[0, 49])
    expected = logits.clone()
    expected[0:1] = hf.RepetitionPenaltyLogitsProcessor(1.4)(
        torch.tensor([[1, 2, 2, 3, 9, 2, 11]]), logits[0:1]
    )
    expected[1:2] = hf.RepetitionPenaltyLogitsProcessor(0.7)(torch.tensor([[20, 1, 0, 49]]), logits[1:2])
    penalize(logits, rows_of(world, [0, 1], [7, 4]))
    torch.testing.assert_close(logits, expected)


def test_frequency_counts_and_presence_marks_generated_tokens_only(stage):
    world, logits = stage(V), torch.zeros(1, V)
    world.admit(
        0, SamplingParams(frequency_penalty=0.5, presence_penalty=1.0), prompt=[1, 2, 2], output=[2, 3, 3, 3]
    )
    penalize(logits, rows_of(world, [0], [7]))
    expected = torch.zeros(V)
    expected[2], expected[3] = -1.5, -2.5
    torch.testing.assert_close(logits[0], expected)


def test_each_position_of_one_slot_is_penalized_for_what_was_known_there(stage):
    world = stage(V)
    world.admit(0, SamplingParams(frequency_penalty=1.0), prompt=[1], output=[5, 6, 5])
    logits = torch.zeros(3, V)
    penalize(logits, rows_of(world, [0, 0, 0], [2, 3, 4]))
    assert [{t: -x for t, x in enumerate(row) if x} for row in logits.tolist()] == [
        {5: 1},
        {5: 1, 6: 1},
        {5: 2, 6: 1},
    ]


def test_what_lies_behind_the_known_tokens_is_never_counted(stage):
    world, logits = stage(V), torch.zeros(1, V)
    world.admit(0, SamplingParams(presence_penalty=1.0), prompt=[1], output=[2])
    world.token_ids[0, 2:] = 3
    penalize(logits, rows_of(world, [0], [2]))
    assert logits[0].nonzero().flatten().tolist() == [2]


def forbidden(logits: torch.Tensor) -> list[list[int]]:
    return [(row == NEVER).nonzero().flatten().tolist() for row in logits]


def test_a_bad_word_is_cut_short_of_its_last_token(stage):
    world = stage(V)
    words = [[7], [1, 2, 3], [9, 9], [1, 2, 3, 4]]
    world.admit(0, SamplingParams(), prompt=[0], output=[1, 2, 9], bad_words=words)
    logits = torch.zeros(4, V)
    mask_bad_words(logits, rows_of(world, [0, 0, 0, 0], [1, 2, 3, 4]))
    assert forbidden(logits) == [[7], [7], [3, 7], [7, 9]]


def test_a_bad_word_may_not_begin_in_the_prompt(stage):
    world = stage(V)
    world.admit(0, SamplingParams(), prompt=[1, 2], output=[2], bad_words=[[2, 2, 5], [2, 6]])
    logits = torch.zeros(2, V)
    mask_bad_words(logits, rows_of(world, [0, 0], [2, 3]))
    assert forbidden(logits) == [[], [6]]


def test_bad_words_of_different_slots_do_not_meet(stage):
    world = stage(V)
    world.admit(0, SamplingParams(), prompt=[0], output=[1], bad_words=[[1, 2]])
    world.admit(
        1, SamplingParams(), prompt=[0], output=[1], bad_words=[[w] for w in range(10, 20)] + [[0, 0, 1, 3]]
    )
    world.admit(2, SamplingParams(), prompt=[0], output=[1], bad_words=[[4]])
    world.admit(1, SamplingParams(), prompt=[0], output=[1], bad_words=[[11]])  # the next tenant of the slot
    logits = torch.zeros(3, V)
    mask_bad_words(logits, rows_of(world, [0, 1, 2], [2, 2, 2]))
    assert forbidden(logits) == [[2], [11], [4]]


def test_stop_tokens_are_held_back_until_min_tokens(stage):
    world = stage(V, num_slots=2)
    logits = torch.zeros(V)
    logits[[4, 6]] = 10.0
    logits[8] = 1.0
    world.admit(0, SamplingParams(temperature=0, min_tokens=3), prompt=[1, 2], output=[0] * 9, stop=[4, 6])
    world.admit(1, SamplingParams(temperature=0, min_tokens=3), prompt=[1, 2], output=[0] * 9, stop=[4])
    drawn = world.draw(logits.expand(8, -1), [0] * 5 + [1] * 3, [2, 3, 4, 5, 6, 2, 4, 5])
    assert drawn.tokens.tolist() == [8, 8, 8, 4, 4, 6, 6, 4]


def test_bias_and_allowed_tokens_leave_with_their_request(stage):
    world = stage(V)
    logits = torch.zeros(3, V)
    logits[:, 9] = 1.0
    greedy = {"temperature": 0}
    for slot, token in enumerate([3, 4, 5]):
        world.admit(slot, SamplingParams(logit_bias={token: 5.0}, **greedy))
    assert world.draw(logits, [0, 1, 2], [1, 1, 1]).tokens.tolist() == [3, 4, 5]
    world.admit(1, SamplingParams(**greedy))
    world.admit(2, SamplingParams(allowed_token_ids=[7, 8], logit_bias={8: 0.5, 9: 50.0}, **greedy))
    assert world.draw(logits, [0, 1, 2], [1, 1, 1]).tokens.tolist() == [3, 9, 8]


@pytest.mark.parametrize("width", [64, 1024, None])
@pytest.mark.parametrize("top_k", [1, 7, 64])
def test_top_k_is_transformers(stage, top_k, width):
    logits = random_logits(2000)
    expected = hf.TopKLogitsWarper(top_k)(None, logits[None])[0]
    assert torch.equal(filtered(stage, logits, width, top_k=top_k), expected)


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.99])
def test_top_p_is_transformers(stage, top_p):
    logits = random_logits(2000)
    expected = hf.TopPLogitsWarper(top_p)(None, logits[None])[0]
    assert torch.equal(filtered(stage, logits, None, top_p=top_p), expected)


@pytest.mark.parametrize("min_p", [0.001, 0.1, 0.9])
def test_min_p_is_transformers(stage, min_p):
    logits = random_logits(2000)
    expected = hf.MinPLogitsWarper(min_p)(None, logits[None] / 0.7)[0]
    assert torch.equal(filtered(stage, logits, 1, min_p=min_p, temperature=0.7) == NEVER, expected == NEVER)


def test_top_p_sums_over_what_top_k_left(stage):
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # Of three tokens with 4/9, 3/9, 2/9, two reach 0.7; of all four they would reach just that.
    assert (filtered(stage, logits, None, top_k=3, top_p=0.7) > NEVER).tolist() == [True, True, False, False]
    assert (filtered(stage, logits, None, top_p=0.71) > NEVER).tolist() == [True, True, True, False]


def test_ties_at_the_border_are_kept_whole(stage):
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0])
    kept = [False, True, True, True, True, False]
    assert (filtered(stage, logits, None, top_k=2) > NEVER).tolist() == kept
    assert (filtered(stage, logits, 3, top_k=3) > NEVER).tolist() == kept
    assert (filtered(stage, logits, None, top_p=0.6) > NEVER).tolist() == kept
    assert (filtered(stage, torch.zeros(6), None, top_p=0.5) > NEVER).all()


def test_mass_of_ties_beyond_the_width_counts(stage):
    """With top_k = 2 one likely token and 99 that tie are left; among the 64 widest it would have 0.24."""
    logits = torch.zeros(100)
    logits[50] = 3.0  # e**3 of e**3 + 99 is 0.17
    assert (filtered(stage, logits, 64, top_k=2, top_p=0.2) > NEVER).all()
    assert (filtered(stage, logits, 64, top_k=2, top_p=0.16) > NEVER).sum() == 1


def test_the_most_unlikely_passes_where_nothing_forbids_it(stage):
    logits = torch.tensor([0.0, -80.0, -90.0])
    assert (filtered(stage, logits, None, top_k=2) > NEVER).tolist() == [True, True, False]
    assert (filtered(stage, logits, None, top_k=2, top_p=0.9999) > NEVER).tolist() == [True, False, False]


@pytest.mark.parametrize("width", [64, 1024])
def test_width_is_invisible(stage, width):
    logits = random_logits(5000).bfloat16().float()  # with many ties
    for top_k in (1, 20, 64):
        for options in ({"top_p": 0.9}, {"top_p": 0.3, "min_p": 0.02}, {"temperature": 0.3, "top_p": 0.99}):
            assert torch.equal(
                filtered(stage, logits, width, top_k=top_k, **options),
                filtered(stage, logits, None, top_k=top_k, **options),
            )


@pytest.mark.parametrize(
    "options", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}, {"top_k": 2000, "top_p": 0.9}]
)
def test_filters_survive_forbidden_tokens(stage, options):
    world = stage(3000)
    world.admit(0, SamplingParams(allowed_token_ids=[5], **options), seed=3)
    assert world.draw(random_logits(1, 3000), [0], [1]).tokens.tolist() == [5]
