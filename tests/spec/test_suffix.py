"""Drafts from texts, against a naive search: the longest matches vote, in finished texts, too."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from pellucid import LLM, SamplingParams
from pellucid.config import SpeculativeConfig
from pellucid.spec.base import Known
from pellucid.spec.suffix import (
    MOST_POOL_TOKENS,
    NEAR,
    POOL_PLACES,
    VOTES,
    SuffixProposer,
    best_matches,
    matches,
    vote,
    vote_on_host,
)
from tests.llm.test_invariance import BASE, random_requests

SUFFIX = {"method": "suffix", "num_speculative_tokens": 4, "adaptive": False}


def naive_matches(text: list[int], num_known: int, last: list[int]) -> list[int]:
    """Of every place: how many tokens up to it are those of `last`, the newest first."""
    found = []
    for place in range(len(text)):
        num = 0
        while num < len(last) and num <= place and text[place - num] == last[num]:
            num += 1
        found.append(num if place < num_known - 1 else 0)
    return found


def test_matches_are_those_of_a_naive_search() -> None:
    rng = random.Random(0)
    for _ in range(50):
        texts = [[rng.randrange(3) for _ in range(30)] for _ in range(3)]
        known = [rng.randint(1, 30) for _ in texts]
        last = [rng.randrange(3) for _ in range(5)]
        got = matches(torch.tensor(texts), torch.tensor(known) - 1, torch.tensor([[last]]))
        assert got[0].tolist() == [naive_matches(*pair, last) for pair in zip(texts, known, strict=True)]


def test_the_longest_matches_are_taken_and_of_these_the_last() -> None:
    scores, places = best_matches(torch.tensor([[1, 0, 3, 3] + [2] * VOTES]))
    assert places[0, :3].tolist() == [3, 2, 3 + VOTES] and scores[0, :3].tolist() == [3, 3, 2]


def drafts_of_both(proposer: SuffixProposer, texts: torch.Tensor, newest: torch.Tensor) -> torch.Tensor:
    """The drafts of the rows where something matches, [n, k], once a CPU has found what a GPU does."""
    known = Known(
        token_ids=texts,
        newest=newest,
        samples=newest > 0,
        host_slots=np.arange(len(texts)),
        has_chunks=False,
        num_wanted=4,
    )
    follow, votes = proposer._found(texts, known)
    host_follow, host_votes = proposer._found_on_host(known)
    drafts = vote_on_host(host_follow, host_votes)
    assert drafts.min() >= 0, "where nothing matches, any id will do"
    matched = torch.from_numpy(host_votes.any(1))
    for row in matched.nonzero().flatten():
        assert host_follow[row, host_votes[row]].tolist() == follow[row, votes[row]].tolist()
    assert vote(follow, votes)[matched].equal(torch.from_numpy(drafts)[matched])
    return torch.from_numpy(drafts)[matched]


@pytest.mark.parametrize("longest", [1, 2, 24])
@pytest.mark.parametrize("num_cached", [0, 3, 32])
@pytest.mark.parametrize(
    ("num_tokens", "num_texts", "length"),
    [(4, 40, 60), (50, 40, 60), (30, 1, 200), (1, 1, 60), (50, 40, POOL_PLACES + 300)],
    ids=["many matches", "few", "identical texts", "one token", "longer than is kept"],
)
def test_a_cpu_finds_what_a_gpu_does(
    num_tokens: int, num_texts: int, length: int, num_cached: int, longest: int
) -> None:
    """Which looks at all places of all texts."""
    rng = torch.Generator().manual_seed(0)
    config = SpeculativeConfig(
        method="suffix",
        num_speculative_tokens=4,
        suffix_decoding_max_cached_requests=num_cached,
        suffix_decoding_max_tree_depth=longest,
    )
    proposer = SuffixProposer.of(config)
    texts = torch.randint(num_tokens, (num_texts, length), dtype=torch.int32, generator=rng)
    texts = texts.repeat(40 // num_texts, 1)
    retired = torch.randint(length // 2, length - 1, (40,), generator=rng)
    proposer.retire(list(range(40)), texts, retired)
    newest = torch.randint(-1, length, (40,), generator=rng)
    assert len(drafts_of_both(proposer, texts, newest)) > 10


def test_no_match_goes_on_into_the_text_before() -> None:
    proposer = SuffixProposer.of(SpeculativeConfig(method="suffix", num_speculative_tokens=4))
    texts = torch.arange(3 * POOL_PLACES, dtype=torch.int32).view(3, -1)  # all tokens differ
    end, start = texts[0, -9:], texts[1, :1]
    own = torch.cat((end[-1:], start, texts[2, :5], end, start))
    texts[2, : len(own)] = own
    proposer.retire([0, 1], texts, torch.full((3,), POOL_PLACES - 1))
    drafts = drafts_of_both(proposer, texts[2:], torch.tensor([len(own) - 1]))
    assert drafts.tolist() == [own[2:6].tolist()]


def test_many_places_may_have_the_newest_token_and_none_what_is_before_it() -> None:
    proposer = SuffixProposer.of(SpeculativeConfig(method="suffix", num_speculative_tokens=4))
    text = torch.tensor([[1, 2] * 2 * NEAR + [3, 2] + [0] * 9], dtype=torch.int32)
    assert drafts_of_both(proposer, text, torch.tensor([4 * NEAR + 1])).tolist() == [[1, 2, 1, 2]]


def test_most_of_those_decide_who_have_said_all_before() -> None:
    rng = random.Random(1)
    for _ in range(100):
        follow = [[rng.randrange(3) for _ in range(4)] for _ in range(6)]
        drafts = vote(torch.tensor([follow]), torch.tensor([[True] * 5 + [False]]))[0].tolist()
        voters = follow[:5]
        for i, draft in enumerate(drafts):
            counts = Counter(text[i] for text in voters)
            assert counts[draft] == max(counts.values())
            voters = [text for text in voters if text[i] == draft]


def test_the_pool_is_bounded_and_keeps_the_ends_of_the_last_texts() -> None:
    config = SpeculativeConfig(
        method="suffix", num_speculative_tokens=4, suffix_decoding_max_cached_requests=10_000
    )
    proposer = SuffixProposer.of(config)
    num = len(proposer._pool)
    assert proposer._pool.numel() == MOST_POOL_TOKENS
    texts = torch.arange(num + 2, dtype=torch.int32)[:, None] * 10_000 + torch.arange(3000, dtype=torch.int32)
    for slot in range(num + 2):
        proposer.retire([slot], texts, torch.full((num + 2,), 2000 if slot else 9))
    kept = {int(text[0]) // 10_000: text for text in proposer._pool}
    assert kept.keys() == {*range(2, num + 2)}, "the oldest ones have given way"
    assert kept[5].tolist() == texts[5, 2001 - POOL_PLACES : 2001].tolist()
    assert proposer._lengths.tolist() == [POOL_PLACES] * num


def test_a_finished_answer_helps_the_next_one(tiny: Path) -> None:
    prompts, _ = random_requests(6, seed=4)
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM(str(tiny), **BASE) as llm:
        plain = [o.outputs[0].token_ids for o in llm.generate(prompts, greedy, use_tqdm=False)]
    config = SUFFIX | {"adaptive": False}
    accepted = []
    with LLM(str(tiny), **BASE, speculative_config=config) as llm:
        for _ in range(2):
            before = llm.llm_engine.stats.num_accepted_tokens
            outputs = llm.generate(prompts, greedy, use_tqdm=False)
            accepted.append(llm.llm_engine.stats.num_accepted_tokens - before)
            assert [o.outputs[0].token_ids for o in outputs] == plain
    assert accepted[1] > accepted[0] + 50, accepted


def test_without_a_pool_only_the_own_text_is_looked_at(tiny: Path) -> None:
    prompts, params = random_requests(8, seed=5)
    config = SUFFIX | {"suffix_decoding_max_cached_requests": 0}
    with LLM(str(tiny), **BASE) as llm:
        plain = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    with LLM(str(tiny), **BASE, speculative_config=config) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == plain
