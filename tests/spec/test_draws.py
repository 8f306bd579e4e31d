"""How a drafter draws: as the target does, or from its own distribution with noise of its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from pellucid.sample.sampler import Sampler
from pellucid.sample.state import LogitsBatch, SamplingState
from pellucid.sampling_params import SamplingParams
from pellucid.schedule.plan import Admission, ints
from pellucid.spec.draws import AlikeDraw, OwnDraw, draw_for
from tests.sample.conftest import admit, chi_square_z

VOCAB, NUM = 7, 20_000


def make(params: list[SamplingParams]) -> tuple[Sampler, LogitsBatch]:
    """A sampler with a slot for each of `params`, and the batch that draws position 5 of all of them."""
    state = SamplingState(len(params), VOCAB)
    admit(
        state,
        [admission(i, p) for i, p in enumerate(params)],
    )
    slots = np.arange(len(params))
    positions = torch.full((len(params),), 5)
    return Sampler(state), state.batch(slots, torch.from_numpy(slots), positions)


def admission(slot: int, params: SamplingParams) -> Admission:
    return Admission(
        seq_id=slot, slot=slot, token_ids=ints([1]), prompt_len=1, num_computed=0, limit=9, seed=slot,
        sampling=params,
    )  # fmt: skip


def logits_of(num: int) -> torch.Tensor:
    return torch.tensor([0.3, -1.0, 2.0, 0.0, 1.1, -2.0, 0.7]).repeat(num, 1)


TOKEN_IDS = torch.zeros(NUM, 10, dtype=torch.int32)


def test_it_is_drawn_from_the_distribution_that_it_says() -> None:
    sampler, batch = make([SamplingParams(temperature=1.7)] * NUM)
    drawn = OwnDraw(sampler)(logits_of(NUM), batch, TOKEN_IDS)
    assert drawn.probs is not None
    probs = drawn.probs.dense(VOCAB)
    torch.testing.assert_close(probs, (logits_of(NUM) / 1.7).softmax(-1))
    counts = torch.bincount(drawn.tokens.long(), minlength=VOCAB).numpy()
    assert chi_square_z(counts, NUM * probs[0].double().numpy()) < 4


def test_its_noise_tells_nothing_of_the_targets() -> None:
    """Two independent draws agree with probability sum(p * p)."""
    sampler, batch = make([SamplingParams(temperature=1.7)] * NUM)
    mine = OwnDraw(sampler)(logits_of(NUM), batch, TOKEN_IDS)
    target = sampler(logits_of(NUM), batch, TOKEN_IDS).tokens
    assert mine.probs is not None
    expected = float((mine.probs.probs[0] ** 2).sum())
    share = float((mine.tokens == target).float().mean())
    assert abs(share - expected) < 4 * (expected * (1 - expected) / NUM) ** 0.5


def test_a_greedy_draft_is_certain() -> None:
    sampler, batch = make([SamplingParams(temperature=0.0)] * 3)
    drawn = OwnDraw(sampler)(logits_of(3), batch, TOKEN_IDS)
    assert drawn.tokens.tolist() == [2, 2, 2] and drawn.probs is not None
    assert drawn.probs.dense(VOCAB).tolist() == [[0, 0, 1, 0, 0, 0, 0]] * 3


def test_of_a_large_vocabulary_the_likeliest_blocks_are_kept() -> None:
    """They are all that was drawn from: nothing else is drawn, and what is kept sums to 1."""
    logits = torch.randn(40, 5000, generator=torch.Generator().manual_seed(1)) * 3
    state = SamplingState(40, 5000)
    admit(state, [admission(i, SamplingParams(temperature=1.0)) for i in range(40)])
    slots = np.arange(40)
    batch = state.batch(slots, torch.from_numpy(slots), torch.full((40,), 5))
    drawn = OwnDraw(Sampler(state))(logits, batch, TOKEN_IDS)
    assert drawn.probs is not None and drawn.probs.probs.shape == (40, 1024)
    dense = drawn.probs.dense(5000)
    torch.testing.assert_close(dense.sum(-1), torch.ones(40))
    assert (dense.gather(1, drawn.tokens[:, None].long()) > 0).all()
    best = F.pad(logits, (0, 56), value=-torch.inf).view(40, -1, 64).amax(-1).topk(16, dim=1).indices
    assert torch.equal(drawn.probs.blocks.sort().values, best.int().sort().values)
    rest = logits.where(dense > 0, -torch.inf)
    torch.testing.assert_close(dense, rest.softmax(-1))


@pytest.mark.parametrize("kind", [{}, {"top_p": 0.6}, {"logit_bias": {1: 5.0}}, {"presence_penalty": 2.0}])
def test_drawn_alike_it_is_the_targets_token(kind: dict) -> None:
    sampler, batch = make([SamplingParams(temperature=0.9, logprobs=2, **kind)] * 500)
    drawn = AlikeDraw(sampler)(logits_of(500), batch, TOKEN_IDS)
    assert drawn.probs is None
    assert drawn.tokens.tolist() == sampler(logits_of(500), batch, TOKEN_IDS).tokens.tolist()
    assert len(drawn.tokens.unique()) > 1


def test_the_textbooks_test_wants_a_draw_of_its_own() -> None:
    sampler, _ = make([SamplingParams()])
    assert isinstance(draw_for("standard", sampler), OwnDraw)
    assert isinstance(draw_for("strict", sampler), AlikeDraw)
