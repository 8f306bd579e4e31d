# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
"""What decode and prefill attention share: the rows they read, the walk over pages, and the reference.

Query heads of one KV head are packed into the rows of a tile, so that each key is read once for all of them:
packed row m is query m // G with head m % G.  Softmax runs online in base 2 with float32 sums.

Legend: T tokens, B rows, M packed rows of a tile, N query heads, K KV heads, G query heads a KV head, H head
dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
SHARED_MEMORY = 160 * 1024  # bytes a program may plan for: what every data-centre GPU since Ampere has


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
    return tree.positions, tree.ancestors, tree.first_drafts


def keys_per_tile(block_size: int, dtype: torch.dtype) -> int:
    """Keys a tile holds: a power of two that divides the page, so that a tile lies in one page.

    float32 multiplies without tensor cores and would run out of registers with larger tiles.
    """
    return min(block_size & -block_size, 16 if dtype == torch.float32 else 64)


def stages_for(tile_bytes: int, query_bytes: int) -> int:
    """Stages of the loop over tiles that fit beside the queries.  tile_bytes: of keys and values together."""
    return max(1, min(3, 1 + (SHARED_MEMORY - query_bytes) // tile_bytes))


def check_operands(q: Tensor, kv_cache: Tensor, rows: PagedRows) -> None:
    """Assert that shapes and strides are what the kernels take for granted."""
    assert q.dim() == 3 and q.stride(2) == 1, (q.shape, q.stride())
    assert kv_cache.dim() == 5 and kv_cache.is_contiguous(), (kv_cache.shape, kv_cache.stride())
    assert q.shape[1] % kv_cache.shape[2] == 0 and q.shape[2] == kv_cache.shape[4], (q.shape, kv_cache.shape)
    assert kv_cache.shape[3] % 16 == 0, f"pages of {kv_cache.shape[3]} tokens, must be a multiple of 16"
    assert rows.block_table.stride(1) == 1, rows.block_table.stride()
    assert rows.cu_seqlens_q.shape[0] == rows.num_rows + 1 == rows.block_table.shape[0] + 1


def paged_attention_ref(
    q: Tensor,
    kv_cache: Tensor,
    rows: PagedRows,
    *,
    scale: float,
    window: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """Attention of q [T, N, H] over the paged cache, row by row in float32.  Returns [T, N, H].

    The cache holds keys / k_scale and values / v_scale.
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
        position = torch.arange(seq_len - len(queries), seq_len, device=q.device)
        tree, own = rows.tree, slice(starts[row], starts[row + 1])
        if tree is not None:
            position = tree.positions[own]
        distance = position[:, None] - torch.arange(seq_len, device=q.device)
        hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
        if tree is not None:
            first = int(tree.first_drafts[row])
            draft = torch.arange(seq_len - first, device=q.device)
            hidden[:, first:] = (tree.ancestors[own][:, None] >> draft) & 1 == 0
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[starts[row] : starts[row + 1]] = torch.einsum("nqs,snh->qnh", weights, values * v_scale).to(
            q.dtype
        )
    return out


