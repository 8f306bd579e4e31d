"""What sampling a step yields, on the device: tokens, and how many of them count.

Made by spec/verify.py; read by proposers, slots and results.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pellucid.sample.logprobs import LogprobTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOutput:
    """New tokens of B rows, at most K of each (1 without drafts); what is past `num_new` is meaningless."""

    tokens: Tensor  # [B, K] int32
    num_new: Tensor  # [B] int32, 0 to K
    logprobs: LogprobTensors | None = None  # [B, K, ...], of the same tokens
    is_stuck: Tensor | None = None  # [B, K] bool: nothing was left to be taken there; None: there is no mask
    flat: Tensor | None = None  # [B * K + B] int32: tokens, then num_new, where they lie side by side
    path: Tensor | None = None  # [B, K] int32: the node (0 is the committed token) behind each; None: a chain
