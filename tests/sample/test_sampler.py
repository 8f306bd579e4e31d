"""The sampler as a whole: greedy, company, logprobs, and what is kept where."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pellucid.sample.logprobs import raw_logprobs, score, top_logprobs
from pellucid.sample.state import SamplingState, Trait, traits_of
from pellucid.sampling_params import SamplingParams
from tests.sample.conftest import admit, make

V = 1501  # odd, and beyond the widest filter

KINDS = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"top_k": 64},
    {"top_k": 65, "top_p": 0.9},
    {"top_k": 1100, "min_p": 0.001},
    {"top_p": 0.9},
    {"top_p": 0.4, "min_p": 0.01, "temperature": 1.8},
    {"min_p": 0.05},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.1},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"logit_bias": {3: 4.0, 8: -4.0}, "logprobs": 3},
    {"allowed_token_ids": list(range(100, 1200, 3)), "top_p": 0.7},
    {"min_tokens": 5, "top_k": 30},
    {"logprobs": 0},
    {"temperature": 0.0, "logprobs": 5},
]


def crowd(stage, count: int, device: str = "cpu"):
    """A stage with `count` requests of all kinds, and logits of a 16-bit model, full of ties."""
    world = stage(V, num_slots=count, device=device)
    rng = np.random.default_rng(7)
    for slot in range(count):
        prompt, output = rng.integers(0, V, 5).tolist(), rng.integers(0, V, int(rng.integers(0, 9))).tolist()
        words = [[output[-1], 4], [9]] if output and slot % 5 == 0 else []
        sampling = SamplingParams(**KINDS[slot % len(KINDS)])
        world.admit_all([make(slot, sampling, prompt, output, 31 * slot, [2, 7], words)])
    logits = (torch.randn(count, V, generator=torch.Generator().manual_seed(5)) * 3).bfloat16().float()
    positions = (world.token_ids < 10**9).sum(-1).tolist()
    return world, logits, positions


@pytest.mark.parametrize("threads", [1, 2])
def test_a_request_draws_the_same_token_in_any_company(stage, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        world, logits, positions = crowd(stage, 100)
        together = world.draw(logits, range(100), positions)
        assert len(set(together.tokens.tolist())) > 60
        for slot in range(100):
            alone = world.draw(logits[slot : slot + 1], [slot], positions[slot : slot + 1])
            assert alone.tokens[0] == together.tokens[slot]
            wanted = world.state.num_logprobs[slot]
            if wanted >= 0:
                width = wanted + 1
                assert torch.equal(alone.logprobs.logprobs[0], together.logprobs.logprobs[slot, :width])
        order = np.random.default_rng(0).permutation(100)[:63]
        some = world.draw(logits[order], order.tolist(), [positions[i] for i in order])
        assert torch.equal(some.tokens, together.tokens[order])
    finally:
        torch.set_num_threads(before)


def test_a_part_of_the_noise_is_drawn_at_a_time_without_a_trace(stage, monkeypatch):
    world, logits, positions = crowd(stage, 40)
    whole = world.draw(logits, range(40), positions).tokens
    monkeypatch.setattr("pellucid.sample.draw._SLICE_ELEMENTS", 7 * V)
    assert torch.equal(world.draw(logits, range(40), positions).tokens, whole)


def test_positions_of_one_row_draw_what_they_would_draw_one_by_one(stage):
    world = stage(V)
    sampling = SamplingParams(top_p=0.9, repetition_penalty=1.4, frequency_penalty=0.5, min_tokens=3)
    world.admit(0, sampling, prompt=[1, 2], output=[5, 6, 5, 8], seed=4, stop=[1, 3], bad_words=[[5, 6, 9]])
    logits = torch.randn(4, V, generator=torch.Generator().manual_seed(1))
    together = world.draw(logits, [0] * 4, [3, 4, 5, 6]).tokens
    single = [world.draw(logits[i : i + 1], [0], [3 + i]).tokens[0] for i in range(4)]
    assert together.tolist() == single


def test_temperature_zero_takes_the_first_of_the_most_likely(stage):
    world = stage(10)
    world.admit(0, SamplingParams(temperature=0))
    world.admit(1, SamplingParams(temperature=0, presence_penalty=1.0), prompt=[1], output=[4])
    world.admit(2, SamplingParams())
    logits = torch.zeros(2, 10)
    logits[:, [4, 6, 7]] = 1.0
    assert world.draw(logits, [0, 1], [1, 2]).tokens.tolist() == [4, 6]
    beside_random = world.draw(torch.cat([logits, torch.randn(1, 10)]), [0, 1, 2], [1, 2, 1])
    assert beside_random.tokens[:2].tolist() == [4, 6]


def test_ties_are_drawn_evenly(stage, assert_distributed):
    logits = torch.zeros(8)
    logits[[1, 4, 5]] = 2.0
    drawn = stage(8, num_slots=3000).draws(logits, SamplingParams(top_k=1), 3000)
    assert_distributed(drawn, np.array([0, 1, 0, 0, 1, 1, 0, 0]) / 3)


@pytest.mark.parametrize("temperature", [1e-6, 1e-4, 1e38])
def test_extreme_temperatures_stay_within_what_is_allowed(stage, temperature):
    world = stage(100)
    world.admit(0, SamplingParams(temperature=temperature, allowed_token_ids=[3, 50], top_p=0.99))
    logits = torch.zeros(200, 100)
    logits[:, 50] = 1.0
    drawn = set(world.draw(logits, [0] * 200, range(200)).tokens.tolist())
    assert drawn == ({3, 50} if temperature > 1 else {50})


def test_16_bit_logits_draw_what_their_float32_copy_draws(stage):
    world, logits, positions = crowd(stage, 32)
    exact = world.draw(logits, range(32), positions)
    assert torch.equal(world.draw(logits.bfloat16(), range(32), positions).tokens, exact.tokens)


def test_logprobs_are_those_of_the_raw_logits(stage):
    world = stage(V)
    sampling = SamplingParams(
        temperature=0.3, top_k=3, logit_bias={9: 3.0}, repetition_penalty=2.0, logprobs=4
    )
    world.admit(0, sampling, prompt=[1, 2, 3])
    world.admit(1, SamplingParams(temperature=0))
    world.admit(2, SamplingParams(logprobs=0))
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(2)) * 2
    sampled = world.draw(logits, [0, 1, 2], [3, 1, 1])
    raw = torch.log_softmax(logits.double(), -1)
    report = sampled.logprobs
    assert report.token_ids.shape == report.logprobs.shape == (3, 5)
    for row in (0, 2):
        token = int(sampled.tokens[row])
        assert report.token_ids[row, 0] == token
        assert report.logprobs[row, 0].item() == pytest.approx(raw[row, token].item(), abs=1e-5)
        assert report.ranks[row] == 1 + (raw[row] > raw[row, token]).sum()
    top = raw[0].topk(4)
    assert report.token_ids[0, 1:].tolist() == top.indices.tolist()
    torch.testing.assert_close(report.logprobs[0, 1:].double(), top.values, rtol=0, atol=1e-5)


def test_rank_counts_only_more_likely_tokens(stage):
    world = stage(6)
    world.admit(0, SamplingParams(temperature=0, logprobs=1))
    sampled = world.draw(torch.tensor([[0.0, 2.0, 2.0, 1.0, 2.0, 0.0]]), [0], [1])
    assert sampled.tokens.tolist() == [1] and sampled.logprobs.ranks.tolist() == [1]


def test_known_tokens_are_scored_in_slices(monkeypatch):
    generator = torch.Generator().manual_seed(4)
    hidden, weight = torch.randn(23, 8, generator=generator), torch.randn(V, 8, generator=generator)
    tokens = torch.randint(V, (23,), generator=generator)
    whole = top_logprobs(raw_logprobs(hidden @ weight.T), tokens, 3)
    monkeypatch.setattr("pellucid.sample.logprobs._SLICE_ELEMENTS", 5 * V)
    widths = []

    def head(part: torch.Tensor) -> torch.Tensor:
        widths.append(len(part))
        return part @ weight.T

    sliced = score(hidden, head, tokens, 3, vocab_size=V)
    assert widths == [5, 5, 5, 5, 3]
    assert torch.equal(sliced.token_ids, whole.token_ids) and torch.equal(sliced.ranks, whole.ranks)
    torch.testing.assert_close(sliced.logprobs, whole.logprobs)
    raw = torch.log_softmax((hidden @ weight.T).double(), -1)
    torch.testing.assert_close(
        whole.logprobs[:, 0].double(), raw.gather(1, tokens[:, None])[:, 0], rtol=0, atol=1e-4
    )
    assert torch.equal(whole.token_ids[:, 0].long(), tokens)


def test_a_step_knows_on_the_host_what_it_needs():
    state = SamplingState(6, V)
    plain = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=5, logprobs=2)]
    admit(state, [make(slot, sampling) for slot, sampling in enumerate(plain)])

    def batch(slots):
        return state.batch(
            np.array(slots, np.int64), torch.tensor(slots), torch.ones(len(slots), dtype=torch.int64)
        )

    assert batch([0, 0]).traits == Trait.NONE
    assert batch([0, 1]).traits == Trait.RANDOM and not batch([0, 1]).rows
    mixed = batch([2, 0, 2, 1])
    assert mixed.traits == Trait.RANDOM | Trait.LOGPROBS | Trait.TOP_NARROW
    assert mixed.max_logprobs == 2 and mixed.rows[Trait.TOP_NARROW].tolist() == [0, 2]
    assert batch([]).traits == Trait.NONE


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.1}, Trait.NONE),
        ({"top_k": 64}, Trait.RANDOM | Trait.TOP_NARROW),
        ({"top_k": 65}, Trait.RANDOM | Trait.TOP_WIDE),
        ({"top_k": 1025}, Trait.RANDOM | Trait.TOP_ANY),
        ({"top_k": V}, Trait.RANDOM),
        ({"top_k": V, "top_p": 0.5}, Trait.RANDOM | Trait.TOP_ANY),
        ({"min_p": 0.1}, Trait.RANDOM | Trait.MIN_P),
        ({"min_p": 0.1, "top_k": 3}, Trait.RANDOM | Trait.TOP_NARROW),
    ],
    ids=str,
)
def test_a_filter_is_chosen_of_a_requests_own_parameters(options, expected):
    assert traits_of(make(0, SamplingParams(**options)), V) == expected


def test_the_next_tenant_of_a_slot_starts_afresh(stage):
    world = stage(V, num_slots=2)
    options = {
        "temperature": 0.5,
        "top_k": 3,
        "logit_bias": {5: 50.0},
        "repetition_penalty": 2.0,
        "min_tokens": 9,
    }
    world.admit(0, SamplingParams(**options), seed=1, stop=[3], bad_words=[[1]])
    world.admit(0, SamplingParams(), seed=2)
    world.admit(1, SamplingParams(), seed=2)
    assert world.state.traits[0] == Trait.RANDOM and torch.equal(world.state.table[0], world.state.table[1])


def test_whether_slots_are_plain_is_asked_anew_after_an_admission(stage):
    world = stage(V, num_slots=2)
    world.admit_all([make(0, SamplingParams(), [1], [], 0, [], [])])
    slots = np.array([0])
    assert world.state.is_plain(slots) and world.state.is_plain(slots)
    world.admit_all([make(0, SamplingParams(top_k=3), [1], [], 0, [], [])])
    assert not world.state.is_plain(slots)