@triton.jit
def attend_pages(
    q,  # [M, H]
    accumulator,  # [M, H] float32
    maximum,  # [M] float32, in base 2
    total,  # [M] float32
    pages_ptr,  # this row's block table
    keys_ptr,  # this KV head's keys in page 0
    lines,  # a descriptor of the cache as lines [TILE, H], for tiles that every query sees whole; or None
    first_line,  # of this KV head's keys in page 0
    begin,  # first key, a multiple of TILE
    end,  # behind the last key
    position,  # [M], of each packed row's query
    ancestors,  # [M], its bits
    first_draft,  # of this row
    scale,  # to base 2
    VALUES_OFFSET: tl.constexpr,  # from a page's keys to its values
    PAGE_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    WINDOW: tl.constexpr,  # 0 is none
    TREE: tl.constexpr,
    MASKED: tl.constexpr,  # whether some key of begin .. end is hidden from some query
):
    """Fold keys begin .. end into the running softmax.  Returns (accumulator, maximum, total)."""
    key = tl.arange(0, TILE)
    dim = tl.arange(0, DIM_PADDED)
    inside = dim[None, :] < HEAD_DIM
    for start in range(begin, end, TILE):
        page = tl.load(pages_ptr + start // BLOCK_SIZE)
        line = page * (PAGE_STRIDE // HEAD_DIM) + first_line + start % BLOCK_SIZE
        at = keys_ptr + page.to(tl.int64) * PAGE_STRIDE
        at = at + (start % BLOCK_SIZE + key)[:, None] * HEAD_DIM + dim[None, :]
        # Places behind the end may hold anything, NaN too, which a weight of zero would not silence.
        present = inside & ((start + key) < end)[:, None] if MASKED else inside
        if lines is not None and not MASKED:
            k = lines.load([line, 0])
            v = lines.load([line + VALUES_OFFSET // HEAD_DIM, 0])
        elif MASKED or DIM_PADDED != HEAD_DIM:
            k = tl.load(at, mask=present, other=0.0)
            v = tl.load(at + VALUES_OFFSET, mask=present, other=0.0)
        else:
            k = tl.load(at)
            v = tl.load(at + VALUES_OFFSET)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        if MASKED:
            distance = position[:, None] - (start + key)[None, :]
            visible = distance >= 0
            if WINDOW > 0:
                visible = visible & (distance < WINDOW)
            if TREE:
                draft = start + key - first_draft
                bits = ancestors[:, None] >> tl.minimum(tl.maximum(draft, 0), 63).to(tl.int64)[None, :]
                seen = ((bits & 1) != 0) & (draft < 64)[None, :]
                visible = tl.where((draft >= 0)[None, :], seen, visible)
            scores = tl.where(visible, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new_maximum[:, None])
        shrink = tl.exp2(maximum - new_maximum)
        total = total * shrink + tl.sum(weights, 1)
        accumulator = accumulator * shrink[:, None]
        accumulator = tl.dot(weights.to(q.dtype), v.to(q.dtype), accumulator, input_precision="ieee")
        maximum = new_maximum
    return accumulator, maximum, total


@triton.jit
def attend_range(
    q,
    pages_ptr,
    keys_ptr,
    lines,
    first_line,
    first_position,  # of the oldest query, before the first draft
    last_position,  # of the newest query
    begin,  # keys before it are not looked at, a multiple of TILE
    end,  # nor keys from here on
    position,
    ancestors,
    first_draft,
    scale,
    VALUES_OFFSET: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    M: tl.constexpr,
    WINDOW: tl.constexpr,
    TREE: tl.constexpr,
):
    """Attend over the keys of begin .. end that queries at places first_position .. last_position see.

    Tiles that every query sees whole, nearly all, take the loop without masks.  Returns (accumulator,
    maximum, total): the result is accumulator / total, and a query that sees nothing has a total of zero.
    """
    # A finite start keeps exp2(maximum - maximum) away from infinity minus infinity.
    maximum = tl.full([M], -1.0e30, dtype=tl.float32)
    total = tl.zeros([M], dtype=tl.float32)
    accumulator = tl.zeros([M, DIM_PADDED], dtype=tl.float32)
    end = tl.minimum(end, last_position + 1)
    whole_end = tl.minimum(
        tl.maximum((first_position + 1) // TILE * TILE, begin), tl.maximum(end // TILE * TILE, begin)
    )
    whole_begin = begin
    if WINDOW > 0:
        oldest = tl.maximum(first_position - WINDOW + 1, 0) // TILE * TILE
        begin = tl.maximum(begin, oldest)
        everybody = (tl.maximum(last_position - WINDOW + 1, 0) + TILE - 1) // TILE * TILE
        whole_end = tl.maximum(whole_end, begin)
        whole_begin = tl.minimum(tl.maximum(everybody, begin), whole_end)
        window_end = tl.minimum(whole_begin, end)
        accumulator, maximum, total = attend_pages(
            q, accumulator, maximum, total, pages_ptr, keys_ptr, lines, first_line,
            begin, window_end, position,
            ancestors, first_draft, scale,
            VALUES_OFFSET, PAGE_STRIDE, BLOCK_SIZE, TILE, HEAD_DIM, DIM_PADDED, WINDOW, TREE, True,
        )  # fmt: skip
    accumulator, maximum, total = attend_pages(
        q, accumulator, maximum, total, pages_ptr, keys_ptr, lines, first_line,
            whole_begin, whole_end, position,
        ancestors, first_draft, scale,
        VALUES_OFFSET, PAGE_STRIDE, BLOCK_SIZE, TILE, HEAD_DIM, DIM_PADDED, WINDOW, TREE, False,
    )  # fmt: skip
    accumulator, maximum, total = attend_pages(
        q, accumulator, maximum, total, pages_ptr, keys_ptr, lines, first_line,
            whole_end, end, position,
        ancestors, first_draft, scale,
        VALUES_OFFSET, PAGE_STRIDE, BLOCK_SIZE, TILE, HEAD_DIM, DIM_PADDED, WINDOW, TREE, True,
    )  # fmt: skip
    return accumulator, maximum, total
