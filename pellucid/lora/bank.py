"""Adapters of a linear layer: low-rank additions, of another adapter for each token.

A layer that may have them keeps a bank of `max_loras` places, zeros until adapters come; a place without
matrices for this layer adds nothing.  Ranks slice an adapter's matrices as they do the layer's own: A by the
features that come in, B by those that go out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pellucid.forward import ForwardInput
from pellucid.kernels.lora import (
    LEAST_RANK,
    MOST_WIDE,
    WideShrink,
    add_lora,
    add_lora_ref,
    expand_wide,
)
from pellucid.platform import has_triton
from pellucid.quant.base import Coords, LinearShape


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """What banks have room for: so many adapters at once, of at most this rank."""

    max_loras: int
    max_rank: int


class LowRank(NamedTuple):
    """An adapter's matrices for one of the checkpoint's, the scale multiplied into `up`."""

    down: Tensor  # A [r, in_features]
    up: Tensor  # B [out_features, r]


class LoraBank:
    """The adapters of one linear layer on this rank."""

    def __init__(
        self,
        shape: LinearShape,
        prefixes: tuple[str, ...],
        coords: tuple[Coords, ...],
        limits: AdapterLimits,
        device: torch.device,
    ) -> None:
        """prefixes: of the checkpoint's matrices that are merged in the layer; coords: their slices here."""
        self.prefixes, self._shape, self._coords, self._limits = prefixes, shape, coords, limits
        self._device = device
        self._has_kernels = device.type == "cuda" and has_triton()
        self._add = add_lora if self._has_kernels else add_lora_ref
        self._wide: WideShrink | None = None  # of few tokens
        self._down = self._up = torch.empty(0)

    def make_room(self) -> None:
        """Allocate, once the layer's own weights are in place."""
        shape, num = self._shape, self._limits.max_loras
        rank = max(LEAST_RANK, 1 << (self._limits.max_rank - 1).bit_length())
        kind = {"dtype": shape.dtype, "device": self._device}
        self._down = torch.zeros(num, len(shape.out_partitions), rank, shape.in_features, **kind)
        self._up = torch.zeros(num, shape.out_features, rank, **kind)
        if self._has_kernels and WideShrink.serves(num, rank):
            self._wide = WideShrink(self._down)

    def add(self, y: Tensor, x: Tensor, fwd: ForwardInput) -> None:
        """To y [T, out_features] what each token's adapter makes of x [T, in_features]."""
        adapters = fwd.adapters_of(x)
        if adapters is None:
            return
        parts = self._shape.out_partitions
        if self._wide is not None and len(x) <= MOST_WIDE:
            expand_wide(y, self._wide(x), adapters, self._up, parts)
        else:
            self._add(y, x, adapters, self._down, self._up, parts)

    def check(self, part: int, pair: LowRank) -> None:
        """Raise ValueError if an adapter's matrices for matrix number `part` do not fit it."""
        size, (rank, num_in), (num_out, up_rank) = self._sizes(part), pair.down.shape, pair.up.shape
        if rank != up_rank or (num_out, num_in) != size:
            raise ValueError(
                f"{self.prefixes[part]}: lora_A {tuple(pair.down.shape)} and lora_B {tuple(pair.up.shape)} "
                f"do not fit a matrix {size}"
            )
        if rank > self._limits.max_rank:
            raise ValueError(
                f"{self.prefixes[part]}: rank {rank} is above max_lora_rank {self._limits.max_rank}"
            )
        for name, matrix in (("lora_A", pair.down), ("lora_B", pair.up)):
            if not matrix.to(self._shape.dtype).isfinite().all():
                raise ValueError(
                    f"{self.prefixes[part]}: {name} has numbers that are not finite in {self._shape.dtype}"
                )

    def put(self, place: int, pairs: Sequence[LowRank | None]) -> None:
        """Bring an adapter to its place; None: it has nothing for this matrix."""
        self._down[place].zero_()
        self._up[place].zero_()
        first = 0
        for part, (pair, size) in enumerate(zip(pairs, self._shape.out_partitions, strict=True)):
            if pair is not None:
                self.check(part, pair)
                rank = len(pair.down)
                down, up = self._slice(part, pair)
                self._down[place, part, :rank].copy_(down, non_blocking=True)
                self._up[place, first : first + size, :rank].copy_(up, non_blocking=True)
            first += size

    def _sizes(self, part: int) -> tuple[int, int]:
        """Outputs and inputs of the checkpoint's matrix."""
        size, coords, shape = self._shape.out_partitions[part], self._coords[part], self._shape
        if shape.split == "out":
            piece = coords.piece
            return coords.whole(size) if piece is None else piece.total, shape.in_features
        return size, coords.whole(shape.in_features)

    def _slice(self, part: int, pair: LowRank) -> LowRank:
        """Of the whole matrices this rank's."""
        (rank, piece), size = (
            (self._coords[part].rank, self._coords[part].piece),
            self._shape.out_partitions[part],
        )
        if self._shape.split == "out":
            first = rank * size + (0 if piece is None else piece.first)
            return LowRank(pair.down, pair.up[first : first + size])
        num_in = self._shape.in_features
        return LowRank(pair.down[:, rank * num_in : (rank + 1) * num_in], pair.up)
