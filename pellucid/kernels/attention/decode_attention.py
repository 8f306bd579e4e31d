# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false
"""Attention of rows with few queries, decodes and verifications, over the paged cache: split-KV.

The tiles of keys that a row sees are dealt out to its chunks; short rows have one.  How many follows from
the row's length and from how many rows there are, never from the other rows' lengths.  The grid depends on
nothing that only the device knows: each program has a chunk, and some then go on to further ones of long
rows, which they find in the lengths of all.  What they find is merged within the launch (`decode_merge`).

Of many rows with one query each the TMA unit copies whole tiles, on GPUs that have one (`attend_columns`):
that takes as long as loads, but a seventh less energy.

Moves each key and value once.  On an H200, pages of 64, head dim 128, 32 heads on 8: 256 rows of 2,000 down
to 100 keys at 4.0 to 4.1 TB/s in bfloat16 and at 4.2 TB/s in FP8 (3.9 in any order); 256 of 256 keys in 79 to
85 us; 256 of 150 in FP8 in 32 us; one of 160 in 5.3 us (cases of benchmarks/kernels.py).  Lengths and pages
are looked up before all else, for keys wait for them.  One multiprocessor takes in 52 GB/s at most, which
bounds few rows that are not cut; a cut costs 2 us.

Legend: T tokens, B rows, S chunks of a row, M packed rows of a tile, N query heads, K KV heads, G query heads
a KV head, H head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from pellucid.kernels.attention.cache_lines import MIN_HEAD_DIM, cache_lines, has_lines
from pellucid.kernels.attention.decode_merge import (
    arrivals,
    copies_for,
    hand_in,
    merged_at_once,
    partial_results,
    sink_weight,
)
from pellucid.kernels.attention.decode_tiles import (
    attend_columns,
    attend_fp8_columns,
    attend_tiles,
    pages_of,
    sight_of,
)
from pellucid.kernels.attention.fp8_cache import is_fp8
from pellucid.kernels.attention.paged_attention import (
    LOG2_E,
    MAX_SHORT_QUERY,
    PagedRows,
    check_operands,
    paged_attention_ref,
    shared_memory,
    tree_arguments,
)
from pellucid.kernels.attention.scores import first_key, reach_of
from pellucid.kernels.lang.dependent import dependent, let_next_start, wait

Value = TypeVar("Value")
PROGRAMS = 264  # two for each of a large GPU's multiprocessors
COLUMNS = 8  # queries a tile, if they are columns
ROWS_AT_ONCE = 128  # whose lengths are looked at together

decode_attention_ref = paged_attention_ref


class Cut(NamedTuple):
    """How rows are cut into chunks, and how many of them have programs of their own."""

    whole: int  # keys up to which a row stays whole
    min_chunk: int  # fewest keys of a chunk, a power of two
    num_chunks: int  # most chunks of a row
    direct: int  # chunks of every row that have a program each, work for it or not


class Tile(NamedTuple):
    """What a program works on at once, and with what."""

    keys: int
    num_warps: int
    num_stages: int


# Most pairs of a row and a KV head: keys up to which a row stays whole, fewest keys of a chunk, most chunks.
# A cut costs a merge, which takes as long as 200 keys: few pairs are cut to fill the GPU, many for balance.
# A program alone reads 16 GB/s, so one long row beside many short ones is to have many chunks; while a
# multiprocessor has but two programs, shorter ones cost rows that are all long 4 to 9 %, with three nothing.
CUTS = {
    4: (384, 128, 32),
    8: (384, 128, 16),
    16: (384, 128, 8),
    32: (512, 128, 8),
    64: (512, 512, 8),
    264: (2048, 2048, 8),
    528: (2048, 1024, 8),
}
CUT_OF_MANY = (2048, 2048, 8)

# Most pairs: keys, warps and stages of a tile.  While a multiprocessor has one program, that wants many keys
# under way.  Then it has the fewer at once the more stages: fast is what fills whole rounds of programs.
TILES = {
    16: (128, 8, 3),
    132: (64, 4, 5),
    230: (64, 4, 3),
    264: (64, 4, 4),
    396: (64, 4, 3),
    528: (64, 2, 2),
}
TILE_OF_MANY = (64, 4, 3)
VERIFYING_TILES = {32: (128, 8, 3)}  # with 17 to 32 packed queries, in 16 bits
VERIFYING_TILE_OF_MANY = (64, 4, 3)  # of more pairs, more queries, or FP8
FP8_TILES = {264: (128, 4, 3), 396: (64, 4, 3), 1320: (128, 4, 3)}  # with queries as columns
FP8_TILE_OF_MANY = (64, 2, 3)
LINES_TILE = (64, 2, 2)  # copied by the TMA unit, with queries as columns
LINES_TILE_OF_SMALL = (64, 2, 3)  # of small heads; fewer results merged at once leave it the registers
MERGED_OF_SMALL = 2
SMALL_HEAD = 64  # features of a head whose tiles take few registers: rows of queries would leave them idle
COLUMNS_TILES = {264: (64, 4, 4), 528: (64, 4, 3)}  # of small heads, not by the TMA unit
COLUMNS_TILE_OF_MANY = (64, 2, 3)
MIN_PAIRS_BY_COLUMNS = 133  # fewer are attended to as fast with queries as rows, but in a window
MIN_PAIRS_BY_LINES = 529  # fewer are attended to as fast by loads, or faster
FP8_NAMES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}  # that kernels ask for


def up_to(num: int, table: Mapping[int, Value], beyond: Value) -> Value:
    """What a table has for up to so many."""
    return next((table[most] for most in table if num <= most), beyond)


def cut(num_pairs: int, max_keys: int, tile: int) -> Cut:
    """How to cut so many pairs of a row and a KV head.  max_keys: that a row may see; tile: keys of one."""
    whole, chunk, most = up_to(num_pairs, CUTS, CUT_OF_MANY)
    min_chunk = max(chunk, tile)
    num_chunks = 1 if max_keys <= whole else min(most, triton.cdiv(max_keys, min_chunk))
    return Cut(whole, min_chunk, num_chunks, min(num_chunks, max(1, PROGRAMS // num_pairs)))


def seekers(num_pairs: int) -> int:
    """How many programs look for further chunks of long rows: about those that run at once, see TILES."""
    return PROGRAMS * 3 // 2 if PROGRAMS < num_pairs <= 2 * PROGRAMS else PROGRAMS


def padded_queries(packed: int, dtype: torch.dtype, has_columns: bool) -> int:
    """Packed queries of a tile: as many as there are, or as tl.dot takes as columns or else as rows."""
    if has_columns and packed <= COLUMNS and dtype != torch.float32:
        return COLUMNS
    return max(16, triton.next_power_of_2(packed))


def tile_for(
    num_pairs: int, kv_cache: Tensor, dtype: torch.dtype, padded: int, room: int, *, by_lines: bool = False
) -> Tile:
    """The tile of so many pairs of a row and a KV head.

    padded: packed rows of queries, of `dtype`; room: bytes of shared memory for them and for tiles.
    """
    *_, block_size, head_dim = kv_cache.shape
    has_bytes = kv_cache.itemsize == 1
    if dtype == torch.float32:  # multiplies without tensor cores, and would run out of registers
        keys, warps, stages = 16, 4, 2
    elif padded == 32 and not has_bytes:
        keys, warps, stages = up_to(num_pairs, VERIFYING_TILES, VERIFYING_TILE_OF_MANY)
    elif padded > 16:
        keys, warps, stages = VERIFYING_TILE_OF_MANY
    elif padded == COLUMNS and has_bytes:
        keys, warps, stages = up_to(num_pairs, FP8_TILES, FP8_TILE_OF_MANY)
    elif by_lines:
        keys, warps, stages = LINES_TILE if head_dim > SMALL_HEAD else LINES_TILE_OF_SMALL
    elif padded == COLUMNS:
        keys, warps, stages = up_to(num_pairs, COLUMNS_TILES, COLUMNS_TILE_OF_MANY)
    elif has_bytes:
        keys, warps, stages = (128, 4, 3) if num_pairs <= PROGRAMS else (64, 4, 3)
    else:
        keys, warps, stages = up_to(num_pairs, TILES, TILE_OF_MANY)
    # A tile is part of a page, or it is some pages.
    if (divisor := block_size & -block_size) != block_size:
        keys = min(keys, divisor)
    dim = triton.next_power_of_2(head_dim)
    key_bytes, query_bytes = 2 * dim * kv_cache.itemsize, padded * dim * dtype.itemsize
    while keys > 16 and keys * key_bytes + query_bytes > room:
        keys //= 2
    return Tile(keys, warps, max(1, min(stages, 1 + (room - query_bytes) // (keys * key_bytes))))


def merged_for(packed: int, head_dim: int, *, by_lines: bool) -> int:
    """Chunks whose partial results a program looks at together."""
    merged = merged_at_once(packed, head_dim)
    return min(merged, MERGED_OF_SMALL) if by_lines and head_dim <= SMALL_HEAD else merged


def takes_columns(q: Tensor, kv_cache: Tensor, rows: PagedRows) -> bool:
    """Whether `attend_columns` can attend with these rows, without soft caps."""
    *_, num_kv_heads, _, head_dim = kv_cache.shape
    has_columns = rows.max_query == 1 and rows.tree is None and q.shape[1] // num_kv_heads <= COLUMNS
    is_tile = head_dim >= MIN_HEAD_DIM and head_dim & (head_dim - 1) == 0
    return has_columns and is_tile and q.dtype == kv_cache.dtype and q.itemsize == 2


def takes_lines(q: Tensor, kv_cache: Tensor, rows: PagedRows) -> bool:
    """Whether it can with whole tiles by the TMA unit, without a window."""
    holds_tiles = kv_cache.shape[3] % LINES_TILE[0] == 0
    return holds_tiles and takes_columns(q, kv_cache, rows) and has_lines(q, kv_cache)


class Work(NamedTuple):
    """What programs do, and how it is divided among them."""

    by_lines: bool  # whole tiles are copied by the TMA unit
    padded: int  # packed queries of a tile
    tile: Tile
    pieces: Cut


def work_of(q: Tensor, kv_cache: Tensor, rows: PagedRows, *, sight: int | None, has_cap: bool) -> Work:
    """sight: keys that a query sees at most, of a window or a chunk; None: all.  has_cap: scores have one."""
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    packed, num_pairs = rows.max_query * q.shape[1] // num_kv_heads, rows.num_rows * num_kv_heads
    has_columns = not has_cap and takes_columns(q, kv_cache, rows)
    by_lines = sight is None and num_pairs >= MIN_PAIRS_BY_LINES
    by_lines = by_lines and has_columns and takes_lines(q, kv_cache, rows)
    are_worth_it = head_dim <= SMALL_HEAD and (num_pairs >= MIN_PAIRS_BY_COLUMNS or sight is not None)
    by_columns = by_lines or (has_columns and are_worth_it)
    padded = padded_queries(packed, q.dtype, is_fp8(kv_cache.dtype) or by_columns)
    tile = tile_for(num_pairs, kv_cache, q.dtype, padded, shared_memory(q.device), by_lines=by_lines)
    max_keys = rows.block_table.shape[1] * block_size
    if sight is not None:
        max_keys = min(max_keys, sight + rows.max_query - 1)
    return Work(by_lines, padded, tile, cut(num_pairs, max_keys, tile.keys))


def decode_attention(
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
    out: Tensor,
) -> Tensor:
    """Attend with q [T, N, H] over kv_cache [num_blocks, 2, K, block_size, H] into out [T, N, H], its result.

    Rows have at most rows.max_query <= 8 queries, causal among themselves.  window: keys a query sees, itself
    included.  chunk: or it sees its own of the chunks of so many.  sinks: [N], logits that take weight from a
    head's keys.  rows.tree: drafts that are a tree, not causal among themselves.  The cache holds keys /
    k_scale and values / v_scale, in FP8 or in q's dtype.  Reads no device value on the host.
    """
    check_operands(q, kv_cache, rows)
    assert 1 <= rows.max_query <= MAX_SHORT_QUERY, f"{rows.max_query} queries a row"
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    assert out.shape == q.shape and out.stride()[1:] == (head_dim, 1), (out.shape, out.stride())
    if rows.num_rows == 0:
        return out
    has_bytes = is_fp8(kv_cache.dtype)
    group_size = q.shape[1] // num_kv_heads
    packed = rows.max_query * group_size
    num_pairs = rows.num_rows * num_kv_heads
    by_lines, padded, tile, pieces = work_of(
        q, kv_cache, rows, sight=window or chunk, has_cap=softcap is not None
    )
    num_lines = num_pairs * pieces.num_chunks * packed if pieces.num_chunks > 1 else 0
    is_marked = pieces.direct == pieces.num_chunks > 1
    partial = partial_results(num_lines * (head_dim + 2), is_marked, q.device)
    decode_kernel[(num_pairs, pieces.direct)](
        q,
        kv_cache.view(torch.int16) if has_bytes else kv_cache,
        cache_lines(kv_cache, tile.keys) if by_lines else None,
        out,
        partial,
        partial[num_lines * head_dim :],
        arrivals(triton.next_power_of_2(num_pairs), q.device),
        rows.block_table,
        rows.seq_lens,
        rows.cu_seqlens_q,
        *tree_arguments(rows),
        sinks,
        scale * k_scale * LOG2_E,
        (softcap or 1.0) * LOG2_E,
        v_scale,
        rows.num_rows,
        pieces.whole,
        pieces.min_chunk.bit_length() - 1,
        pieces.num_chunks,
        pieces.direct,
        min(rows.num_rows * pieces.direct, max(1, seekers(num_pairs) // num_kv_heads)),
        rows.block_table.shape[1],
        q.stride(0),
        q.stride(1),
        out.stride(0),
        rows.block_table.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP_SIZE=group_size,
        HEAD_DIM=head_dim,
        DIM_PADDED=max(32 if has_bytes else 16, triton.next_power_of_2(head_dim)),  # tl.dot takes 16 or more
        PACKED=packed,
        REACH=reach_of(window, chunk),
        TILE=tile.keys,
        BLOCK_SIZE=block_size,
        M=padded,
        FP8=FP8_NAMES.get(kv_cache.dtype),
        COLUMNS=padded == COLUMNS,
        TREE=rows.tree is not None,
        CAPPED=softcap is not None,
        MERGED=(merged := merged_for(packed, head_dim, by_lines=by_lines)),
        COPIES=copies_for(merged * packed, tile.num_warps),
        MARKED=is_marked,
        ROWS=ROWS_AT_ONCE,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        CUT=pieces.num_chunks > 1,
        **dependent(),
    )
    return out


@triton.jit
def chunks_of(seq_len, num_query, whole, chunk_bits, num_chunks, REACH: tl.constexpr):
    """A row's (first key in sight, number of chunks, at least 1)."""
    first = seq_len * 0
    if REACH != 0:
        first = first_key(seq_len - num_query, REACH)
    in_sight = seq_len - first
    chunks = tl.minimum((in_sight + (1 << chunk_bits) - 1) >> chunk_bits, num_chunks)
    return first, tl.where(in_sight <= whole, 1, chunks)


