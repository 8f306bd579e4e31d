"""Latent attention in plain torch: the backend of CPUs, and the oracle of the Triton one.

Short rows attend over latents themselves (*absorbed*): q · (W c) is (W^T q) · c, so that each head's queries
become as wide as a latent, and the weighted mean of latents becomes values at the end.  Long rows make keys
and values of all latents first (*expanded*), which for many queries is less work.  Rows are parted, masked
and batched as heads are (attention/torch.py): a latent's row is one KV head, key and value at once.

Legend: T tokens, B rows, Q queries a row, S keys, N heads, M packed query rows (N * Q), C rank of the latent,
R features that turn.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention

from pellucid.attention.base import LatentLayer, LatentSpec
from pellucid.attention.torch import (
    DTYPES,
    LongRow,
    Shape,
    ShortRows,
    TorchAttention,
    TorchMetadata,
    clear,
    plain,
)
from pellucid.forward import ForwardInput
from pellucid.kernels.attention.latent_rope import latent_rope_ref
from pellucid.platform import Platform


class TorchLatent:
    """Gather each row's latents from the paged cache, then torch's scaled_dot_product_attention."""

    max_graph_query: ClassVar[int] = 0
    supports_tile_maps: ClassVar[bool] = False
    max_graph_keys: ClassVar[int | None] = None
    supports_trees: ClassVar[bool] = True

    def __init__(self) -> None:
        self._paged = TorchAttention()

    @staticmethod
    def supports(spec: LatentSpec, platform: Platform) -> str | None:
        """None if this backend can serve `spec` on this hardware, else the reason in words."""
        if spec.dtype not in DTYPES:
            return f"computes in float32, bfloat16 or float16, not {spec.dtype}"
        return None

    @staticmethod
    def describe(spec: LatentSpec, platform: Platform) -> str:
        """What attends, for the log."""
        slower = ", slower than Triton's kernels" if platform.device == "cuda" else ""
        return f"torch's operations over latents{slower}"

    def kv_layout(self, spec: LatentSpec, num_blocks: int) -> tuple[int, ...]:
        """[num_blocks, block_size, C + R]"""
        return (num_blocks, spec.block_size, spec.row_dim)

    def metadata(self, fwd: ForwardInput, table: int) -> TorchMetadata:
        """Read lengths and tables to the host, once a step."""
        return self._paged.metadata(fwd, table)

    def forward(self, q: Tensor, latent: Tensor, layer: LatentLayer, fwd: ForwardInput) -> Tensor:
        """Write rows [T, C + R] to the cache, attend with q [T, N * (nope + R)].  Returns [T, N * value].

        Tokens that belong to no row, as padding does, get zeros.
        """
        metadata, spec, cache = fwd.attn[layer.table], layer.spec, layer.kv_cache
        assert isinstance(metadata, TorchMetadata)
        work = metadata.work_of(shape_of(spec, cache))
        clear(cache, work.begun)
        q_TNH = q.unflatten(1, (spec.num_heads, -1))
        latent_rope_ref(
            *(q_TNH, latent, cache, fwd.positions, fwd.slot_mappings[layer.table]),
            norm=layer.norm,
            rope=layer.rope,
            interleaved=layer.interleaved,
            row_scale=layer.row_scale,
        )
        out = q.new_zeros(len(q), spec.num_heads, spec.value_dim)
        for batch in work.short:
            attend_absorbed(batch, q_TNH, layer, out)
        for row in work.long:
            attend_expanded(row, q_TNH, layer, out)
        return out.flatten(1)

    def move(self, kv_cache: Tensor, sources: Tensor, targets: Tensor) -> None:
        """Copy rows from places [B, n] to others; all are read before any is written."""
        rows = plain(kv_cache).view(-1, kv_cache.shape[-1])
        rows[targets] = rows[sources]


def shape_of(spec: LatentSpec, cache: Tensor) -> Shape:
    """Latents as one KV head, whose values are its keys."""
    return Shape(
        num_kv_heads=1,
        group_size=spec.num_heads,
        block_size=spec.block_size,
        block_bytes=cache[0].nbytes,
        window=None,
        dtype=spec.dtype,
        sides=1,
    )


def attend_absorbed(batch: ShortRows, q: Tensor, layer: LatentLayer, out: Tensor) -> None:
    """Attend with these rows' part of q [T, N, nope + R] and write the same part of out [T, N, value]."""
    spec, num_rows = layer.spec, batch.bias.shape[0]
    rows_BS = gather(layer, batch.pages).view(num_rows, 1, -1, spec.row_dim)
    up_key, up_value = layer.up.split((spec.nope_dim, spec.value_dim), dim=1)
    q_NTH = q.index_select(0, batch.tokens).transpose(0, 1)
    nope, turned = q_NTH.split((spec.nope_dim, spec.rope_dim), dim=-1)
    q_NTC = torch.cat((torch.bmm(nope, up_key), turned), dim=-1)
    q_BMC = q_NTC.unflatten(1, (num_rows, -1)).transpose(0, 1).flatten(1, 2)[:, None]
    o_BMC = scaled_dot_product_attention(q_BMC, rows_BS, rows_BS, batch.bias, scale=layer.scale)
    o_NTC = o_BMC[:, 0, :, : spec.rank].unflatten(1, (spec.num_heads, -1)).transpose(0, 1).flatten(1, 2)
    out.index_copy_(0, batch.tokens, torch.bmm(o_NTC, up_value.transpose(1, 2)).transpose(0, 1))


def attend_expanded(row: LongRow, q: Tensor, layer: LatentLayer, out: Tensor) -> None:
    """The same with one row's part."""
    spec = layer.spec
    latents, turned = gather(layer, row.pages).split((spec.rank, spec.rope_dim), dim=-1)
    expanded = F.linear(latents, layer.up.flatten(0, 1)).unflatten(1, (spec.num_heads, -1))
    nope, values = expanded.split((spec.nope_dim, spec.value_dim), dim=-1)
    keys = torch.cat((nope, turned[:, None].expand(-1, spec.num_heads, -1)), dim=-1)
    width = max(keys.shape[-1], spec.value_dim)  # equally wide heads have a faster kernel
    k_NSH, v_NSH = (widened(x, width).transpose(0, 1)[None] for x in (keys, values))
    for tile in row.tiles:
        o_NQH = scaled_dot_product_attention(
            widened(q[tile.queries], width).transpose(0, 1)[None],
            k_NSH[:, :, tile.keys],
            v_NSH[:, :, tile.keys],
            tile.bias,
            is_causal=tile.bias is None,
            scale=layer.scale,
        )
        out[tile.queries] = o_NQH[0, :, :, : spec.value_dim].transpose(0, 1)


def widened(x: Tensor, width: int) -> Tensor:
    """Zeros behind the last axis, up to a width."""
    return F.pad(x, (0, width - x.shape[-1]))


def gather(layer: LatentLayer, pages: Tensor) -> Tensor:
    """The rows of these pages, [pages * block_size, C + R], in the dtype that is computed in."""
    cache = layer.kv_cache
    rows = plain(cache).index_select(0, pages).view(cache.dtype).flatten(0, 1)
    if cache.dtype == layer.spec.dtype:
        return rows
    return (rows.float() * layer.row_scale).to(layer.spec.dtype)
