"""The verifier against a naive walk, and speculation against plain autoregression."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pellucid.rows import Trees
from pellucid.sample.logprobs import LogprobTensors
from pellucid.sample.sampler import Sampled, Sampler
from pellucid.sample.state import SamplingState
from pellucid.sampling_params import SamplingParams
from pellucid.schedule.plan import Admission, ints
from pellucid.spec.base import DraftShape, NullProposer
from pellucid.spec.registry import PROPOSERS
from pellucid.spec.verify import VerifyRows, verify
from tests.sample.conftest import admit

CHAIN = (0, 1, 2, 3)
TREES = [(0, 0, 1, 1, 2, 3), (0, 1, 0, 3, 3, 0, 6), (0, 0, 0), CHAIN]


def naive_walk(
    sampled: list[int], inputs: list[int], parents: tuple[int, ...], room: int
) -> tuple[list, list]:
    """Tokens and path of one row, by the rule itself; node i's logits are sampled[i], fed with inputs[i]."""
    tokens, path, node = [], [], 0
    while True:
        tokens.append(sampled[node])
        path.append(node)
        agreeing = [
            c for c in range(1, len(sampled)) if parents[c - 1] == node and inputs[c] == sampled[node]
        ]
        if not agreeing:
            return tokens[:room], path[:room]
        node = agreeing[0]


def random_tree(rng: np.random.Generator, num_drafts: int) -> tuple[int, ...]:
    return tuple(int(rng.integers(0, node)) for node in range(1, 1 + num_drafts))


def random_step(rng: np.random.Generator, num_nodes: int, num_rows: int):
    """Rows with 0 (no logits) to num_nodes logits, over three tokens, so that drafts often agree."""
    counts = rng.integers(0, num_nodes + 1, num_rows)
    counts[rng.integers(num_rows)] = num_nodes
    cu_logits = np.concatenate([[0], counts.cumsum()])
    sampled, inputs = rng.integers(0, 3, (2, cu_logits[-1]))
    return cu_logits, sampled, inputs, rng.integers(-1, num_nodes + 2, num_rows), rng.random(num_rows) < 0.8


@pytest.mark.parametrize("parents", [None, *TREES], ids=str)
def test_it_is_the_naive_walk(parents):
    rng = np.random.default_rng(5)
    size = len(parents or CHAIN)
    lengths = set()
    for _ in range(60):
        cu, sampled, inputs, room, samples = random_step(rng, 1 + size, 7)
        # Every other row has this tree, the others any; row b is in slot 9 - b of ten.
        walks = [random_tree(rng, size) if b % 2 and parents else parents or CHAIN for b in range(7)]
        of_slots = np.zeros((10, size), dtype=np.int8)
        of_slots[9 - np.arange(7)] = walks
        trees = Trees(torch.tensor(of_slots), 9 - torch.arange(7), size)
        output = verify(
            Sampled(torch.tensor(sampled, dtype=torch.int32)),
            VerifyRows(
                cu_logits=torch.tensor(cu, dtype=torch.int32),
                inputs=torch.tensor(inputs, dtype=torch.int32),
                room=torch.tensor(room, dtype=torch.int32),
                samples=torch.tensor(samples),
                max_drafts=size,
                trees=None if parents is None else trees,
            ),
        )
        assert output.tokens.dtype == output.num_new.dtype == torch.int32
        for b in range(7):
            part = slice(cu[b], cu[b + 1])
            n = int(output.num_new[b])
            if not samples[b] or part.start == part.stop:
                assert n == 0
                continue
            row = sampled[part].tolist(), inputs[part].tolist()
            tokens, path = naive_walk(*row, walks[b], max(0, room[b]))
            assert output.tokens[b, :n].tolist() == tokens
            assert output.path is None or output.path[b, :n].tolist() == path
            lengths.add(n)
    assert {0, 1, 2} <= lengths


