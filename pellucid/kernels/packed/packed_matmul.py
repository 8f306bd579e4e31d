# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false
"""y = x W^T with a packed W, on any GPU: codes become numbers in registers, and tensor cores do the rest.

`packed_matmul` is for few rows, where time is what it takes to read W once; inputs are split among programs
where outputs are too few for all multiprocessors, and the last one of them adds up, in a fixed order.  For
many rows `dequantize` writes W's numbers to memory, and a dense product follows: of 2,000 rows that is a
few percent more.  Numbers are rounded once, to the type of x, as a tool would that makes plain weights of the
codes.  Sums are float32, and how a row is summed up depends on the tile alone.

Legend: M rows, N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pellucid.kernels.lang.dependent import dependent, let_next_start, wait
from pellucid.kernels.lang.language import tl, triton
from pellucid.kernels.packed.packed_weight import PackedWeight, numbers_of

TILE = tl.constexpr(64)
WORDS = tl.constexpr(512)  # int32 of 64 x 64 codes of 4 bits; twice as many of 8
MAX_ROWS = 64
PROGRAMS = 528  # that keep a large GPU's memory busy


def packed_matmul(
    x: Tensor,
    weight: PackedWeight,
    *,
    bias: Tensor | None = None,
    arrivals: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    """x [M, K] W^T plus bias [N] -> [M, N], for up to MAX_ROWS rows.

    arrivals: a zero for each 64 outputs, needed where the inputs are split, and zeros again afterwards; two
    products on them must not overlap.  splits: None is as many as `splits_for` says.
    """
    num_rows, num_tiles = len(x), weight.words.shape[0]
    assert 1 <= num_rows <= MAX_ROWS and x.shape[1] == weight.num_in and x.stride(1) == 1, x.shape
    assert x.dtype == weight.dtype and not weight.gated, (x.dtype, weight.dtype)
    splits = splits_for(weight) if splits is None else splits
    rows = max(16, triton.next_power_of_2(num_rows))
    out = torch.empty(num_rows, weight.num_out, dtype=x.dtype, device=x.device)
    partial = None
    if splits > 1:
        assert arrivals is not None and len(arrivals) >= num_tiles, "arrivals: one for each 64 outputs"
        partial = torch.empty(num_tiles, splits, TILE.value, rows, dtype=torch.float32, device=x.device)
    packed_matmul_kernel[(num_tiles, splits)](
        x,
        weight.words,
        weight.scale,
        weight.zero,
        weight.offset,
        weight.table,
        bias,
        out,
        partial,
        arrivals if splits > 1 else None,
        num_rows,
        weight.num_out,
        weight.num_in,
        x.stride(0),
        NUMBERS=int(weight.numbers),
        MIDDLE=weight.middle,
        BITS=weight.bits,
        GROUP=weight.group,
        GROUPS=weight.scale.shape[1],
        ROWS=rows,
        num_warps=4,
        num_stages=4 if weight.bits == 4 else 3,
        **dependent(),
    )
    return out


def splits_for(weight: PackedWeight) -> int:
    """Among how many programs the inputs of a tile are divided: each has at least eight tiles."""
    num_tiles, num_steps = weight.words.shape[:2]
    return max(1, min(-(-PROGRAMS // num_tiles), num_steps // 8, 16))


def packed_matmul_ref(x: Tensor, weight: PackedWeight, *, bias: Tensor | None = None) -> Tensor:
    """The same in float64, as float32."""
    y = x.double() @ numbers_of(weight).double().T
    return (y if bias is None else y + bias.double()).float()


def dequantize(weight: PackedWeight, first: int = 0, last: int | None = None) -> Tensor:
    """Outputs first .. last of W, [last - first, K].  first: a multiple of 64."""
    last = weight.num_out if last is None else last
    out = torch.empty(last - first, weight.num_in, dtype=weight.dtype, device=weight.device)
    assert first % TILE.value == 0, first
    assert not weight.gated or last - first == weight.num_out, "gates and what they open lie apart"
    num_steps = weight.words.shape[1]
    dequantize_kernel[(triton.cdiv(last - first, TILE.value), num_steps)](
        weight.words,
        weight.scale,
        weight.zero,
        weight.offset,
        weight.table,
        out,
        first // TILE.value,
        last - first,
        K=weight.num_in,
        NUMBERS=int(weight.numbers),
        MIDDLE=weight.middle,
        BITS=weight.bits,
        GROUP=weight.group,
        GROUPS=weight.scale.shape[1],
        GATED=weight.gated,
        num_warps=4,
        **dependent(),
    )
    return out


@triton.jit
def codes_of(words_ptr, tile, BITS: tl.constexpr):
    """The codes of a tile, int32 [64, 64]; packed_weight.py says how they lie."""
    words_ptr += tile * (WORDS * BITS // 4)
    if BITS == 4:
        word = tl.load(words_ptr + tl.arange(0, WORDS))
        low = tl.join(tl.join(word, word >> 16), tl.join(word >> 4, word >> 20))  # .., a, b
        high = tl.join(tl.join(word >> 8, word >> 24), tl.join(word >> 12, word >> 28))
        codes = tl.join(low, high) & 15
        codes = tl.reshape(codes, (4, 8, 4, 4, 2, 2, 2))  # warp, lane, thread, step, a, b, c
        return tl.reshape(tl.permute(codes, (0, 5, 1, 3, 6, 2, 4)), (TILE, TILE))
    else:
        word = tl.load(words_ptr + tl.arange(0, 2 * WORDS))
        codes = tl.join(tl.join(word, word >> 8), tl.join(word >> 16, word >> 24)) & 255
        codes = tl.reshape(codes, (2, 4, 8, 4, 2, 2, 2, 2))  # half, warp, lane, thread, step, c, a, b
        return tl.reshape(tl.permute(codes, (1, 7, 2, 0, 4, 5, 3, 6)), (TILE, TILE))


@triton.jit
def half_of(bits):
    """A float16's bits as float32."""
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def values_of(codes, table_ptr, NUMBERS: tl.constexpr, MIDDLE: tl.constexpr):
    """What codes stand for, float32; see `Numbers`.

    The bits of E2M1 are those of a float16 whose exponent is smaller by 14, those of E4M3 by 8.
    """
    if NUMBERS == 0:
        return (codes - MIDDLE).to(tl.float32)
    elif NUMBERS == 1:
        return half_of((codes & 8) << 12 | (codes & 7) << 9) * 16384.0
    elif NUMBERS == 2:
        return tl.load(table_ptr + codes).to(tl.float32)
    elif NUMBERS == 3:
        return half_of((codes & 0x80) << 8 | (codes & 0x7F) << 7) * 256.0
    else:
        return half_of(codes << 8)


