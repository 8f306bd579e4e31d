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

from pellucid.kernels.products.lora import (
    LEAST_RANK,
    MOST_WIDE,
    WideShrink,
    add_lora,
    add_lora_ref,
    expand,
    expand_ref,
    expand_wide,
    expand_wide_ref,
    gate_wide,
    gate_wide_ref,
)
from pellucid.platform import has_triton
from pellucid.quant.base import Coords, LinearShape, slice_of


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """What banks have room for: so many adapters at once, of at most this rank."""

    max_loras: int
    max_rank: int

    @property
    def padded_rank(self) -> int:
        """As kernels take it."""
        return max(LEAST_RANK, 1 << (self.max_rank - 1).bit_length())

    def check(self, path: str, pair: LowRank, size: tuple[int, int], dtype: torch.dtype) -> None:
        """Raise ValueError if matrices for `path`, outputs and inputs of which are `size`, do not fit."""
        (rank, num_in), (num_out, up_rank) = pair.down.shape, pair.up.shape
        if rank != up_rank or (num_out, num_in) != size:
            raise ValueError(
                f"{path}: lora_A {tuple(pair.down.shape)} and lora_B {tuple(pair.up.shape)} "
                f"do not fit a matrix {size}"
            )
        if rank > self.max_rank:
            raise ValueError(f"{path}: rank {rank} is above max_lora_rank {self.max_rank}")
        for name, matrix in (("lora_A", pair.down), ("lora_B", pair.up)):
            if not matrix.to(dtype).isfinite().all():
                raise ValueError(f"{path}: {name} has numbers that are not finite in {dtype}")


class LowRank(NamedTuple):
    """An adapter's matrices for one of the checkpoint's, the scale multiplied into `up`."""

    down: Tensor  # A [r, in_features]; of an embedding, whose inputs are tokens, [r, V]
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
        *,
        is_head: bool = False,
    ) -> None:
        """prefixes: of the checkpoint's matrices that are merged in the layer; coords: their slices here.

        is_head: the layer makes logits, and most adapters have nothing for it.
        """
        self.prefixes, self._shape, self._coords, self._limits = prefixes, shape, coords, limits
        self._device, self.is_head = device, is_head
        self._has_kernels = device.type == "cuda" and has_triton()
        self._add = add_lora if self._has_kernels else add_lora_ref
        self._expand_wide = expand_wide if self._has_kernels else expand_wide_ref
        self._gate_wide = gate_wide if self._has_kernels else gate_wide_ref
        self._wide: WideShrink | None = None  # of few tokens
        self._down = self._up = torch.empty(0)

    @property
    def num_wide_rows(self) -> int:
        """Of the A of all adapters, if it is to be multiplied by for any token; 0: it is not."""
        num, rank = self._limits.max_loras, self._limits.padded_rank
        is_wide = not self.is_head and WideShrink.serves(num, rank)
        return num * len(self._shape.out_partitions) * rank if is_wide else 0

    def make_room(self, rows: Tensor | None = None) -> None:
        """Allocate, once the layer's own weights are in place.

        rows: zeros [num_wide_rows, in_features] behind the layer's matrix, where A is to be.
        """
        shape, num = self._shape, self._limits.max_loras
        rank, kind = self._limits.padded_rank, {"dtype": shape.dtype, "device": self._device}
        size = num, len(shape.out_partitions), rank, shape.in_features
        self._down = torch.zeros(size, **kind) if rows is None else rows.view(size)
        self._up = torch.zeros(num, shape.out_features, rank, **kind)
        if self._has_kernels and self.num_wide_rows and rows is None:
            self._wide = WideShrink(self._down)

    def takes_wide(self, x: Tensor) -> bool:
        """Whether x [T, in_features] is of few tokens."""
        return len(x) <= MOST_WIDE

    def add(self, y: Tensor, x: Tensor, adapters: Tensor) -> None:
        """To y [T, out_features] what each token's adapter makes of x [T, in_features].

        adapters: [T] int32, their places, -1 for none.
        """
        parts = self._shape.out_partitions
        if self._wide is not None and self.takes_wide(x):
            self._expand_wide(y, self._wide(x), adapters, self._up, parts)
        else:
            self._add(y, x, adapters, self._down, self._up, parts)

    def added(self, y: Tensor, shrunk: Tensor, adapters: Tensor) -> Tensor:
        """y [T, out_features] with the same added, contiguous.  shrunk: x times the A of all."""
        out = y.new_empty(y.shape)
        self._expand_wide(y, shrunk, adapters, self._up, self._shape.out_partitions, out)
        return out

    def gated(self, y: Tensor, shrunk: Tensor, adapters: Tensor, act: str) -> Tensor:
        """act(gate) * up of y = [gate | up] with the same added; of two equal matrices."""
        return self._gate_wide(y, shrunk, adapters, self._up, act)

    def check(self, part: int, pair: LowRank) -> None:
        """Raise ValueError if an adapter's matrices for matrix number `part` do not fit it."""
        self._limits.check(self.prefixes[part], pair, self._sizes(part), self._shape.dtype)

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
                self._up[place, first : first + len(up), :rank].copy_(up, non_blocking=True)
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
        coords, size = self._coords[part], self._shape.out_partitions[part]
        if self._shape.split == "in":
            return LowRank(slice_of(pair.down, 1, self._shape.in_features, coords), pair.up)
        piece, up = coords.piece, pair.up
        if piece is not None:
            up = up[piece.first : piece.first + piece.num]
        return LowRank(pair.down, slice_of(up, 0, size, coords))


