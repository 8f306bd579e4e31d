"""Gumbel noise is standard, independent in every direction, and the same wherever it is asked for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pellucid.sample.noise import Purpose, gumbel, keys, token_codes, uniform

MASK = 2**64 - 1


def noise(seeds, positions, vocab_size):
    return gumbel(torch.as_tensor(seeds), torch.as_tensor(positions), token_codes(vocab_size))


def uniforms(g: torch.Tensor) -> np.ndarray:
    return (-(-g.double()).exp()).exp().numpy()


def mix(x: int) -> int:
    for _ in range(2):
        x = ((x ^ (x >> 32)) * 0xD6E8FEB86659FD93) & MASK
    return x ^ (x >> 32)


def test_hash_is_degskis_mixer_over_weyl_steps():
    step = 0x9E3779B97F4A7C15
    codes = [mix((i + 1) * step & MASK) for i in range(100)]
    assert [c & MASK for c in token_codes(100).tolist()] == codes
    for seed, position in [(0, 0), (-1, 7), (2**63 - 1, 10**6)]:
        expected = mix((mix((seed * step + Purpose.RESIDUAL) & MASK) + position * step) & MASK)
        key = keys(torch.tensor([seed]), torch.tensor([position]), Purpose.RESIDUAL)
        assert key.item() & MASK == expected


def test_gumbel_follows_its_formula():
    seeds, positions, codes = torch.tensor([5, -3]), torch.tensor([9, 1000]), token_codes(1000)
    x = codes ^ keys(seeds, positions)[:, None]
    prime = 0xD6E8FEB86659FD93 - 2**64
    x = x * prime
    x = (x ^ (x >> 32)) * prime
    v = x.double().abs() / 2**63
    exact = -(-(-v).log1p()).log()
    # Below -1.5 (2% of the mass, never the winner's) float32 has few bits of 1 - v left.
    difference = (gumbel(seeds, positions, codes).double() - exact).abs()
    assert (difference < torch.where(exact > -1.5, 2e-5, 0.05)).all()


def test_it_has_the_moments_of_the_gumbel_distribution():
    g = noise(range(100), [3] * 100, 50_000).double()
    assert abs(g.mean().item() - 0.5772156649) < 4 * math.sqrt(math.pi**2 / 6 / g.numel())
    assert abs(g.var().item() - math.pi**2 / 6) < 0.01


@pytest.mark.parametrize("quantile", [-2.0, -1.0, 0.0, 2.0, 5.0, 8.0, 10.0, 12.0])
def test_both_tails_have_the_right_weight(quantile):
    above = below = total = 0
    for seed in range(8):
        g = noise([seed] * 20, range(20), 100_000)
        above, below, total = (
            above + (g > quantile).sum().item(),
            below + (g <= quantile).sum().item(),
            total + g.numel(),
        )
    probability = math.exp(-math.exp(-quantile))
    spread = math.sqrt(total * probability * (1 - probability))
    assert abs(below - total * probability) < 4 * spread
    assert abs(above - total * (1 - probability)) < 4 * spread


def test_it_is_finite_at_both_ends_of_the_hash():
    inverse = pow(0xD6E8FEB86659FD93, -1, 2**64)
    key = keys(torch.tensor([0]), torch.tensor([0])).item()

    def code_whose_hash_is(last: int) -> int | None:
        """Undo the hash step by step; the fold leaves the sign bit clear, so half the values never occur."""
        folded = last * inverse & MASK
        unfolded = folded ^ (folded >> 32)
        code = (unfolded * inverse & MASK) ^ (key & MASK)
        return None if folded >> 63 else code - 2**64 if code >= 2**63 else code

    for ends, extreme in [
        (range(8), math.log(2**64)),
        (range(2**63 - 8, 2**63 + 8), -math.log(-math.log(2**-24))),
    ]:
        codes = [code for last in ends if (code := code_whose_hash_is(last)) is not None]
        g = gumbel(torch.tensor([0]), torch.tensor([0]), torch.tensor(codes))
        assert torch.isfinite(g).all()
        assert any(x == pytest.approx(extreme) for x in g[0].tolist())


SEEDS, POSITIONS = torch.arange(200), torch.full((200,), 7)
BLOCK = noise(SEEDS, POSITIONS, 1001)
DIRECTIONS = {
    "next token": (BLOCK[:, :-1], BLOCK[:, 1:]),
    "next position": (BLOCK, noise(SEEDS, POSITIONS + 1, 1001)),
    "next seed": (BLOCK, noise(SEEDS + 1, POSITIONS, 1001)),
    "next seed at the last position": (BLOCK, noise(SEEDS + 1, POSITIONS - 1, 1001)),
    "next token at the next position": (BLOCK[:, :-1], noise(SEEDS, POSITIONS + 1, 1001)[:, 1:]),
    "seed and position exchanged": (BLOCK[8:], noise(POSITIONS, SEEDS, 1001)[8:]),
    "complementary seed": (BLOCK, noise(~SEEDS, POSITIONS, 1001)),
    "distant seed": (BLOCK, noise(SEEDS - 2**63, POSITIONS, 1001)),
    "block and first token": (BLOCK, gumbel(SEEDS, POSITIONS, token_codes(1001), Purpose.BLOCK)),
}


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_neighbours_are_independent(direction):
    a, b = (uniforms(g).ravel() for g in DIRECTIONS[direction])
    assert abs(np.corrcoef(a, b)[0, 1]) < 4 / math.sqrt(len(a))
    counts = np.histogram2d(a, b, bins=16, range=[[0, 1], [0, 1]])[0].ravel()
    expected = len(a) / 256
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - 255) < 4 * math.sqrt(2 * 255)


@pytest.mark.parametrize("vocab_size", [1, 7, 1003, 32_000])
def test_bits_do_not_depend_on_how_many_rows_are_asked_for(vocab_size):
    seeds, positions = range(-50, 50), range(0, 700, 7)
    together = noise(seeds, positions, vocab_size)
    for i in (0, 1, 33, 99):
        assert torch.equal(together[i], noise(seeds[i : i + 1], positions[i : i + 1], vocab_size)[0])


def test_a_slice_of_the_codes_is_a_slice_of_the_noise():
    codes = token_codes(1000)
    seed, position = torch.tensor([3]), torch.tensor([4])
    assert torch.equal(gumbel(seed, position, codes)[:, 400:], gumbel(seed, position, codes[400:]))


def test_uniforms_fill_the_unit_interval_and_purposes_differ():
    seeds, positions = torch.arange(50_000), torch.arange(50_000) % 17
    accept, residual = (uniform(seeds, positions, p).numpy() for p in (Purpose.ACCEPT, Purpose.RESIDUAL))
    for u in (accept, residual):
        assert u.min() >= 0 and u.max() < 1
        counts = np.histogram(u, bins=100, range=(0, 1))[0]
        assert abs(((counts - 500) ** 2 / 500).sum() - 99) < 4 * math.sqrt(2 * 99)
    assert abs(np.corrcoef(accept, residual)[0, 1]) < 4 / math.sqrt(50_000)
