"""The kernel that hashes for noise: bit for bit its plain reference, which is the sampler's noise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from pellucid.kernels.sampling.noise import BLOCK, keys, keys_ref, uniforms, uniforms_ref
from pellucid.sample import noise
from pellucid.sample.noise import Purpose

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def places(num: int) -> tuple[Tensor, Tensor]:
    """Seeds of a table's column, and positions."""
    generator = torch.Generator().manual_seed(num)
    table = torch.randint(-(2**63), 2**63 - 1, (num, 11), generator=generator)
    table[: min(num, 4), 3] = torch.tensor([0, -1, 2**63 - 1, -(2**63)])[: min(num, 4)]
    positions = torch.randint(0, 2**40, (num,), generator=generator)
    return table.to(DEVICE)[:, 3], positions.to(DEVICE)


@pytest.mark.parametrize("num", [0, 1, 5, BLOCK, 3 * BLOCK + 1])
@pytest.mark.parametrize("purpose", Purpose)
def test_every_bit_is_the_references(num: int, purpose: Purpose) -> None:
    args = *places(num), purpose
    for launched, expected in ((keys(*args), keys_ref(*args)), (uniforms(*args), uniforms_ref(*args))):
        assert launched.dtype == expected.dtype and torch.equal(launched, expected)


def test_keys_of_several_purposes_are_those_of_each() -> None:
    seeds, positions = places(50)
    together = keys_ref(seeds, positions, torch.tensor([[3], [0]], device=DEVICE))
    assert torch.equal(together, torch.stack([keys_ref(seeds, positions, purpose) for purpose in (3, 0)]))


def test_it_is_the_noise_of_the_sampler() -> None:
    seeds, positions = places(500)
    for purpose in Purpose:
        assert torch.equal(keys(seeds, positions, purpose), noise.keys(seeds, positions, purpose))
    numbers = noise.uniform(seeds, positions, Purpose.ACCEPT)
    assert torch.equal(uniforms(seeds, positions, Purpose.ACCEPT), numbers)
    assert 0 <= numbers.min() < 0.05 and 0.95 < numbers.max() < 1


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_the_gpus_bits_are_the_cpus() -> None:
    seeds, positions = places(100_000)
    here = seeds.cpu(), positions.cpu()
    for purpose in Purpose:
        assert torch.equal(keys(seeds, positions, purpose).cpu(), keys_ref(*here, purpose))
        assert torch.equal(uniforms(seeds, positions, purpose).cpu(), uniforms_ref(*here, purpose))
