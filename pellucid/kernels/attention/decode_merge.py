# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false
"""What becomes of a row's chunks in `decode_attention`: each is handed in, and one program merges them.

While each chunk of every row has a program, that of the row's last one merges: it waits until no number is
missing, as the numbers' bits say, without a fence or an atomic.  Programs start in order, so those it waits
for have started.  Otherwise whichever program is last to hand in a chunk of the row merges.

To look at numbers and to use them must be one load.  Of fewer numbers than threads the compiler has threads
load copies, and for another layout it loads anew, volatile or not; what is true of one copy need not be of
another.  So the merge loads each number as often as it takes for every thread to have one of its own.

The reference is the whole kernel's, `decode_attention_ref`.

Legend: M packed queries of a row (query m // G with head m % G of the KV head's G), H head dim.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

TO_BASE_2 = tl.constexpr(1.4426950408889634)
MAX_CHUNKS = 32  # merged at once
MAX_NUMBERS = 4096  # of partial results, at once


def merged_at_once(packed: int, head_dim: int) -> int:
    """Chunks whose partial results a program looks at together."""
    numbers = triton.next_power_of_2(packed) * triton.next_power_of_2(head_dim)
    return min(MAX_CHUNKS, max(1, MAX_NUMBERS // numbers))


def copies_for(num_lines: int, num_warps: int) -> int:
    """How often so many numbers are loaded, such that each thread has some of its own: up to four."""
    return max(1, 4 * 32 * num_warps // triton.next_power_of_2(num_lines))


@cache
def arrivals(num_pairs: int, device: torch.device) -> Tensor:
    """Zeros in which the chunks of each pair are counted; zeros again when a launch is done.

    One for all launches, so two on different streams of a process must not overlap.
    """
    return torch.zeros(num_pairs, dtype=torch.int32, device=device)


def partial_results(num_numbers: int, is_marked: bool, device: torch.device) -> Tensor:
    """Room for float32 numbers, marked as missing or not."""
    if is_marked:
        return missing_numbers(triton.next_power_of_2(num_numbers), device)
    return torch.empty(num_numbers, dtype=torch.float32, device=device)


@cache
def missing_numbers(num: int, device: torch.device) -> Tensor:
    """Numbers that have not been written yet; again when a launch is done.

    Their bits are those of a NaN that no arithmetic yields.  One for all launches, as `arrivals` is.
    """
    return torch.full((num,), -1, dtype=torch.int32, device=device).view(torch.float32)


@triton.jit
def sink_weight(sinks_ptr, head, asked, maximum):
    """The weight of each head's sink beside keys whose largest score, in base 2, is `maximum`."""
    sink = tl.load(sinks_ptr + head, mask=asked, other=0.0).to(tl.float32)
    return tl.exp2(tl.minimum(sink * TO_BASE_2 - maximum, 120.0))  # beside it, keys have none


@triton.jit
def hand_in(
    accumulator, maximum, weight,  # [M, H], [M], [M] of this chunk, as `attend_tiles` returns them
    out_ptr,  # of the row's first query
    partial_ptr, statistics_ptr, arrivals_ptr, pair, chunk, kv_head,
    num_query, chunks, num_chunks, v_scale, out_token_stride,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PADDED: tl.constexpr, PACKED: tl.constexpr,
    M: tl.constexpr, MERGED: tl.constexpr, COPIES: tl.constexpr, MARKED: tl.constexpr, sinks_ptr=None,
):  # fmt: skip
    """Write down what came of a chunk; where it is for this program to do so, merge the row's."""
    packed = tl.arange(0, M)
    asked = packed // GROUP_SIZE < num_query
    dim = tl.arange(0, DIM_PADDED)
    inside = asked[:, None] & (dim < HEAD_DIM)[None, :]
    line = (pair * num_chunks + chunk) * PACKED + packed
    tl.store(partial_ptr + line[:, None] * HEAD_DIM + dim[None, :], accumulator, mask=inside)
    tl.store(statistics_ptr + line * 2, maximum, mask=asked)
    tl.store(statistics_ptr + line * 2 + 1, weight, mask=asked)
    if MARKED:  # programs of the row's other chunks have started before this one
        merges = chunk == chunks - 1
    else:
        # All of this program's threads have stored before one of them reports.
        tl.debug_barrier()
        merges = tl.atomic_add(arrivals_ptr + pair, 1, sem="acq_rel") == chunks - 1
    if merges:
        if not MARKED:
            tl.store(arrivals_ptr + pair, 0)
        first_line = pair * num_chunks * PACKED
        merge_chunks(
            out_ptr, partial_ptr + first_line * HEAD_DIM, statistics_ptr + first_line * 2,
            kv_head, num_query, chunks, v_scale, out_token_stride,
            GROUP_SIZE, HEAD_DIM, DIM_PADDED, PACKED, MERGED, COPIES, MARKED, sinks_ptr,
        )  # fmt: skip


