"""The kernel that hashes for noise: bit for bit its plain reference, which is the sampler's noise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from pellucid.kernels.noise import BLOCK, keys, keys_ref, uniforms, uniforms_ref
from pellucid.sample import noise
from pellucid.sample.noise import Purpose

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def places(num: int) -> tuple[Tensor, Tensor, Tensor]:
    """Seeds of a table's column, positions, and a purpose for each."""
    generator = torch.Generator().manual_seed(num)
    table = torch.randint(-(2**63), 2**63 - 1, (num, 11), generator=generator)
    table[: min(num, 4), 3] = torch.tensor([0, -1, 2**63 - 1, -(2**63)])[: min(num, 4)]
    positions = torch.randint(0, 2**40, (num,), generator=generator)
    purposes = torch.randint(0, len(Purpose), (num,), generator=generator)
    return table.to(DEVICE)[:, 3], positions.to(DEVICE), purposes.to(DEVICE)


@pytest.mark.parametrize("num", [0, 1, 5, BLOCK, 3 * BLOCK + 1])
@pytest.mark.parametrize("purpose", [*Purpose, None])
def test_every_bit_is_the_references(num: int, purpose: Purpose | None) -> None:
    seeds, positions, purposes = places(num)
    args = seeds, positions, purposes if purpose is None else purpose
    for launched, expected in ((keys(*args), keys_ref(*args)), (uniforms(*args), uniforms_ref(*args))):
        assert launched.dtype == expected.dtype and torch.equal(launched, expected)


def test_it_is_the_noise_of_the_sampler() -> None:
    seeds, positions, purposes = places(500)
    assert torch.equal(keys(seeds, positions, purposes), noise.keys(seeds, positions, purposes))
    numbers = noise.uniform(seeds, positions, Purpose.ACCEPT)
    assert torch.equal(uniforms(seeds, positions, Purpose.ACCEPT), numbers)
    assert 0 <= numbers.min() < 0.05 and 0.95 < numbers.max() < 1


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_the_gpus_bits_are_the_cpus() -> None:
    seeds, positions, purposes = places(100_000)
    here = [x.cpu() for x in (seeds, positions, purposes)]
    assert torch.equal(keys(seeds, positions, purposes).cpu(), keys_ref(*here))
    assert torch.equal(uniforms(seeds, positions, purposes).cpu(), uniforms_ref(*here))
