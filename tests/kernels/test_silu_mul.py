"""Gated activations in one kernel: against the reference, at any width, and at the ends."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from pellucid.kernels.pointwise.silu_mul import ACTIVATIONS, BLOCK, silu_mul, silu_mul_ref
from tests.kernels.compare import DTYPES, assert_rounded_alike

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def packed(num_tokens: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(num_tokens, 2 * hidden, device=DEVICE).to(dtype)


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_activation_rounds_as_its_reference_does(act: str, dtype: torch.dtype) -> None:
    gate_up = packed(6, 96, dtype)
    assert_rounded_alike(silu_mul(gate_up, act).cpu(), silu_mul_ref(gate_up.cpu(), act))


@pytest.mark.parametrize(("num_tokens", "hidden"), [(1, 1), (3, 37), (2, BLOCK), (2, 2 * BLOCK + 300)])
def test_any_width_is_covered(num_tokens: int, hidden: int) -> None:
    gate_up = packed(num_tokens, hidden, torch.float32)
    assert_rounded_alike(silu_mul(gate_up), silu_mul_ref(gate_up))


def test_rows_may_be_slices_of_wider_ones() -> None:
    gate_up = packed(5, 64, torch.float32)[:, 10:74]
    assert_rounded_alike(silu_mul(gate_up), silu_mul_ref(gate_up))


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_large_gates_saturate_and_stay_numbers(act: str) -> None:
    gate_up = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4, 1, 1, 1, 1, 1]], device=DEVICE)
    torch.testing.assert_close(silu_mul(gate_up, act).cpu(), torch.tensor([[0.0, 0, 0, 100, 1e4]]))


def test_no_tokens_give_none() -> None:
    assert silu_mul(torch.empty(0, 64, device=DEVICE)).shape == (0, 32)
