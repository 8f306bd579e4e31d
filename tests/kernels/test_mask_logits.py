"""Bit masks over logits: against the reference, for any share of any vocabulary."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from pellucid.kernels.sampling.mask_logits import BLOCK, launch, mask_logits_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    ("num_words", "first", "share"), [(3, 0, 96), (2, 0, 33), (100, 40, 100), (200, 1, BLOCK + 9)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_has_no_bit_is_ruled_out(num_words: int, first: int, share: int, dtype: torch.dtype) -> None:
    bits = torch.randint(-(2**31), 2**31, (5, num_words), device=DEVICE).int()
    bits[1], bits[2] = -1, 0
    logits = torch.randn(5, share, device=DEVICE).to(dtype)
    expected = logits.clone()
    mask_logits_ref(expected, bits, first)
    launch(logits, bits, first, min(share, 32 * num_words - first))
    assert torch.equal(logits, expected)
    assert (expected[2] == -float("inf")).all() and not (expected[1] == -float("inf")).any()


def test_token_t_is_bit_t_of_the_row() -> None:
    bits = torch.zeros(1, 3, dtype=torch.int32, device=DEVICE)
    for token in (0, 31, 64):
        bits[0, token // 32] |= torch.tensor(1 << token % 32).int().item()
    logits = torch.zeros(1, 70, device=DEVICE)
    mask_logits_ref(logits, bits, 0)
    assert logits[0].isfinite().nonzero()[:, 0].tolist() == [0, 31, 64]


def test_what_is_past_the_last_bit_stays() -> None:
    bits = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    logits, masked = torch.zeros(1, 12, device=DEVICE), torch.zeros(1, 12, device=DEVICE)
    mask_logits_ref(logits, bits, 26)
    launch(masked, bits, 26, 6)
    assert logits.isfinite().sum() == 6 and torch.equal(logits, masked)
