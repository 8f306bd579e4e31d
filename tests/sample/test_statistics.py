"""What is drawn follows the exact distribution, by chi-square over draws that differ in their seed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pellucid.kernels.sampling.sample import BLOCK_TOKENS
from pellucid.sampling_params import SamplingParams

V = 40
DRAWS = 8000
LOGITS = torch.randn(V, generator=torch.Generator().manual_seed(1)) * 1.5


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def exact(logits: torch.Tensor, sampling: SamplingParams) -> np.ndarray:
    """The distribution after temperature, min_p, top_k, top_p, each a plain sentence over probabilities."""
    p = softmax(logits.double().numpy() / sampling.temperature)
    p = np.where(p >= sampling.min_p * p.max(), p, 0)
    if sampling.top_k:
        p = np.where(p >= np.sort(p)[-sampling.top_k], p, 0)
    p = p / p.sum()
    order = np.argsort(-p)
    mass_above = np.cumsum(p[order]) - p[order]
    p[order[mass_above >= sampling.top_p]] = 0
    return p / p.sum()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 2.5},
        {"top_k": 1},
        {"top_k": 5},
        {"top_k": V},
        {"top_p": 0.7},
        {"top_p": 0.01},
        {"top_p": 0.999},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        {"temperature": 1.7, "top_k": 30, "top_p": 0.8, "min_p": 0.05},
        {"temperature": 1.3, "top_p": 0.8, "min_p": 0.1},
        {"temperature": 1e6},
    ],
    ids=str,
)
def test_filters_and_temperature_give_the_exact_distribution(stage, assert_distributed, options):
    sampling = SamplingParams(**options)
    drawn = stage(V, num_slots=DRAWS).draws(LOGITS, sampling, DRAWS)
    assert_distributed(drawn, exact(LOGITS, sampling))


def test_penalties_and_filters_combine_exactly(stage, assert_distributed):
    sampling = SamplingParams(
        temperature=0.8,
        top_k=25,
        top_p=0.9,
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        presence_penalty=0.7,
    )
    prompt, output = [3, 4, 5, 5], [5, 6, 6, 7, 6]
    logits = LOGITS.clone()
    for token in {*prompt, *output}:
        logits[token] = logits[token] / 1.3 if logits[token] > 0 else logits[token] * 1.3
    for token in set(output):
        logits[token] -= 0.4 * output.count(token) + 0.7
    drawn = stage(V, num_slots=DRAWS).draws(LOGITS, sampling, DRAWS, prompt=prompt, output=output)
    assert_distributed(drawn, exact(logits, sampling))


def test_logit_bias_shifts_the_distribution(stage, assert_distributed):
    bias = {0: 2.0, 7: -1.0, 39: -100.0}
    logits = LOGITS.clone()
    for token, value in bias.items():
        logits[token] += value
    drawn = stage(V, num_slots=DRAWS).draws(LOGITS, SamplingParams(logit_bias=bias), DRAWS)
    probabilities = exact(logits, SamplingParams())
    assert drawn[drawn == 39].size == 0
    probabilities[39] = 0
    assert_distributed(drawn, probabilities)


def test_allowed_tokens_share_all_the_probability(stage, assert_distributed):
    allowed = [2, 3, 17, 39]
    sampling = SamplingParams(allowed_token_ids=allowed, logit_bias={3: 1.0})
    logits = torch.full((V,), -float("inf"))
    logits[allowed] = LOGITS[allowed]
    logits[3] += 1
    drawn = stage(V, num_slots=DRAWS).draws(LOGITS, sampling, DRAWS)
    assert_distributed(drawn, exact(logits, SamplingParams()))


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 50}, {"top_k": 3000, "temperature": 1.5}, {"top_p": 0.8}], ids=str
)
def test_a_large_vocabulary_is_drawn_exactly(stage, assert_distributed, options):
    vocab_size, batch = 30_011, 40
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(2)) * 2
    sampling = SamplingParams(**options)
    probabilities = exact(logits, sampling)
    # Tokens are pooled into 12 groups; neighbours go to different groups.
    group = np.arange(vocab_size) % 12
    world = stage(vocab_size, num_slots=1)
    world.admit(0, sampling, seed=11)
    drawn = [
        world.draw(logits.expand(batch, -1), [0] * batch, range(start, start + batch)).tokens.numpy()
        for start in range(1, 321, batch)
    ]
    drawn = np.concatenate(drawn)
    assert (probabilities[drawn] > 0).all()
    assert_distributed(group[drawn], np.bincount(group, weights=probabilities))


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
@pytest.mark.parametrize("vocab_size", [64, 133, 320])
def test_tokens_of_several_blocks_are_drawn_exactly(stage, assert_distributed, vocab_size, temperature):
    """Blocks that weigh differently, some of their tokens impossible, the last one short."""
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(4)) * 0.6
    logits += torch.arange(vocab_size) // BLOCK_TOKENS * 0.4
    logits[5::9] = -float("inf")
    sampling = SamplingParams(temperature=temperature)
    drawn = stage(vocab_size, num_slots=DRAWS).draws(logits, sampling, DRAWS)
    assert_distributed(drawn, exact(logits, sampling))
    blocks = np.arange(vocab_size) // BLOCK_TOKENS
    assert_distributed(blocks[drawn], np.bincount(blocks, weights=exact(logits, sampling)))


def test_a_blocks_noise_tells_nothing_of_its_tokens(stage, assert_distributed):
    """Were it its first token's, that one would come out when its block does."""
    vocab_size = 4 * BLOCK_TOKENS
    drawn = stage(vocab_size, num_slots=DRAWS).draws(torch.zeros(vocab_size), SamplingParams(), DRAWS)
    assert_distributed(drawn % BLOCK_TOKENS, np.ones(BLOCK_TOKENS) / BLOCK_TOKENS)


def test_tokens_of_neighbouring_positions_and_seeds_are_independent(stage, assert_distributed):
    vocab_size, count = 6, 20_000
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(3))
    p = softmax(logits.double().numpy())
    world = stage(vocab_size, num_slots=2)
    world.admit(0, SamplingParams(), seed=100)
    world.admit(1, SamplingParams(), seed=101)
    first, second = (
        world.draw(logits.expand(count, -1), [slot] * count, range(count)).tokens.numpy() for slot in (0, 1)
    )
    assert_distributed(first[:-1] * vocab_size + first[1:], np.outer(p, p).ravel())
    assert_distributed(first * vocab_size + second, np.outer(p, p).ravel())
