"""How a drafter draws: as the target does, or from its own distribution with noise of its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

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
        [
            Admission(
                seq_id=i,
                slot=i,
                token_ids=ints([1]),
                prompt_len=1,
                num_computed=0,
                limit=9,
                seed=i,
                sampling=p,
            )
            for i, p in enumerate(params)
        ],
    )
    slots = np.arange(len(params))
    positions = torch.full((len(params),), 5)
    return Sampler(state), state.batch(slots, torch.from_numpy(slots), positions)


def logits_of(num: int) -> torch.Tensor:
    return torch.tensor([0.3, -1.0, 2.0, 0.0, 1.1, -2.0, 0.7]).repeat(num, 1)


TOKEN_IDS = torch.zeros(NUM, 10, dtype=torch.int32)


def test_it_is_drawn_from_the_distribution_that_it_says() -> None:
    sampler, batch = make([SamplingParams(temperature=1.7)] * NUM)
    drawn = OwnDraw(sampler)(logits_of(NUM), batch, TOKEN_IDS)
    assert drawn.probs is not None
    torch.testing.assert_close(drawn.probs, (logits_of(NUM) / 1.7).softmax(-1))
    counts = torch.bincount(drawn.tokens.long(), minlength=VOCAB).numpy()
    assert chi_square_z(counts, NUM * drawn.probs[0].double().numpy()) < 4


def test_its_noise_tells_nothing_of_the_targets() -> None:
    """Two independent draws agree with probability sum(p * p)."""
    sampler, batch = make([SamplingParams(temperature=1.7)] * NUM)
    mine = OwnDraw(sampler)(logits_of(NUM), batch, TOKEN_IDS)
    target = sampler(logits_of(NUM), batch, TOKEN_IDS).tokens
    assert mine.probs is not None
    expected = float((mine.probs[0] ** 2).sum())
    share = float((mine.tokens == target).float().mean())
    assert abs(share - expected) < 4 * (expected * (1 - expected) / NUM) ** 0.5


def test_a_greedy_draft_is_certain() -> None:
    sampler, batch = make([SamplingParams(temperature=0.0)] * 3)
    drawn = OwnDraw(sampler)(logits_of(3), batch, TOKEN_IDS)
    assert drawn.tokens.tolist() == [2, 2, 2] and drawn.probs is not None
    assert drawn.probs.tolist() == [[0, 0, 1, 0, 0, 0, 0]] * 3


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
