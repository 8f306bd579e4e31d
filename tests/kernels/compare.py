"""How kernels are compared that must round as their reference does, and in which dtypes."""

from __future__ import annotations

import torch
from torch import Tensor

# The interpreter cuts float32 off where bfloat16 is rounded to nearest: that dtype is a GPU's to test.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
# A rounding of numbers up to 8, in float32 the order of a sum; small differences of them keep their error.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2**-8, torch.bfloat16: 2**-5}


def assert_rounded_alike(actual: Tensor, expected: Tensor) -> None:
    """Nowhere farther apart than a rounding, and in half precision hardly anywhere apart.

    Float32 sums end an ulp apart, so a rounding after them may fall the other way, but rarely: of one element
    in fifty, and of one more, as some dozens have no fiftieth.  Where a rounding is left out or is too late,
    every tenth element or more differs.
    """
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    tolerance = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    if actual.dtype != torch.float32:
        num_apart = int((actual != expected).sum())
        assert num_apart <= 1 + actual.numel() / 50, f"{num_apart} of {actual.numel()} rounded elsewhere"
