"""Latent attention with the bundled Triton kernels: the backend of NVIDIA GPUs.

Decodes and verifications attend over latents (*absorbed*): their queries are brought to a latent's width by
one product a head, and means of latents to values by another.  Prompt chunks make keys and values of all
latents that they see (*expanded*), so many rows and heads at once as `MAX_EXPANDED` has room for; recorded
ones of all rows at once, which have `max_graph_keys` together at most.

Legend: T tokens, S keys, N heads, C rank of the latent, R features that turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from pellucid.attention.base import LatentLayer, LatentSpec
from pellucid.attention.triton import TritonAttention, refusal
from pellucid.forward import ForwardInput, TileMaps
from pellucid.kernels.attention.paged_attention import MAX_SHORT_QUERY
from pellucid.platform import Platform
from pellucid.transfer import upload

if TYPE_CHECKING:
    from pellucid.attention.triton import TritonMetadata
    from pellucid.kernels.attention.paged_attention import PagedRows, TreeRows

MAX_EXPANDED = 160 << 20  # bytes of keys and values that are made at once
MAX_RANK, MAX_ROTARY = 512, 64  # the kernels' tiles are made for
MAX_HEAD = 256  # features of values, and of keys that do not turn


class TritonLatent:
    """Turn queries and write rows, then attend: three kernels for decodes, and two products by heads."""

    max_graph_query: ClassVar[int] = MAX_SHORT_QUERY
    supports_tile_maps: ClassVar[bool] = True
    max_graph_keys: ClassVar[int | None] = 16_384
    supports_trees: ClassVar[bool] = True

    def __init__(self) -> None:
        # Imported here, so that asking `supports` needs no Triton.
        from pellucid.kernels.attention.kv_move import kv_move
        from pellucid.kernels.attention.latent_decode import latent_decode
        from pellucid.kernels.attention.latent_expand import latent_expand
        from pellucid.kernels.attention.latent_prefill import latent_prefill, queries_per_tile
        from pellucid.kernels.attention.latent_rope import latent_rope
        from pellucid.kernels.attention.paged_attention import PagedRows
        from pellucid.kernels.attention.prefill_attention import prefill_tiles
        from pellucid.kernels.products.heads_matmul import MOST_TOKENS, heads_matmul

        self._paged = TritonAttention()
        self.latent_rope, self.latent_decode, self.kv_move = latent_rope, latent_decode, kv_move
        self.latent_expand, self.latent_prefill = latent_expand, latent_prefill
        self.heads_matmul, self.few_tokens = heads_matmul, MOST_TOKENS
        self.prefill_tiles, self.queries_per_tile = prefill_tiles, queries_per_tile
        self.paged_rows = PagedRows

    @staticmethod
    def supports(spec: LatentSpec, platform: Platform) -> str | None:
        """None if this backend can serve `spec` on this hardware, else the reason in words."""
        if (reason := refusal(spec, platform)) is not None:
            return reason
        if spec.rank > MAX_RANK or spec.rope_dim > MAX_ROTARY:
            return f"latents of {spec.rank} + {spec.rope_dim} numbers are over {MAX_RANK} + {MAX_ROTARY}"
        if max(spec.nope_dim, spec.value_dim) > MAX_HEAD:
            return f"heads of {spec.nope_dim} and {spec.value_dim} features are over {MAX_HEAD}"
        if spec.block_size % 16:
            return f"block size {spec.block_size} is no multiple of 16"
        return None

    @staticmethod
    def describe(spec: LatentSpec, platform: Platform) -> str:
        """What attends, for the log."""
        return "Triton's kernels over latents; prompts make keys and values of them"

    def kv_layout(self, spec: LatentSpec, num_blocks: int) -> tuple[int, ...]:
        """[num_blocks, block_size, C + R]"""
        return (num_blocks, spec.block_size, spec.row_dim)

    def metadata(self, fwd: ForwardInput, table: int) -> LatentMetadata:
        """Part the rows by their number of queries: decodes come first in a step, prompt chunks last."""
        paged = self._paged.metadata(fwd, table)
        return LatentMetadata(paged, num_short_tokens(fwd, paged), fwd.max_keys[paged.short.num_rows :])

    def forward(self, q: Tensor, latent: Tensor, layer: LatentLayer, fwd: ForwardInput) -> Tensor:
        """Write rows [T, C + R] to the cache, attend with q [T, N * (nope + R)].  Returns [T, N * value]."""
        step, spec = fwd.attn[layer.table], layer.spec
        assert isinstance(step, LatentMetadata)
        q_TNH = q.unflatten(1, (spec.num_heads, -1))
        self.latent_rope(
            *(q_TNH, latent, layer.kv_cache, fwd.positions, step.paged.slot_mapping),
            norm=layer.norm,
            rope=layer.rope,
            interleaved=layer.interleaved,
            row_scale=layer.row_scale,
        )
        out = q.new_empty(len(q), spec.num_heads, spec.value_dim)
        all_wanted = fwd.all_wanted or not layer.is_last
        if not all_wanted and not step.num_short_tokens:
            out[0] = 0  # read all the same where nothing is wanted
        if step.num_short_tokens:
            self.attend_absorbed(q_TNH[: step.num_short_tokens], layer, step, out)
        if step.paged.long_query_lens:
            for piece in self.pieces(step, fwd, spec, all_wanted=all_wanted):
                self.attend_expanded(piece, q_TNH, layer, out)
        return out.flatten(1)

    def attend_absorbed(self, q: Tensor, layer: LatentLayer, step: LatentMetadata, out: Tensor) -> None:
        """The short rows' queries q [T, N, nope + R], into the first of out [T, N, value]."""
        spec = layer.spec
        up_key, up_value = layer.up.split((spec.nope_dim, spec.value_dim), dim=1)
        nope, turned = q.split((spec.nope_dim, spec.rope_dim), dim=-1)
        wide, means = (q.new_empty(len(q), spec.num_heads, spec.rank) for _ in range(2))
        self.multiply_heads(nope, up_key, wide)
        how = {"scale": layer.scale, "row_scale": layer.row_scale}
        self.latent_decode(wide, turned, layer.kv_cache, step.paged.short, **how, out=means)
        self.multiply_heads(means, up_value.transpose(1, 2), out[: len(q)])

    def multiply_heads(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """x [T, N, I], each head times its own of weight [N, I, O], into out [T, N, O]."""
        if len(x) <= self.few_tokens:
            self.heads_matmul(x, weight, out)
        else:
            torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))

    def attend_expanded(self, piece: Piece, q: Tensor, layer: LatentLayer, out: Tensor) -> None:
        """Some long rows, into their part of out [T, N, value], as many heads at once as have room."""
        spec, width = layer.spec, layer.spec.nope_dim + layer.spec.value_dim
        each = max(1, MAX_EXPANDED // (piece.num_keys * width * q.itemsize))
        turned = q.new_empty(piece.num_keys, spec.rope_dim)
        for first in range(0, spec.num_heads, each):
            heads = slice(first, first + each)
            up = layer.up[heads]
            expanded = q.new_empty(piece.num_keys, len(up), width)
            where = {"cu_keys": piece.cu_keys, "row_scale": layer.row_scale}
            self.latent_expand(layer.kv_cache, up, piece.rows, **where, turned=turned, out=expanded)
            self.latent_prefill(
                *(q[:, heads], expanded, turned, piece.rows),
                tiles=piece.tiles,
                cu_keys=piece.cu_keys,
                scale=layer.scale,
                out=out[:, heads],
            )

    def pieces(
        self, step: LatentMetadata, fwd: ForwardInput, spec: LatentSpec, *, all_wanted: bool
    ) -> list[Piece]:
        """The long rows in groups, made by the first layer that asks for them.

        all_wanted: of all queries, not only of those whose logits are sampled.
        """
        key = spec, all_wanted
        if key not in step.pieces:
            if fwd.tiles is not None:
                step.pieces[key] = [self.recorded(step.paged, fwd.tiles, spec.dtype, all_wanted=all_wanted)]
                return step.pieces[key]
            itemsize = spec.dtype.itemsize
            room = MAX_EXPANDED // itemsize // max(spec.row_dim, spec.nope_dim + spec.value_dim)
            width = step.paged.long.block_table.shape[1] * spec.block_size
            max_keys = step.max_keys or [width] * step.paged.long.num_rows
            groups = grouped(max_keys, room)
            step.pieces[key] = [
                self.piece(step.paged, group, max_keys[group], spec.dtype, all_wanted=all_wanted)
                for group in groups
            ]
        return step.pieces[key]

    def recorded(
        self, paged: TritonMetadata, tiles: TileMaps, dtype: torch.dtype, *, all_wanted: bool
    ) -> Piece:
        """All long rows of a step that is recorded: the device finds out where their keys begin."""
        assert self.max_graph_keys is not None
        lens = paged.long.seq_lens
        return Piece(
            rows=paged.long,
            num_keys=self.max_graph_keys,
            cu_keys=lens.cumsum(0) - lens,
            tiles=tiles.get(self.queries_per_tile(dtype), self.prefill_tiles, all_wanted=all_wanted),
        )

    def piece(
        self,
        paged: TritonMetadata,
        group: slice,
        max_keys: list[int],
        dtype: torch.dtype,
        *,
        all_wanted: bool,
    ) -> Piece:
        """A group of long rows: where their keys begin, and their tiles of queries."""
        long, query_lens = paged.long, paged.long_query_lens[group]
        wanted = query_lens if all_wanted else paged.long_sampled[group]
        tiles = self.prefill_tiles(query_lens, self.queries_per_tile(dtype), wanted)
        return Piece(
            rows=self.paged_rows(
                block_table=long.block_table[group],
                seq_lens=long.seq_lens[group],
                cu_seqlens_q=long.cu_seqlens_q[group.start : group.stop + 1],
                max_query=long.max_query,
                tree=tree_of(long, group),
            ),
            num_keys=sum(max_keys),
            cu_keys=upload(np.cumsum([0, *max_keys[:-1]]), paged.slot_mapping.device),
            tiles=upload(tiles, paged.slot_mapping.device),
        )

    def move(self, kv_cache: Tensor, sources: Tensor, targets: Tensor) -> None:
        """Copy rows from places [B, n] to others, a row's in order."""
        self.kv_move(kv_cache[:, None, None], sources, targets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some of a step's long rows."""

    rows: PagedRows
    num_keys: int  # of all rows, at most
    cu_keys: Tensor  # [rows] int64, where each one's keys begin
    tiles: Tensor  # [num_tiles, 2] int32, each tile's row and its first query there


@dataclass(frozen=True, slots=True)
class LatentMetadata:
    """One step's rows with one block table."""

    paged: TritonMetadata
    num_short_tokens: int
    max_keys: list[int]  # that each long row may have, on the host; none: any number
    pieces: dict[tuple[LatentSpec, bool], list[Piece]] = field(default_factory=dict)


def tree_of(rows: PagedRows, group: slice) -> TreeRows | None:
    """The draft trees of some of these rows."""
    return rows.tree and replace(rows.tree, first_drafts=rows.tree.first_drafts[group])


def num_short_tokens(fwd: ForwardInput, paged: TritonMetadata) -> int:
    """Tokens of short rows, which come first: all, padding included, if there are no others."""
    return sum(fwd.query_lens[: paged.short.num_rows]) if paged.long_query_lens else fwd.num_tokens


def grouped(sizes: list[int], room: int) -> Iterator[slice]:
    """Neighbours that have room together; what has no room even alone is alone."""
    start, total = 0, 0
    for i, size in enumerate(sizes):
        if i > start and total + size > room:
            yield slice(start, i)
            start, total = i, 0
        total += size
    yield slice(start, len(sizes))
