"""The FP8 types that a cache of keys and values may have.

E4M3 has 3 bits of mantissa and ends at 448, E5M2 has 2 and ends at 57,344, as far as float16 but for its last
bits: an E5M2 byte is the upper half of a float16.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def is_fp8(dtype: torch.dtype | None) -> bool:
    """Whether a cache of this dtype holds numbers over a scale, a byte each.  None: the model's dtype."""
    return dtype in LARGEST


def limit_of(dtype: torch.dtype) -> float:
    """Where a cache of this dtype saturates; 0 if it is as wide as what is written."""
    return LARGEST.get(dtype, 0.0)


def kv_scale(weight: Tensor) -> float:
    """[1], a checkpoint's: what the numbers of such a cache are over.

    Raises ValueError if nothing can be divided by it.
    """
    scale = weight.item()
    if not 0 < scale < math.inf:
        raise ValueError(
            f"a scale of the FP8 KV cache in the checkpoint is {scale}, must be above 0 and finite; "
            "use kv_cache_dtype='auto', or calibrate it anew"
        )
    return scale
