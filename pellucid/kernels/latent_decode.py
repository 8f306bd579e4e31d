# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false
"""Attention of rows with few queries over latents in the paged cache: each tile is key and value at once.

Queries have been brought to the width of a latent, so all heads see the same keys.  A program takes as many
heads as one tile of products has room for: up to 16 of them at one query cost no more than one, and beyond
64 packed queries a cached row is read again.  Rows are cut, chunks found and merged as `decode_attention`
does; a group of heads is to it what a KV head is there.

Legend: T tokens, B rows, S chunks of a row, M packed rows of a tile, N heads, G heads a program, C rank of
the latent, R features that turn.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pellucid.kernels.decode_attention import COUNTS, PROGRAMS, Tile, chunks_of, cut, find_further, look_up
from pellucid.kernels.decode_merge import arrivals, copies_for, hand_in, merged_at_once, partial_results
from pellucid.kernels.decode_tiles import lines_of, pages_of
from pellucid.kernels.dependent import dependent, let_next_start, wait
from pellucid.kernels.paged_attention import LOG2_E, MAX_SHORT_QUERY, PagedRows, shared_memory

MAX_PACKED = 64  # packed queries of a program: their sums fill its registers
ROWS_AT_ONCE = 128  # whose lengths are looked at together
FEW_PAIRS = 132  # up to here a multiprocessor has one program, and that wants many keys under way


def heads_per_program(num_heads: int, max_query: int) -> int:
    """The most heads that divide all and whose packed queries a program has room for."""
    most = max(1, MAX_PACKED // max_query)
    return max(each for each in range(1, min(most, num_heads) + 1) if num_heads % each == 0)


def tile_for(
    num_pairs: int, row_bytes: int, query_bytes: int, padded: int, block_size: int, room: int
) -> Tile:
    """Keys, warps and stages of a tile.

    num_pairs: of a row and a group of heads.  row_bytes: of a key, as it is padded; query_bytes: of all
    queries of a program.  room: bytes of shared memory.
    """
    if row_bytes > 2048:  # float32, which multiplies without tensor cores
        keys, warps, stages = 16, 8, 1
    elif padded > 16:
        keys, warps, stages = 32, 8, 3 if num_pairs <= FEW_PAIRS else 2
    else:
        keys, warps, stages = 32, 4, 4 if num_pairs <= FEW_PAIRS else 2
    if (divisor := block_size & -block_size) != block_size:  # a tile is part of a page, or some pages
        keys = min(keys, divisor)
    while keys > 16 and keys * row_bytes + query_bytes > room:
        keys //= 2
    return Tile(keys, warps, max(1, min(stages, (room - query_bytes) // (keys * row_bytes))))


def latent_decode(
    q: Tensor, q_turned: Tensor, kv_cache: Tensor, rows: PagedRows, *, scale: float, out: Tensor
) -> Tensor:
    """Attend with q [T, N, C] and q_turned [T, N, R] over kv_cache [num_blocks, block_size, C + R].

    out: [T, N, C], its result: means of latents.  Rows have at most rows.max_query <= 8 queries, causal among
    themselves.  Strides of q, q_turned and out are free but for the last one.  Reads no device value on the
    host.
    """
    num_heads, rank, rotary_dim = q.shape[1], q.shape[2], q_turned.shape[2]
    block_size = kv_cache.shape[1]
    assert q.stride(2) == q_turned.stride(2) == out.stride(2) == 1, (q.stride(), out.stride())
    assert q_turned.shape[:2] == q.shape[:2] and out.shape == q.shape, (q.shape, q_turned.shape, out.shape)
    assert out.stride(1) == rank, out.stride()
    assert kv_cache.shape[2] == rank + rotary_dim and kv_cache.is_contiguous(), (kv_cache.shape, rank)
    assert block_size % 16 == 0, f"pages of {block_size} tokens, must be a multiple of 16"
    assert 1 <= rows.max_query <= MAX_SHORT_QUERY and rows.tree is None, rows.max_query
    if rows.num_rows == 0:
        return out
    heads = heads_per_program(num_heads, rows.max_query)
    packed, groups = rows.max_query * heads, num_heads // heads
    padded, num_pairs = max(16, triton.next_power_of_2(packed)), rows.num_rows * groups
    rank_padded, rotary_padded = (max(16, triton.next_power_of_2(dim)) for dim in (rank, rotary_dim))
    row_bytes = (rank_padded + rotary_padded) * q.itemsize
    tile = tile_for(num_pairs, row_bytes, padded * row_bytes, padded, block_size, shared_memory(q.device))
    pieces = cut(num_pairs, rows.block_table.shape[1] * block_size, tile.keys)
    num_lines = num_pairs * pieces.num_chunks * packed if pieces.num_chunks > 1 else 0
    is_marked = pieces.direct == pieces.num_chunks > 1
    partial = partial_results(num_lines * (rank + 2), is_marked, q.device)
    latent_decode_kernel[(num_pairs, pieces.direct)](
        q,
        q_turned,
        kv_cache,
        out,
        partial,
        partial[num_lines * rank :],
        arrivals(triton.next_power_of_2(num_pairs), q.device),
        rows.block_table,
        rows.seq_lens,
        rows.cu_seqlens_q,
        scale * LOG2_E,
        rows.num_rows,
        pieces.whole,
        pieces.min_chunk.bit_length() - 1,
        pieces.num_chunks,
        pieces.direct,
        min(rows.num_rows * pieces.direct, max(1, PROGRAMS // groups)),
        rows.block_table.shape[1],
        q.stride(0),
        q.stride(1),
        q_turned.stride(0),
        q_turned.stride(1),
        out.stride(0),
        rows.block_table.stride(0),
        GROUPS=groups,
        HEADS=heads,
        RANK=rank,
        RANK_PADDED=rank_padded,
        ROTARY=rotary_dim,
        ROTARY_PADDED=rotary_padded,
        PACKED=packed,
        TILE=tile.keys,
        BLOCK_SIZE=block_size,
        M=padded,
        MERGED=(merged := merged_at_once(packed, rank)),
        COPIES=copies_for(merged * packed, tile.num_warps),
        MARKED=is_marked,
        ROWS=ROWS_AT_ONCE,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **dependent(),
    )
    return out


def latent_decode_ref(
    q: Tensor, q_turned: Tensor, kv_cache: Tensor, rows: PagedRows, *, scale: float
) -> Tensor:
    """The same, row by row in float32.  Returns [T, N, C]."""
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    starts, rank = rows.cu_seqlens_q.tolist(), q.shape[2]
    for row, seq_len in enumerate(rows.seq_lens.tolist()):
        own = slice(starts[row], starts[row + 1])
        if seq_len == 0:
            continue
        blocks = rows.block_table[row, : -(-seq_len // kv_cache.shape[1])].long()
        keys = kv_cache[blocks].flatten(0, 1)[:seq_len].float()
        queries = torch.cat((q[own], q_turned[own]), dim=-1).float()
        scores = torch.einsum("qnc,sc->nqs", queries, keys) * scale
        position = torch.arange(seq_len - len(queries), seq_len, device=q.device)
        hidden = position[:, None] < torch.arange(seq_len, device=q.device)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[own] = torch.einsum("nqs,sc->qnc", weights, keys[:, :rank]).to(q.dtype)
    return out


@triton.jit
def attend_latents(
    q_at,  # [M], pointers
    turned_at,  # [M], pointers
    asked,  # [M], whether there is such a query
    pages,  # of the first tile
    pages_ptr,  # this row's block table
    num_pages,  # it has room for
    cache_ptr,
    first_tile,
    step,  # tiles from one to the next
    seq_len,
    position,  # [M], of each packed row's query
    scale,
    RANK: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    M: tl.constexpr,
):
    """Attend over every step-th tile.  Returns (accumulator [M, C], maximum [M], sum of weights [M])."""
    LINE: tl.constexpr = RANK + ROTARY
    place = tl.arange(0, TILE)
    dim, rotary = tl.arange(0, RANK_PADDED), tl.arange(0, ROTARY_PADDED)
    in_rank, in_rotary = (dim < RANK)[None, :], (rotary < ROTARY)[None, :]
    q = tl.load(q_at[:, None] + dim[None, :], mask=asked[:, None] & in_rank, other=0.0)
    turned = tl.load(turned_at[:, None] + rotary[None, :], mask=asked[:, None] & in_rotary, other=0.0)
    # A finite start keeps exp2(maximum - maximum) away from infinity minus infinity.
    maximum = tl.full([M], -1.0e30, dtype=tl.float32)
    total = tl.zeros([M, TILE], dtype=tl.float32)
    accumulator = tl.zeros([M, RANK_PADDED], dtype=tl.float32)
    for start in range(first_tile * TILE, seq_len, step * TILE):
        key = start + place
        # Places behind the end may hold anything, NaN too, which a weight of zero would not silence.
        present = key < seq_len
        line = lines_of(place, start, pages, BLOCK_SIZE * LINE, LINE, BLOCK_SIZE)
        pages = pages_of(pages_ptr, start + step * TILE, num_pages, BLOCK_SIZE, len(pages))
        at = cache_ptr + line[:, None]
        latents = tl.load(at + dim[None, :], mask=present[:, None] & in_rank, other=0.0)
        keys = tl.load(at + RANK + rotary[None, :], mask=present[:, None] & in_rotary, other=0.0)
        scores = tl.dot(q, tl.trans(latents), input_precision="ieee")
        scores = tl.dot(turned, tl.trans(keys), scores, input_precision="ieee")
        scores = tl.where(position[:, None] >= key[None, :], scores * scale, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - new_maximum[:, None])
        shrink = tl.exp2(maximum - new_maximum)
        total = total * shrink[:, None] + weights
        accumulator = accumulator * shrink[:, None]
        accumulator = tl.dot(weights.to(latents.dtype), latents, accumulator, input_precision="ieee")
        maximum = new_maximum
    return accumulator, maximum, tl.sum(total, 1)


@triton.jit(do_not_specialize=COUNTS)
def latent_decode_kernel(
    q_ptr,
    turned_ptr,
    cache_ptr,
    out_ptr,
    partial_ptr,  # [B, N / G, S, PACKED, C]
    statistics_ptr,  # [B, N / G, S, PACKED, 2]: maximum, total
    arrivals_ptr,  # [B, N / G]
    block_table_ptr,
    seq_lens_ptr,
    cu_seqlens_q_ptr,
    scale,  # to base 2
    num_rows,
    whole,  # keys up to which a row stays whole
    chunk_bits,  # fewest keys of a chunk, as a power of two
    num_chunks,  # most chunks of a row
    direct,  # chunks of every row that have programs
    seekers,  # of a group's programs, those that look for further chunks
    num_pages,  # that a row of the block table has room for
    q_token_stride,
    q_head_stride,
    turned_token_stride,
    turned_head_stride,
    out_token_stride,
    block_table_stride,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_PADDED: tl.constexpr,
    PACKED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    M: tl.constexpr,
    MERGED: tl.constexpr,
    COPIES: tl.constexpr,
    MARKED: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Attend over chunks: the first `direct` of each row have programs, which then take further ones."""
    let_next_start(DEPENDENT)
    group = tl.program_id(0) % GROUPS
    packed = tl.arange(0, M)
    query, head = packed // HEADS, group * HEADS + packed % HEADS
    dim = tl.arange(0, RANK_PADDED)
    row, chunk = tl.program_id(0) // GROUPS, tl.program_id(1)  # which start in order of chunks
    number = chunk * num_rows + row
    seeks = (direct < num_chunks) & (number < seekers)
    is_there = number >= 0
    number = seekers - 1 - number  # long rows mostly come first, and have enough to do themselves
    wait(DEPENDENT)
    seq_len, first_token, num_query, pages = look_up(
        row, chunk, block_table_ptr, block_table_stride, seq_lens_ptr, cu_seqlens_q_ptr,
        num_pages, whole, chunk_bits, num_chunks, 0, TILE, BLOCK_SIZE,
    )  # fmt: skip
    while is_there:
        pages_ptr = block_table_ptr + row.to(tl.int64) * block_table_stride
        first_tile, chunks = chunks_of(seq_len, num_query, whole, chunk_bits, num_chunks, TILE, 0)
        if (chunk < chunks) & (num_query > 0):
            token = first_token.to(tl.int64) + query
            asked = query < num_query
            accumulator, maximum, weight = attend_latents(
                q_ptr + token * q_token_stride + head * q_head_stride,
                turned_ptr + token * turned_token_stride + head * turned_head_stride,
                asked, pages, pages_ptr, num_pages, cache_ptr, first_tile + chunk, chunks,
                seq_len, seq_len - num_query + query, scale,
                RANK, RANK_PADDED, ROTARY, ROTARY_PADDED, TILE, BLOCK_SIZE, M,
            )  # fmt: skip
            if chunks == 1:
                result = accumulator / tl.where(weight > 0, weight, 1.0)[:, None]
                out_at = token * out_token_stride + head * RANK
                inside = asked[:, None] & (dim < RANK)[None, :]
                tl.store(
                    out_ptr + out_at[:, None] + dim[None, :], result.to(out_ptr.dtype.element_ty), mask=inside
                )
            else:
                pair = row.to(tl.int64) * GROUPS + group
                hand_in(
                    accumulator, maximum, weight, out_ptr + first_token.to(tl.int64) * out_token_stride,
                    partial_ptr, statistics_ptr, arrivals_ptr, pair, chunk, group,
                    num_query, chunks, num_chunks, 1.0, out_token_stride,
                    HEADS, RANK, RANK_PADDED, PACKED, M, MERGED, COPIES, MARKED,
                )  # fmt: skip
        is_there = seeks
        if seeks:  # last, when memory is busy with what other programs have asked for
            num_further, row, chunk = find_further(
                number, seq_lens_ptr, cu_seqlens_q_ptr,
                num_rows, whole, chunk_bits, num_chunks, direct, ROWS, TILE, 0,
            )  # fmt: skip
            is_there = number < num_further
            number += seekers
            row = tl.minimum(row, num_rows - 1)
            seq_len, first_token, num_query, pages = look_up(
                row, chunk, block_table_ptr, block_table_stride, seq_lens_ptr, cu_seqlens_q_ptr,
                num_pages, whole, chunk_bits, num_chunks, 0, TILE, BLOCK_SIZE,
            )  # fmt: skip
