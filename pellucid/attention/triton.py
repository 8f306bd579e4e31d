"""Attention with the bundled Triton kernels: the backend of NVIDIA GPUs.

Decodes and verifications take the split-KV kernel, prompt chunks the tiled one.  Which row takes which is
decided by the number of its queries, which the host knows; nothing here reads a device value.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from pellucid.attention.base import AttentionLayer, AttentionSpec, Spec
from pellucid.forward import ForwardInput
from pellucid.kernels.attention.paged_attention import MAX_SHORT_QUERY, SHARED_MEMORY, hopper_refusal
from pellucid.platform import Platform, has_triton
from pellucid.transfer import upload

if TYPE_CHECKING:
    from pellucid.kernels.attention.paged_attention import PagedRows, TreeRows
    from pellucid.kernels.attention.prefill_plan import PromptTiles

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256
MAX_SMALL_HEAD_DIM = 128  # where a program has less shared memory than the kernels are made for


def refusal(spec: Spec, platform: Platform) -> str | None:
    """Why none of the kernels can compute here, or none with these dtypes; or None."""
    if not has_triton():
        return "Triton is not installed"
    if platform.device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"needs a CUDA device, not {platform.device} (or TRITON_INTERPRET=1, which is for tests)"
    if spec.dtype not in DTYPES:
        return f"computes in float32, bfloat16 or float16, not {spec.dtype}"
    if platform.device == "cuda" and spec.kv_dtype == torch.float8_e4m3fn and not platform.reaches(8, 9):
        return "an FP8 cache needs a GPU of compute capability 8.9 or newer"
    return None


class TritonAttention:
    """Prepare q and write the cache, then attend: at most three kernels and one merge a layer."""

    max_graph_query: ClassVar[int] = MAX_SHORT_QUERY
    supports_tile_maps: ClassVar[bool] = True
    max_graph_keys: ClassVar[int | None] = None
    supports_trees: ClassVar[bool] = True

    def __init__(self) -> None:
        # Imported here, so that asking `supports` needs no Triton.
        from pellucid.kernels.attention.decode_attention import decode_attention
        from pellucid.kernels.attention.hopper_prefill import hopper_takes
        from pellucid.kernels.attention.kv_move import kv_move
        from pellucid.kernels.attention.paged_attention import PagedRows, TreeRows
        from pellucid.kernels.attention.prefill_attention import (
            prefill_attention,
            prefill_tiles,
            queries_per_tile,
        )
        from pellucid.kernels.attention.prefill_plan import PromptTiles
        from pellucid.kernels.attention.qkv_rope import qkv_rope

        self.qkv_rope, self.kv_move = qkv_rope, kv_move
        self.decode_attention = decode_attention
        self.prefill_attention = prefill_attention
        self.prefill_tiles, self.prompt_tiles = prefill_tiles, PromptTiles
        self.queries_per_tile, self.hopper_takes = queries_per_tile, hopper_takes
        self.paged_rows, self.tree_rows = PagedRows, TreeRows

    @staticmethod
    def supports(spec: AttentionSpec, platform: Platform) -> str | None:
        """None if this backend can serve `spec` on this hardware, else the reason in words."""
        if (reason := refusal(spec, platform)) is not None:
            return reason
        if spec.num_heads % spec.num_kv_heads:
            return f"{spec.num_heads} query heads do not divide into {spec.num_kv_heads} KV heads"
        has_room = platform.shared_memory is None or platform.shared_memory >= SHARED_MEMORY
        most = MAX_HEAD_DIM if has_room else MAX_SMALL_HEAD_DIM
        if spec.head_dim > most:
            return f"head dim {spec.head_dim} is over {most}, the most that this GPU's shared memory is for"
        if spec.block_size % 16:
            return f"block size {spec.block_size} is no multiple of 16"
        return None

    @staticmethod
    def describe(spec: AttentionSpec, platform: Platform) -> str:
        """What attends, for the log."""
        if not platform.is_hopper:
            return "Triton's kernels"
        group_size, kv_dtype = spec.num_heads // spec.num_kv_heads, spec.kv_dtype or spec.dtype
        sizes = group_size, spec.head_dim, spec.block_size, spec.dtype, kv_dtype
        reason = f"scores capped at {spec.softcap:g}" if spec.softcap else hopper_refusal(*sizes)
        reason = f"chunks of {spec.chunk} tokens" if spec.chunk else reason
        if reason is None:
            return "Triton's kernels, Hopper's for prompts"
        return f"Triton's kernels; with {reason}, prompts take the one for any GPU, not Hopper's"

    def kv_layout(self, spec: AttentionSpec, num_blocks: int) -> tuple[int, ...]:
        """[num_blocks, 2, num_kv_heads, block_size, head_dim]; on the second axis keys, then values."""
        return (num_blocks, 2, spec.num_kv_heads, spec.block_size, spec.head_dim)

    def metadata(self, fwd: ForwardInput, table: int) -> TritonMetadata:
        """Part the rows by their number of queries: decodes come first in a step, prompt chunks last."""
        num_short = sum(1 for _ in takewhile(lambda length: length <= MAX_SHORT_QUERY, fwd.query_lens))
        blocks = fwd.block_tables[table]
        longest = max(fwd.query_lens[:num_short], default=1)
        return TritonMetadata(
            slot_mapping=fwd.slot_mappings[table],
            short=self.paged_rows(
                block_table=blocks[:num_short],
                seq_lens=fwd.seq_lens[:num_short],
                cu_seqlens_q=fwd.cu_seqlens_q[: num_short + 1],
                # One or all: of further variants of the kernel, few would ever be launched.
                max_query=1 if longest == 1 else MAX_SHORT_QUERY,
                tree=self.tree(fwd, slice(None, num_short)),
            ),
            long=self.paged_rows(
                block_table=blocks[num_short:],
                seq_lens=fwd.seq_lens[num_short:],
                cu_seqlens_q=fwd.cu_seqlens_q[num_short:],
                max_query=fwd.max_query,
                tree=self.tree(fwd, slice(num_short, None)),
            ),
            long_query_lens=fwd.query_lens[num_short:],
            long_sampled=fwd.num_sampled[num_short:],
        )

    def forward(self, qkv: Tensor, layer: AttentionLayer, fwd: ForwardInput) -> Tensor:
        """Write k, v of qkv [T, (N + 2K) * H] to the cache, then attend with q.  Returns [T, N * H]."""
        step = fwd.attn[layer.table]
        assert isinstance(step, TritonMetadata)
        scales = {"k_scale": layer.k_scale, "v_scale": layer.v_scale}
        q = self.qkv_rope(
            qkv, layer.kv_cache, fwd.positions, step.slot_mapping,
            norm=layer.qk_norm, rope=layer.rope, interleaved=layer.interleaved, **scales,
        )  # fmt: skip
        out, all_wanted = torch.empty_like(q), fwd.all_wanted or not layer.is_last
        if not all_wanted and not step.short.num_rows:
            out[0] = 0  # read all the same: where nothing is wanted, and for a recording's padding
        how = {"scale": layer.scale, "softcap": layer.softcap, "sinks": layer.sinks}
        how |= {"window": layer.window, "chunk": layer.chunk}
        how |= scales
        self.decode_attention(q, layer.kv_cache, step.short, **how, out=out)
        if step.long_query_lens:
            is_plain = layer.softcap is None and layer.chunk is None
            by_hopper = is_plain and self.hopper_takes(q, layer.kv_cache, step.long)
            tile_queries = self.queries_per_tile(q.shape[1] // layer.kv_cache.shape[2], by_hopper=by_hopper)
            tiles = self.tiles(step, fwd, tile_queries, all_wanted=all_wanted)
            self.prefill_attention(q, layer.kv_cache, step.long, tiles=tiles, **how, out=out)
        return out.flatten(1)

    def write(self, kv: Tensor, layer: AttentionLayer, fwd: ForwardInput) -> None:
        """Write k, v of kv [T, 2K * H] to the cache."""
        step = fwd.attn[layer.table]
        assert isinstance(step, TritonMetadata)
        norm = None if layer.qk_norm is None else layer.qk_norm.of_last(layer.kv_cache.shape[2])
        self.qkv_rope(
            kv, layer.kv_cache, fwd.positions, step.slot_mapping, norm=norm, rope=layer.rope,
            interleaved=layer.interleaved, k_scale=layer.k_scale, v_scale=layer.v_scale,
        )  # fmt: skip

    def move(self, kv_cache: Tensor, sources: Tensor, targets: Tensor) -> None:
        """Copy keys and values from places [B, n] to others, a row's in order."""
        self.kv_move(kv_cache, sources, targets)

    def tree(self, fwd: ForwardInput, rows: slice) -> TreeRows | None:
        """The draft trees of some rows."""
        if fwd.tree is None:
            return None
        return self.tree_rows(
            positions=fwd.positions, ancestors=fwd.tree.ancestors, first_drafts=fwd.tree.first_drafts[rows]
        )

    def tiles(
        self, step: TritonMetadata, fwd: ForwardInput, tile_queries: int, *, all_wanted: bool
    ) -> PromptTiles:
        """The map from tiles of so many queries to rows, shipped by the first layer that asks for it.

        all_wanted: of all queries, not only of those whose logits are sampled.
        """
        key = tile_queries, all_wanted
        if key not in step.tiles:
            if fwd.tiles is not None:
                tiles = fwd.tiles.get(tile_queries, self.prefill_tiles, all_wanted=all_wanted)
            else:
                wanted = step.long_query_lens if all_wanted else step.long_sampled
                made = self.prefill_tiles(step.long_query_lens, tile_queries, wanted)
                tiles = upload(made, step.slot_mapping.device)
            step.tiles[key] = self.prompt_tiles(tiles, step.long, tile_queries, are_few=not all_wanted)
        return step.tiles[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonMetadata:
    """One step's rows with one block table.  But for `tiles` a view of fwd's persistent buffers."""

    slot_mapping: Tensor  # [T]
    short: PagedRows  # decodes and verifications
    long: PagedRows  # prompt chunks
    long_query_lens: list[int]  # on the host
    long_sampled: list[int]  # of these queries the last ones, also on the host
    # By queries a tile, and whether all are wanted:
    tiles: dict[tuple[int, bool], PromptTiles] = field(default_factory=dict)
