"""What stands in a model where another pipeline stage has its layers.

A stage hands the residual stream on as one tensor [T, D]: what the next norm would have added up is added
before it is sent, by the `Add` that stands for that norm, so a cut changes no number.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pellucid.forward import ForwardInput
from pellucid.layers.weight import Weight


class Inlet(nn.Module):
    """Stands for the embedding: hands out the residual stream that the stage before has sent."""

    def __init__(self, dim: int, dtype: torch.dtype, make_table: Callable[[], Weight]) -> None:
        super().__init__()
        self.dim, self.dtype = dim, dtype
        self.table = make_table  # for a tied head, which needs the embeddings here
        self.stream = torch.empty(0)  # where messages arrive

    def make_room(self, num_tokens: int, device: torch.device) -> None:
        """For steps of up to `num_tokens`, graphs' padding included; it stays in its place."""
        self.stream = torch.zeros(num_tokens, self.dim, dtype=self.dtype, device=device)

    def forward(self, input_ids: Tensor, fwd: ForwardInput | None = None) -> Tensor:
        """input_ids [T], which say how much has arrived -> [T, D]."""
        return self.stream[: len(input_ids)]


class Depth(int):
    """Which layer of its model one is, from 0 on.  No kernel depends on it (worker/abridged.py)."""


class Layers(nn.ModuleList):
    """Layers of a model, each of which takes what the one before it gives."""


class Absent(nn.Module):
    """Stands for a layer that is never called here."""

    def forward(self, *args: object) -> Tensor:
        raise AssertionError("this layer belongs to another pipeline stage")
