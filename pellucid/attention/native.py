"""Attention in native code: the backend of CPUs that computes with 16 bits.

Norms, rotation and the write to the cache are one call for all tokens of a step, and so is attention of short
rows, decodes and verifications, a query at a time over its own keys.  Long rows, which are prompts, attend as
in plain torch.

Legend: T tokens, N query heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from pellucid.attention.base import AttentionLayer, AttentionSpec
from pellucid.attention.torch import CAUSAL, MAX_SHORT_QUERY, LongRow, Shape, TorchAttention, TorchMetadata
from pellucid.forward import ForwardInput
from pellucid.native.library import TYPES, HeadsFields, Library, address, library, pointer, serves
from pellucid.platform import Platform

UNIT = 16  # features, of which a head has whole ones
MOST_DIM = 256


class NativeAttention(TorchAttention):
    """One call writes keys and values, another one attends with short rows."""

    supports_trees: ClassVar[bool] = False

    def __init__(self) -> None:
        code = library()
        assert code is not None, "supports() was not asked"
        self.code: Library = code
        self._layers: dict[Hashable, Bound] = {}

    @staticmethod
    def supports(spec: AttentionSpec, platform: Platform) -> str | None:
        """None if this backend can serve `spec` on this hardware, else the reason in words."""
        if platform.device != "cpu":
            return "is for CPUs"
        if not serves(spec.dtype):
            return f"computes in bfloat16 or float16, not {spec.dtype}, and needs a C++ compiler"
        if spec.kv_dtype not in (None, spec.dtype):
            return "reads keys and values of the model's dtype alone"
        if spec.softcap is not None or spec.sinks:
            return "knows no soft caps and no sinks"
        if spec.head_dim % UNIT or spec.head_dim > MOST_DIM:
            return f"serves heads of up to {MOST_DIM} features, by {UNIT}, not {spec.head_dim}"
        return TorchAttention.supports(spec, platform)

    @staticmethod
    def describe(spec: AttentionSpec, platform: Platform) -> str:
        """What attends, for the log."""
        return "native code for decodes, torch's operations for prompts"

    def metadata(self, fwd: ForwardInput, table: int) -> NativeMetadata:
        """Who sees what of the step's rows; prompts' part of it is torch's."""
        assert fwd.tree is None, "supports_trees is false"
        blocks, slots = fwd.block_tables[table], fwd.slot_mappings[table]
        return NativeMetadata(
            positions=fwd.positions,
            slots=slots,
            blocks=blocks,
            query_lens=fwd.cu_seqlens_q.diff().tolist(),
            seq_lens=fwd.seq_lens.tolist(),
            block_table=blocks.numpy(),
            slot_mapping=slots.numpy(),
            device=blocks.device,
            sight=CAUSAL,
        )

    def forward(self, qkv: Tensor, layer: AttentionLayer, fwd: ForwardInput) -> Tensor:
        """Write k, v of qkv [T, (N + 2K) * H] to the cache, then attend with q.  Returns [T, N * H]."""
        metadata = fwd.attn[layer.table]
        assert isinstance(metadata, NativeMetadata)
        bound, qkv = self._bound(layer, qkv), qkv.contiguous()
        work = metadata.native_work(bound.shape)
        q = qkv.new_empty(qkv.shape[0], bound.num, bound.dim)
        out = torch.empty_like(q) if work.is_whole else torch.zeros_like(q)
        self.code.attend(bound.fields, qkv.data_ptr(), q.data_ptr(), out.data_ptr(), *work.arguments)
        for row in work.long:
            row.attend(q, layer, out)
        return out.flatten(1)

    def _bound(self, layer: AttentionLayer, qkv: Tensor) -> Bound:
        # What is named by where it lies is kept, so that nothing else will lie there; a cache may move.
        key = layer.kv_cache.data_ptr(), layer.window, layer.scale, id(layer.rope), id(layer.qk_norm)
        bound = self._layers.get(key)
        if bound is None:
            bound = self._layers[key] = Bound.to(layer, qkv)
        return bound


@dataclass(frozen=True, slots=True)
class Bound:
    """What native code must know of a layer."""

    fields: object
    num: int
    dim: int
    shape: Shape
    kept: tuple[object, ...]  # whose addresses the fields have

    @classmethod
    def to(cls, layer: AttentionLayer, qkv: Tensor) -> Bound:
        _, _, num_kv, block_size, dim = layer.kv_cache.shape
        num = qkv.shape[1] // dim - 2 * num_kv
        rope, norm = layer.rope, layer.qk_norm
        fields = HeadsFields(
            cache=address(layer.kv_cache),
            rope=address(rope),
            norm=None if norm is None else address(norm.weight),
            eps=0.0 if norm is None else norm.eps,
            scale=layer.scale,
            is_wide=norm is not None and norm.weight.dtype == torch.float32,
            type=TYPES[qkv.dtype],
            interleaved=layer.interleaved,
            num=num,
            num_kv=num_kv,
            dim=dim,
            rotary=0 if rope is None else rope.shape[-1],
            block_size=block_size,
        )
        shape = Shape(
            num_kv_heads=num_kv, group_size=num // num_kv, block_size=block_size,
            block_bytes=layer.kv_cache[0].nbytes, window=layer.window, dtype=qkv.dtype,
        )  # fmt: skip
        return cls(pointer(fields), num, dim, shape, (fields, rope, norm))


@dataclass(slots=True, kw_only=True)
class NativeMetadata(TorchMetadata):
    """One step's rows with one block table."""

    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64
    blocks: Tensor  # [B, M] int32
    native: dict[Shape, NativeWork] = field(default_factory=dict)

    def native_work(self, shape: Shape) -> NativeWork:
        """The step's work for layers of this shape: made for the first of them, shared by the rest."""
        work = self.native.get(shape)
        if work is None:
            work = self.native[shape] = self.make_native(shape)
        return work

    def make_native(self, shape: Shape) -> NativeWork:
        """Single queries of short rows, and whole rows that are long."""
        queries: list[tuple[int, int, int, int]] = []
        long: list[LongRow] = []
        num_tokens = 0
        for row in self.spans(shape):
            num_tokens += row.num_query
            if row.num_query > MAX_SHORT_QUERY:
                long.append(self.long_row(row, shape))
                continue
            for i in range(row.num_query):
                end = row.seq_len - row.num_query + i + 1
                first = 0 if shape.window is None else max(0, end - shape.window)
                queries.append((row.token + i, row.index, first, end))
        table = np.array(queries, dtype=np.int32).reshape(-1, 4)
        places = address(self.positions), address(self.slots), self.positions.shape[0]
        keys = address(self.blocks), self.blocks.stride(0), table.ctypes.data, len(table)
        return NativeWork(
            queries=table,
            arguments=(*places, *keys),
            long=long,
            is_whole=num_tokens == self.positions.shape[0],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeWork:
    """What the layers of one shape and window share in a step."""

    queries: np.ndarray  # [num, 4] int32: token, row, and the keys first .. end that it sees
    arguments: tuple[int | None, ...]  # what native code is told of the step
    long: list[LongRow]
    is_whole: bool  # there is no token but those of rows