class EmbeddingBank:
    """The adapters of a token embedding on this rank, which has a share of the vocabulary."""

    def __init__(
        self, path: str, coords: Coords, weight: Tensor, limits: AdapterLimits, device: torch.device
    ) -> None:
        """weight: this rank's table [share, D], perhaps not there yet.  coords: with the vocabulary."""
        self.prefixes, self.is_head = (path,), False
        self._coords, self._limits, self._device, self._dtype = coords, limits, device, weight.dtype
        self._share, self._dim = weight.shape
        self._expand = expand if device.type == "cuda" and has_triton() else expand_ref
        self._down = self._up = torch.empty(0)

    def make_room(self) -> None:
        """Allocate, once the table is in place."""
        limits, kind = self._limits, {"dtype": self._dtype, "device": self._device}
        self._down = torch.zeros(limits.max_loras, self._share, limits.padded_rank, **kind)
        self._up = torch.zeros(limits.max_loras, self._dim, limits.padded_rank, **kind)

    def add(self, y: Tensor, input_ids: Tensor, adapters: Tensor) -> None:
        """To y [T, D] what adapters have for input_ids [T], if they are of this rank's share."""
        local = input_ids.long() - self._coords.rank * self._share
        is_here = (adapters >= 0) & (local >= 0) & (local < self._share)
        rows = self._down[adapters.clamp(min=0).long(), local.clamp(0, self._share - 1)]
        rows = torch.where(is_here[:, None], rows, 0)
        self._expand(y, rows[None, None], adapters, self._up, (self._dim,))

    def check(self, part: int, pair: LowRank) -> None:
        """Raise ValueError if an adapter's matrices do not fit the embedding."""
        size = self._dim, self._coords.whole(self._share)
        self._limits.check(self.prefixes[part], pair, size, self._dtype)

    def put(self, place: int, pairs: Sequence[LowRank | None]) -> None:
        """Bring an adapter to its place; None: it has nothing for the embedding."""
        self._down[place].zero_()
        self._up[place].zero_()
        (pair,) = pairs
        if pair is not None:
            rank, first = len(pair.down), self._coords.rank * self._share
            down = pair.down[:, first : first + self._share]
            self._down[place, : down.shape[1], :rank].copy_(down.t(), non_blocking=True)
            self._up[place, :, :rank].copy_(pair.up, non_blocking=True)


Bank = LoraBank | EmbeddingBank
