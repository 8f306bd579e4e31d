"""Logits scaled and capped: the kernel against its reference, and the cap against tanh."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from pellucid.kernels.sampling.cap_logits import cap_logits, cap_logits_ref
from tests.kernels.compare import DTYPES, assert_rounded_alike

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cap", [None, 30.0])
@pytest.mark.parametrize("shape", [(0, 5), (1, 7), (3, 3000)])
def test_it_computes_what_its_reference_does(
    shape: tuple[int, int], cap: float | None, dtype: torch.dtype
) -> None:
    logits = (40 * torch.randn(shape, device=DEVICE)).to(dtype)
    expected = cap_logits_ref(logits.clone(), 0.7, cap)
    got = cap_logits(logits, 0.7, cap)
    assert got is logits
    if dtype == torch.float32:  # tanh as a quotient cancels near zero
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-5)
    else:
        assert_rounded_alike(got, expected)


@pytest.mark.parametrize("function", [cap_logits, cap_logits_ref])
def test_a_cap_is_never_passed_and_small_logits_stay(function) -> None:  # noqa: ANN001
    logits = torch.tensor([[-torch.inf, -1e30, -1e4, 0.0, 1e-3, 1e4, 1e30, torch.inf]], device=DEVICE)
    expected = torch.tensor([[-30, -30, -30, 0, 1e-3, 30, 30, 30]], device=DEVICE)
    torch.testing.assert_close(function(logits, 1.0, 30.0), expected, rtol=1e-5, atol=2e-6)
