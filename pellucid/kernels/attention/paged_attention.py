"""What the attention kernels share: the rows they read, and the reference.

Query heads of one KV head are packed into the rows of a tile, so that each key is read once for all of them:
packed row m is query m // G with head m % G.  Softmax runs online in base 2 with float32 sums.

Legend: T tokens, B rows, M packed rows of a tile, N query heads, K KV heads, G query heads a KV head, H head
dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

LOG2_E = 1.4426950408889634
MAX_SHORT_QUERY = 8  # queries of a row that the split-KV kernel takes
SHARED_MEMORY = 160 * 1024  # bytes that tiles are made for: an A100 has as many, GPUs for graphics 99 KiB


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeRows:
    """Who sees whom among draft trees: a query sees the drafts of its row that it has a bit for.

    What lies before a row's first draft it sees as far as its window reaches from its position.
    """

    positions: Tensor  # [T] int64, of the queries
    ancestors: Tensor  # [T] int64: bit i is the row's draft i + 1
    first_drafts: Tensor  # [B] int32: the place of each row's first draft, its length if it has none


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedRows:
    """Rows with queries at the end of their sequence.  All tensors on the device."""

    block_table: Tensor  # [B, M] int32
    seq_lens: Tensor  # [B] int32, tokens; 0 is a padding row, whose output is zero
    cu_seqlens_q: Tensor  # [B + 1] int32
    max_query: int  # no row has more queries
    tree: TreeRows | None = None  # None: all is causal

    @property
    def num_rows(self) -> int:
        return self.seq_lens.shape[0]


def tree_arguments(rows: PagedRows) -> tuple[Tensor, Tensor, Tensor]:
    """Positions, ancestors and first drafts for a kernel, which reads none of them if there is no tree."""
    tree = rows.tree
    if tree is None:
        return rows.seq_lens, rows.seq_lens, rows.seq_lens
    arguments = tree.positions, tree.ancestors, tree.first_drafts
    assert all(each.is_contiguous() for each in arguments), [each.stride() for each in arguments]
    return arguments


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of it that a program may plan for."""
    if device.type != "cuda":
        return SHARED_MEMORY
    properties = torch.cuda.get_device_properties(device)  # for ROCm they do not say
    return min(SHARED_MEMORY, getattr(properties, "shared_memory_per_block_optin", SHARED_MEMORY))


def padded_heads(group_size: int) -> int:
    """Query heads of a KV head as Hopper's prompt kernel packs them: a power of two."""
    return 1 << (group_size - 1).bit_length()


@cache
def hopper_refusal(
    group_size: int, head_dim: int, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> str | None:
    """Why prompt chunks do not go to Hopper's kernel for them, which knows no trees either; None: they do."""
    if kv_dtype != dtype:
        return f"a cache of {str(kv_dtype).removeprefix('torch.')}"
    if dtype.itemsize != 2:
        return f"heads of {str(dtype).removeprefix('torch.')}"
    if head_dim not in (64, 128):
        return f"a head dim of {head_dim}"
    if block_size % 64:
        return f"blocks of {block_size} tokens"
    return None if padded_heads(group_size) <= 64 else f"{group_size} query heads a KV head"


def check_operands(q: Tensor, kv_cache: Tensor, rows: PagedRows) -> None:
    """Assert that shapes and strides are what the kernels take for granted."""
    assert q.dim() == 3 and q.stride(2) == 1, (q.shape, q.stride())
    assert kv_cache.dim() == 5 and kv_cache.is_contiguous(), (kv_cache.shape, kv_cache.stride())
    assert q.shape[1] % kv_cache.shape[2] == 0 and q.shape[2] == kv_cache.shape[4], (q.shape, kv_cache.shape)
    assert kv_cache.shape[3] % 16 == 0, f"pages of {kv_cache.shape[3]} tokens, must be a multiple of 16"
    assert rows.block_table.stride(1) == 1, rows.block_table.stride()
    assert rows.cu_seqlens_q.shape[0] == rows.num_rows + 1 == rows.block_table.shape[0] + 1


def paged_attention_ref(  # noqa: PLR0913 as the kernels that it judges
    q: Tensor,
    kv_cache: Tensor,
    rows: PagedRows,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of q [T, N, H] over the paged cache, row by row in float32.  Returns [T, N, H].

    The cache holds keys / k_scale and values / v_scale.  sinks: [N], logits beside those of keys.
    softcap: scores become cap * tanh(scores / cap).  window, chunk: see `decode_attention`.
    """
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    group_size = q.shape[1] // kv_cache.shape[2]
    starts = rows.cu_seqlens_q.tolist()
    for row, seq_len in enumerate(rows.seq_lens.tolist()):
        if seq_len == 0:
            continue
        queries = q[starts[row] : starts[row + 1]].float()
        blocks = kv_cache[rows.block_table[row, : -(-seq_len // kv_cache.shape[3])].long()]
        keys, values = blocks.float().permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :seq_len]
        keys, values = keys.repeat_interleave(group_size, 1), values.repeat_interleave(group_size, 1)
        scores = torch.einsum("qnh,snh->nqs", queries, keys * k_scale) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        own = slice(starts[row], starts[row + 1])
        hidden = hidden_keys(rows, row, own, seq_len, window=window, chunk=chunk)
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, len(queries), 1)), -1)
        weights = scores.softmax(-1)[..., :seq_len]
        out[starts[row] : starts[row + 1]] = torch.einsum("nqs,snh->qnh", weights, values * v_scale).to(
            q.dtype
        )
    return out


def hidden_keys(
    rows: PagedRows,
    row: int,
    own: slice,
    seq_len: int,
    *,
    window: int | None = None,
    chunk: int | None = None,
) -> Tensor:
    """[Q, S] bool: which keys of a row its queries, `own` of the step's tokens, may not see."""
    device, tree = rows.seq_lens.device, rows.tree
    position = torch.arange(seq_len - (own.stop - own.start), seq_len, device=device)
    if tree is not None:
        position = tree.positions[own]
    distance = position[:, None] - torch.arange(seq_len, device=device)
    hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
    if chunk is not None:
        hidden |= distance > position[:, None] % chunk
    if tree is not None:
        first = int(tree.first_drafts[row])
        draft = torch.arange(seq_len - first, device=device)
        hidden[:, first:] = (tree.ancestors[own][:, None] >> draft) & 1 == 0
    return hidden