def test_without_drafts_it_is_a_gather():
    rows = VerifyRows(
        cu_logits=torch.tensor([0, 1, 1, 2, 3]),
        inputs=torch.zeros(3, dtype=torch.int32),
        room=torch.tensor([5, 5, 0, 1]),
        samples=torch.tensor([True, True, True, True]),
    )
    logprobs = LogprobTensors(torch.arange(6).view(3, 2), torch.rand(3, 2), torch.tensor([1, 2, 3]))
    output = verify(Sampled(torch.tensor([7, 8, 9], dtype=torch.int32), logprobs), rows)
    assert output.num_new.tolist() == [1, 0, 0, 1]
    assert output.tokens.shape == (4, 1) and output.tokens[[0, 3], 0].tolist() == [7, 9]
    assert output.logprobs is not None
    assert torch.equal(output.logprobs.logprobs[[0, 3], 0], logprobs.logprobs[[0, 2]])
    assert output.logprobs.ranks[[0, 3], 0].tolist() == [1, 3]


def test_a_step_without_any_logits_yields_nothing():
    rows = VerifyRows(
        cu_logits=torch.zeros(3, dtype=torch.int32),
        inputs=torch.zeros(0, dtype=torch.int32),
        room=torch.tensor([5, 5]),
        samples=torch.tensor([True, True]),
        max_drafts=2,
    )
    output = verify(Sampled(torch.zeros(0, dtype=torch.int32)), rows)
    assert output.num_new.tolist() == [0, 0] and output.tokens.shape == (2, 3)


V = 23
PROMPT = [1, 2, 3]
LIMIT = 60
MODEL = torch.randn(V, V, generator=torch.Generator().manual_seed(3)) * 2  # logits given the last token


def generate(sampling: SamplingParams, num_drafts: int, seed: int) -> list[int]:
    """Generate up to LIMIT tokens, verifying drafts that an oracle got right two times in three."""
    state, rng = SamplingState(2, V), np.random.default_rng(seed)
    sampler = Sampler(state)
    token_ids = torch.zeros((2, LIMIT + 8), dtype=torch.int32)
    token_ids[1, :3] = torch.tensor(PROMPT)
    admit(state, [
        Admission(
            seq_id=0, slot=1, token_ids=ints(PROMPT), prompt_len=3, num_computed=0, limit=LIMIT, seed=seed,
            sampling=sampling, stop_token_ids=(4, 5), bad_words_token_ids=((7, 8), (9,)),
        )
    ])  # fmt: skip
    oracle = generate(sampling, 0, seed) if num_drafts else []
    known = 3
    while known < LIMIT:
        k = int(rng.integers(0, num_drafts + 1))
        for j in range(k):
            guess = oracle[known + j] if known + j < LIMIT and rng.random() < 0.67 else int(rng.integers(V))
            token_ids[1, known + j] = guess
        inputs = token_ids[1, known - 1 : known + k].clone()
        places = torch.arange(known, known + k + 1)
        batch = state.batch(np.ones(k + 1, np.int64), torch.ones(k + 1, dtype=torch.int64), places)
        sampled = sampler(MODEL[inputs.long()], batch, token_ids)
        rows = VerifyRows(
            cu_logits=torch.tensor([0, k + 1]),
            inputs=inputs,
            room=torch.tensor([LIMIT - known]),
            samples=torch.tensor([True]),
            max_drafts=k,
        )
        output = verify(sampled, rows)
        n = int(output.num_new)
        token_ids[1, known : known + n] = output.tokens[0, :n]
        known += n
    return token_ids[1, :LIMIT].tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {},
        {"temperature": 0.7, "top_p": 0.9, "frequency_penalty": 0.3, "min_tokens": 10},
        {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    ],
    ids=str,
)
def test_drafts_never_change_a_token(options):
    sampling = SamplingParams(max_tokens=LIMIT, **options)
    for seed in range(4):
        plain = generate(sampling, 0, seed)
        for num_drafts in (1, 4):
            assert generate(sampling, num_drafts, seed) == plain


def test_shapes_know_the_most_that_they_can_yield():
    assert DraftShape(0).max_new == 1
    assert DraftShape(4).max_new == 5
    assert DraftShape(6, tree_depth=3).max_new == 4


def test_the_null_proposer_proposes_nothing():
    proposer = PROPOSERS.load("none")()
    assert isinstance(proposer, NullProposer) and proposer.shape.num_drafts == 0
    with pytest.raises(ValueError, match="speculative method 'nine'"):
        PROPOSERS.load("nine")