@triton.jit
def merge_chunks(
    out_ptr,  # of the row's first query
    partial_ptr,  # of the first chunk
    statistics_ptr,
    kv_head,
    num_query,
    chunks,
    v_scale,
    out_token_stride,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    PACKED: tl.constexpr,
    MERGED: tl.constexpr,
    COPIES: tl.constexpr,
    MARKED: tl.constexpr,
    sinks_ptr=None,
):
    """The weighted mean of a row's chunks, for all queries and heads, MERGED chunks at once."""
    PADDED: tl.constexpr = triton.next_power_of_2(PACKED)
    packed = tl.arange(0, PADDED)
    query, head = packed // GROUP_SIZE, kv_head * GROUP_SIZE + packed % GROUP_SIZE
    asked = query < num_query
    dim = tl.arange(0, DIM_PADDED)
    maximum = tl.full([PADDED], -1.0e30, dtype=tl.float32)
    total = tl.zeros([PADDED], dtype=tl.float32)
    accumulator = tl.zeros([PADDED, DIM_PADDED], dtype=tl.float32)
    missing = tl.full([], -1, dtype=tl.int32).to(tl.float32, bitcast=True)
    for start in tl.range(0, chunks, MERGED, num_stages=1):
        chunk = start + tl.arange(0, MERGED)
        line = chunk[:, None] * PACKED + packed[None, :]
        present = (chunk < chunks)[:, None] & asked[None, :]
        stats_at = statistics_ptr + line[:, :, None] * 2 + tl.zeros([1, 1, COPIES], tl.int32)
        inside = present[:, :, None] & (dim < HEAD_DIM)[None, None, :]
        at = partial_ptr + line[:, :, None] * HEAD_DIM + dim[None, None, :]
        maxima, totals, parts = load_parts(stats_at, at, present, inside)
        if MARKED:
            while is_missing(maxima, totals, parts):
                maxima, totals, parts = load_parts(stats_at, at, present, inside)
            tl.debug_barrier()
            tl.store(statistics_ptr + line * 2, missing, mask=present)
            tl.store(statistics_ptr + line * 2 + 1, missing, mask=present)
            tl.store(at, missing, mask=inside)
        maxima, totals = tl.max(maxima, 2), tl.max(totals, 2)
        new_maximum = tl.maximum(maximum, tl.max(maxima, 0))
        weight = tl.exp2(maxima - new_maximum[None, :])
        shrink = tl.exp2(maximum - new_maximum)
        total = total * shrink + tl.sum(totals * weight, 0)
        accumulator = accumulator * shrink[:, None] + tl.sum(parts * weight[:, :, None], 0)
        maximum = new_maximum
    if sinks_ptr is not None:
        total += sink_weight(sinks_ptr, head, asked, maximum)
    result = accumulator * (v_scale / tl.where(total > 0, total, 1.0))[:, None]
    out_at = query * out_token_stride + head * HEAD_DIM
    inside = asked[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(out_ptr + out_at[:, None] + dim[None, :], result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def load_parts(statistics_at, partial_at, present, inside):
    """What other programs have written: not to be found in this one's cache."""
    maxima = tl.load(statistics_at, mask=present[:, :, None], other=-1.0e30, volatile=True)
    totals = tl.load(statistics_at + 1, mask=present[:, :, None], other=0.0, volatile=True)
    return maxima, totals, tl.load(partial_at, mask=inside, other=0.0, volatile=True)


@triton.jit
def is_missing(maxima, totals, parts):
    """Whether a number has not been written yet."""
    missing = (maxima.to(tl.int32, bitcast=True) == -1) | (totals.to(tl.int32, bitcast=True) == -1)
    missing = tl.max(missing.to(tl.int32), 2, keep_dims=True)
    return tl.max(missing | (parts.to(tl.int32, bitcast=True) == -1).to(tl.int32)) > 0