@triton.jit
def spread(ptr, block, step, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """A number for each output and group as one for each of a tile's weights, float32 [64, 1 or 64]."""
    row = tl.arange(0, TILE)
    lane = row // 16 * 16 + row % 8 * 2 + row // 8 % 2
    ptr += block * (GROUPS * TILE)
    if GROUP >= TILE:
        return tl.load(ptr + step * TILE // GROUP * TILE + lane)[:, None].to(tl.float32)
    else:
        NUM: tl.constexpr = TILE // GROUP
        group = step * NUM + tl.arange(0, NUM)
        values = tl.load(ptr + group[None, :] * TILE + lane[:, None]).to(tl.float32)
        return tl.reshape(tl.broadcast_to(values[:, :, None], (TILE, NUM, GROUP)), (TILE, TILE))


@triton.jit
def tile_of(
    words_ptr, scale_ptr, zero_ptr, offset_ptr, table_ptr, block, step, num_steps,
    NUMBERS: tl.constexpr, MIDDLE: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """The numbers of a tile of W, [64, 64], rounded once to the type of the scales."""
    numbers = values_of(codes_of(words_ptr, block * num_steps + step, BITS), table_ptr, NUMBERS, MIDDLE)
    if zero_ptr is not None:
        numbers -= spread(zero_ptr, block, step, GROUP, GROUPS)
    numbers *= spread(scale_ptr, block, step, GROUP, GROUPS)
    if offset_ptr is not None:
        numbers -= spread(offset_ptr, block, step, GROUP, GROUPS)
    return numbers.to(scale_ptr.dtype.element_ty)


@triton.jit(do_not_specialize=["num_rows"])
def packed_matmul_kernel(
    x_ptr,
    words_ptr,
    scale_ptr,
    zero_ptr,
    offset_ptr,
    table_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,  # [tiles, splits, 64, ROWS]
    arrivals_ptr,  # [tiles]
    num_rows,
    num_out,
    num_in,
    x_stride,
    NUMBERS: tl.constexpr,
    MIDDLE: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program 64 outputs and a range of inputs; the last one of a tile adds the ranges up."""
    let_next_start(DEPENDENT)
    block, split, num_splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row, k = tl.arange(0, ROWS), tl.arange(0, TILE)
    num_steps = tl.cdiv(num_in, TILE)
    first, last = num_steps * split // num_splits, num_steps * (split + 1) // num_splits
    wait(DEPENDENT)
    # W stands on the left: its rows are many enough for the tensor cores' tile, those of x are not.
    x_at = x_ptr + row[None, :] * x_stride + k[:, None]
    y = tl.zeros((TILE, ROWS), tl.float32)
    for step in range(first, last):
        w = tile_of(
            words_ptr, scale_ptr, zero_ptr, offset_ptr, table_ptr, block, step, num_steps,
            NUMBERS, MIDDLE, BITS, GROUP, GROUPS,
        )  # fmt: skip
        inside = (row < num_rows)[None, :] & (k + step * TILE < num_in)[:, None]
        x = tl.load(x_at + step * TILE, mask=inside, other=0.0)
        y = tl.dot(w, x, y, input_precision="ieee")

    if partial_ptr is not None:
        at = tl.arange(0, TILE)[:, None] * ROWS + row[None, :]
        partials = partial_ptr + block * num_splits * TILE * ROWS + at
        tl.store(partials + split * TILE * ROWS, y)
        # All of this program's threads have stored before one of them reports.
        tl.debug_barrier()
        if tl.atomic_add(arrivals_ptr + block, 1, sem="acq_rel") < num_splits - 1:
            return
        tl.store(arrivals_ptr + block, 0)
        y = tl.zeros((TILE, ROWS), tl.float32)
        for i in range(num_splits):
            y += tl.load(partials + i * TILE * ROWS, cache_modifier=".cg")
    column = block * TILE + tl.arange(0, TILE)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + column, mask=column < num_out, other=0.0).to(tl.float32)[:, None]
    inside = (row < num_rows)[None, :] & (column < num_out)[:, None]
    at = out_ptr + row[None, :].to(tl.int64) * num_out + column[:, None]
    tl.store(at, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def dequantize_kernel(
    words_ptr,
    scale_ptr,
    zero_ptr,
    offset_ptr,
    table_ptr,
    out_ptr,
    first_block,
    num_rows,
    K: tl.constexpr,
    NUMBERS: tl.constexpr,
    MIDDLE: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    GATED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a tile."""
    let_next_start(DEPENDENT)
    block, step = tl.program_id(0).to(tl.int64), tl.program_id(1)
    w = tile_of(
        words_ptr, scale_ptr, zero_ptr, offset_ptr, table_ptr, first_block + block, step, tl.num_programs(1),
        NUMBERS, MIDDLE, BITS, GROUP, GROUPS,
    )  # fmt: skip
    wait(DEPENDENT)
    row, k = block * TILE + tl.arange(0, TILE), step * TILE + tl.arange(0, TILE)
    if GATED:  # by turns, as packed_weight.by_turns has them
        line = tl.arange(0, TILE)
        row = block * (TILE // 2) + line // 16 * 8 + line % 8 + line // 8 % 2 * (num_rows // 2)
    inside = (row < num_rows)[:, None] & (k < K)[None, :]
    tl.store(out_ptr + row[:, None] * K + k[None, :], w, mask=inside)