@triton.jit
def look_up(
    row, chunk, block_table_ptr, block_table_stride, seq_lens_ptr, cu_seqlens_q_ptr,
    num_pages, whole, chunk_bits, num_chunks,
    REACH: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """A row's (tokens, first query, number of queries, pages of this chunk's first tile)."""
    seq_len = tl.load(seq_lens_ptr + row)
    first_token = tl.load(cu_seqlens_q_ptr + row)
    num_query = tl.load(cu_seqlens_q_ptr + row + 1) - first_token
    first, _ = chunks_of(seq_len, num_query, whole, chunk_bits, num_chunks, REACH)
    pages_ptr = block_table_ptr + row.to(tl.int64) * block_table_stride
    # Of a tile, which begins anywhere where rows do not see all.
    ANYWHERE: tl.constexpr = (TILE + BLOCK_SIZE - 2) // BLOCK_SIZE + 1
    PAGES: tl.constexpr = max(1, TILE // BLOCK_SIZE) if REACH == 0 else ANYWHERE
    pages = pages_of(pages_ptr, first + chunk * TILE, num_pages, BLOCK_SIZE, PAGES)
    return seq_len, first_token, num_query, pages


@triton.jit
def find_further(
    number,
    seq_lens_ptr,
    cu_seqlens_q_ptr,
    num_rows,
    whole,
    chunk_bits,
    num_chunks,
    direct,
    ROWS: tl.constexpr,
    REACH: tl.constexpr,
):
    """Of chunks beyond each row's first `direct`, row by row: (how many, the number-th's row, its chunk)."""
    total, row, passed = 0, 0, 0
    for start in tl.range(0, num_rows, ROWS, num_stages=1):
        rows = start + tl.arange(0, ROWS)
        inside = rows < num_rows
        seq_len = tl.load(seq_lens_ptr + rows, mask=inside, other=0)
        num_query = 1
        if REACH != 0:
            first_token = tl.load(cu_seqlens_q_ptr + rows, mask=inside, other=0)
            num_query = tl.load(cu_seqlens_q_ptr + rows + 1, mask=inside, other=0) - first_token
        _, chunks = chunks_of(seq_len, num_query, whole, chunk_bits, num_chunks, REACH)
        further = tl.maximum(tl.where(inside, chunks, 0) - direct, 0)
        before = inside & (total + tl.cumsum(further, 0) <= number)
        row += tl.sum(before.to(tl.int32), 0)
        passed += tl.sum(tl.where(before, further, 0), 0)
        total += tl.sum(further, 0)
    return total, row, direct + number - passed


# Numbers that change with the rows are not specialized on: one variant serves all.
COUNTS = ["num_rows", "whole", "chunk_bits", "num_chunks", "direct", "seekers", "num_pages"]


@triton.jit(do_not_specialize=COUNTS)
def decode_kernel(
    q_ptr,
    cache_ptr,  # of FP8: pairs of values as int16
    lines,  # a descriptor of the cache as lines [TILE, H], for rows of one query; or None
    out_ptr,
    partial_ptr,  # [B, K, S, PACKED, H]
    statistics_ptr,  # [B, K, S, PACKED, 2]: maximum, total
    arrivals_ptr,  # [B, K]
    block_table_ptr,
    seq_lens_ptr,
    cu_seqlens_q_ptr,
    positions_ptr,
    ancestors_ptr,
    first_drafts_ptr,
    sinks_ptr,  # [N], or None
    scale,  # to base 2
    cap,  # of scores, to base 2
    v_scale,
    num_rows,
    whole,  # keys up to which a row stays whole
    chunk_bits,  # fewest keys of a chunk, as a power of two
    num_chunks,  # most chunks of a row
    direct,  # chunks of every row that have programs
    seekers,  # of a KV head's programs, those that look for further chunks
    num_pages,  # that a row of the block table has room for
    q_token_stride,
    q_head_stride,
    out_token_stride,
    block_table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    PACKED: tl.constexpr,
    REACH: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    M: tl.constexpr,
    FP8: tl.constexpr,  # the type that is read in pairs, or None
    COLUMNS: tl.constexpr,  # for queries
    TREE: tl.constexpr,
    CAPPED: tl.constexpr,
    MERGED: tl.constexpr,
    COPIES: tl.constexpr,
    MARKED: tl.constexpr,
    ROWS: tl.constexpr,
    CUT: tl.constexpr,  # whether rows may have several chunks
    DEPENDENT: tl.constexpr,
):
    """Attend over chunks: the first `direct` of each row have programs, which then take further ones."""
    let_next_start(DEPENDENT)
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    packed = tl.arange(0, M)
    query, head = packed // GROUP_SIZE, kv_head * GROUP_SIZE + packed % GROUP_SIZE
    dim = tl.arange(0, DIM_PADDED)
    row, chunk = tl.program_id(0) // NUM_KV_HEADS, tl.program_id(1)  # which start in order of chunks
    number = chunk * num_rows + row
    seeks = CUT & (direct < num_chunks) & (number < seekers)
    is_there = number >= 0
    number = seekers - 1 - number  # long rows mostly come first, and have enough to do themselves
    wait(DEPENDENT)
    # Looked up here, so that what is the same for all chunks is computed behind these loads, not before.
    seq_len, first_token, num_query, pages = look_up(
        row, chunk, block_table_ptr, block_table_stride, seq_lens_ptr, cu_seqlens_q_ptr,
        num_pages, whole, chunk_bits, num_chunks, REACH, TILE, BLOCK_SIZE,
    )  # fmt: skip
    while is_there:
        pages_ptr = block_table_ptr + row.to(tl.int64) * block_table_stride
        first, chunks = chunks_of(seq_len, num_query, whole, chunk_bits, num_chunks, REACH)
        if (chunk < chunks) & (num_query > 0):
            token = first_token.to(tl.int64) + query
            asked = query < num_query
            inside = asked[:, None] & (dim < HEAD_DIM)[None, :]
            position, ancestors, first_draft = sight_of(
                row, token, asked, seq_len - num_query + query, seq_len,
                positions_ptr, ancestors_ptr, first_drafts_ptr, TREE,
            )  # fmt: skip
            q_at = q_ptr + token * q_token_stride + head * q_head_stride
            if lines is not None or (COLUMNS and FP8 is None):
                accumulator, maximum, weight = attend_columns(
                    q_at, asked, pages, pages_ptr, num_pages, lines, cache_ptr, kv_head,
                    chunk if REACH == 0 else first + chunk * TILE, chunks,
                    seq_len, scale, NUM_KV_HEADS, HEAD_DIM, TILE, BLOCK_SIZE, REACH, M,
                )  # fmt: skip
            elif COLUMNS:
                accumulator, maximum, weight = attend_fp8_columns(
                    q_at, asked, pages, pages_ptr, num_pages, cache_ptr, kv_head,
                    first + chunk * TILE, chunks, seq_len, position, ancestors, first_draft, scale, cap,
                    NUM_KV_HEADS, HEAD_DIM, DIM_PADDED, REACH, TILE, BLOCK_SIZE, M, FP8, TREE, CAPPED,
                )  # fmt: skip
            else:
                accumulator, maximum, weight = attend_tiles(
                    q_at, asked, pages, pages_ptr, num_pages, cache_ptr, kv_head,
                    first + chunk * TILE, chunks, seq_len, position, ancestors, first_draft, scale, cap,
                    NUM_KV_HEADS, HEAD_DIM, DIM_PADDED, REACH, TILE, BLOCK_SIZE, M, FP8, TREE, CAPPED,
                )  # fmt: skip
            out_at = token * out_token_stride + head * HEAD_DIM
            if not CUT or chunks == 1:
                if sinks_ptr is not None:
                    weight += sink_weight(sinks_ptr, head, asked, maximum)
                result = accumulator * (v_scale / tl.where(weight > 0, weight, 1.0))[:, None]
                tl.store(
                    out_ptr + out_at[:, None] + dim[None, :], result.to(out_ptr.dtype.element_ty), mask=inside
                )
            else:
                pair = row.to(tl.int64) * NUM_KV_HEADS + kv_head
                hand_in(
                    accumulator, maximum, weight, out_ptr + first_token.to(tl.int64) * out_token_stride,
                    partial_ptr, statistics_ptr, arrivals_ptr, pair, chunk, kv_head,
                    num_query, chunks, num_chunks, v_scale, out_token_stride,
                    GROUP_SIZE, HEAD_DIM, DIM_PADDED, PACKED, M, MERGED, COPIES, MARKED, sinks_ptr,
                )  # fmt: skip
        is_there = seeks
        if CUT:  # noqa: SIM102, for only what is constant alone leaves code out
            if seeks:  # last, when memory is busy with what other programs have asked for
                num_further, row, chunk = find_further(
                    number, seq_lens_ptr, cu_seqlens_q_ptr,
                    num_rows, whole, chunk_bits, num_chunks, direct, ROWS, REACH,
                )  # fmt: skip
                is_there = number < num_further
                number += seekers
                row = tl.minimum(row, num_rows - 1)
                seq_len, first_token, num_query, pages = look_up(
                    row, chunk, block_table_ptr, block_table_stride, seq_lens_ptr, cu_seqlens_q_ptr,
                    num_pages, whole, chunk_bits, num_chunks, REACH, TILE, BLOCK_SIZE,
                )  # fmt: skip
