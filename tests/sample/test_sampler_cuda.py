"""The sampler on a GPU: the CPU's noise, the same tokens in any company, never a wait for the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pellucid.sample.noise import gumbel, token_codes
from pellucid.spec.verify import VerifyRows, verify
from tests.sample.test_sampler import crowd

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_noise_is_the_cpus_up_to_the_last_bits_of_the_logarithm():
    seeds, positions = torch.arange(50) - 25, torch.arange(50) * 3
    host = gumbel(seeds, positions, token_codes(20_000))
    device = gumbel(seeds.cuda(), positions.cuda(), token_codes(20_000, "cuda"))
    torch.testing.assert_close(device.cpu(), host, rtol=2e-6, atol=2e-6)


def test_almost_every_token_is_the_cpus(stage):
    host, logits, positions = crowd(stage, 200)
    device, _, _ = crowd(stage, 200, device="cuda")
    on_host = host.draw(logits, range(200), positions).tokens
    on_device = device.draw(logits, range(200), positions).tokens.cpu()
    assert (on_host == on_device).sum() >= 199


def test_a_request_draws_the_same_token_in_any_company(stage):
    world, logits, positions = crowd(stage, 100, device="cuda")
    together = world.draw(logits, range(100), positions).tokens.cpu()
    for slot in range(100):
        alone = world.draw(logits[slot : slot + 1], [slot], positions[slot : slot + 1]).tokens.cpu()
        assert alone[0] == together[slot]


def test_a_step_never_waits_for_the_device(stage):
    world, logits, positions = crowd(stage, 64, device="cuda")
    logits, slots = logits.cuda(), torch.arange(64, device="cuda")
    rows = VerifyRows(
        cu_logits=torch.arange(0, 65, 4, device="cuda"),
        inputs=torch.zeros(64, dtype=torch.int32, device="cuda"),
        room=torch.full((16,), 9, device="cuda"),
        samples=torch.ones(16, dtype=torch.bool, device="cuda"),
        max_drafts=3,
    )
    places = torch.tensor(positions, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch = world.state.batch(np.arange(64), slots, places)
        verify(world.sampler(logits, batch, world.token_ids), rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
