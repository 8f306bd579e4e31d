"""A small stage for the sampler's tests: slots with requests in them, and a way to draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from pellucid.sample.sampler import Sampled, Sampler
from pellucid.sample.state import SamplingState
from pellucid.sampling_params import SamplingParams
from pellucid.schedule.plan import Admission, ints


class Stage:
    """Slots of a sampling state together with their token rows."""

    def __init__(
        self, vocab_size: int, num_slots: int = 8, max_len: int = 32, *, device: str = "cpu"
    ) -> None:
        self.device = device
        self.state = SamplingState(num_slots, vocab_size, device)
        # Large ids stand for what was there before.
        self.token_ids = torch.full((num_slots, max_len), 10**9, dtype=torch.int32, device=device)
        self.sampler = Sampler(self.state)

    def admit(
        self,
        slot: int,
        sampling: SamplingParams,
        *,
        prompt: Sequence[int] = (0,),
        output: Sequence[int] = (),
        seed: int = 0,
        stop: Sequence[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
    ) -> None:
        self.admit_all([make(slot, sampling, prompt, output, seed, stop, bad_words)])

    def admit_all(self, admissions: list[Admission]) -> None:
        admit(self.state, admissions)
        for a in admissions:
            self.token_ids[a.slot, : len(a.token_ids)] = torch.tensor(a.token_ids, device=self.device)

    def draw(self, logits: Tensor, slots: Sequence[int], positions: Sequence[int]) -> Sampled:
        places = torch.tensor([list(slots), list(positions)], device=self.device)
        batch = self.state.batch(np.array(slots), places[0], places[1])
        return self.sampler(logits.to(self.device, copy=True), batch, self.token_ids)

    def draws(self, logits: Tensor, sampling: SamplingParams, count: int, **context: Sequence) -> np.ndarray:
        """`count` draws from the same logits [V] in one context, by requests that differ in their seed."""
        one = make(0, sampling, **({"prompt": (0,)} | context))
        prepared = self.state.prepare(one)
        (_, *integers), floats = prepared.numbers  # the first is the seed
        alike = [replace(prepared, slot=i, numbers=([1000 + i, *integers], floats)) for i in range(count)]
        self.state.admit(alike)
        self.token_ids[:count, : len(one.token_ids)] = torch.tensor(one.token_ids, device=self.device)
        logits = logits.expand(count, -1)
        return self.draw(logits, range(count), [len(one.token_ids)] * count).tokens.numpy()


def admit(state: SamplingState, admissions: list[Admission]) -> None:
    """Into their slots."""
    state.admit([state.prepare(admission) for admission in admissions])


def make(
    slot: int,
    sampling: SamplingParams,
    prompt: Sequence[int] = (0,),
    output: Sequence[int] = (),
    seed: int = 0,
    stop: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
) -> Admission:
    return Admission(
        seq_id=slot,
        slot=slot,
        token_ids=ints([*prompt, *output]),
        prompt_len=len(prompt),
        num_computed=0,
        limit=1000,
        seed=seed,
        sampling=sampling,
        stop_token_ids=tuple(stop),
        bad_words_token_ids=tuple(tuple(word) for word in bad_words),
    )


@pytest.fixture
def stage() -> type[Stage]:
    return Stage


def chi_square_z(observed: np.ndarray, expected: np.ndarray) -> float:
    """How many standard deviations chi-square is off (Wilson and Hilferty's cube-root approximation)."""
    assert (observed[expected == 0] == 0).all(), "drew what has probability 0"
    observed, expected = observed[expected > 0], expected[expected > 0]
    degrees = len(observed) - 1
    if degrees == 0:
        return 0.0
    chi_square = ((observed - expected) ** 2 / expected).sum()
    spread = 2 / (9 * degrees)
    return float(((chi_square / degrees) ** (1 / 3) - (1 - spread)) / spread**0.5)


@pytest.fixture
def assert_distributed():
    """Assert that drawn tokens follow `probabilities`; the draws are fixed, so this cannot flicker."""

    def check(drawn: np.ndarray, probabilities: np.ndarray) -> None:
        observed = np.bincount(drawn, minlength=len(probabilities)).astype(float)
        z = chi_square_z(observed, probabilities / probabilities.sum() * len(drawn))
        assert abs(z) < 4, f"chi-square is {z:.1f} standard deviations off"

    return check
