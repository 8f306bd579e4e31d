# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false
"""y = x W^T in FP8 (E4M3) for few rows, where time is what it takes to stream W once.

Each row of x and each output has a scale.  Up to 4 rows have a GEMV that holds its outputs' whole weights in
registers and asks for them before it waits for the kernel ahead; it can also round x itself, as quantize_fp8
does.  More rows have tensor cores, for which outputs are the rows of a tile, since those of x are too few.
How a row is summed up depends on the tile alone.  Products of FP8 numbers are exact; sums are float32, those
of up to BLOCK_K products on tensor cores only about 14 bits.

Legend: M rows, N outputs, K inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pellucid.kernels.dependent import dependent, let_next_start, wait
from pellucid.kernels.language import tl, triton
from pellucid.kernels.quantize_fp8 import FP8, Rounded, fp8_scale, inverse_of, to_fp8
from pellucid.kernels.tiles import MAX_GEMV_ROWS, MAX_ROWS, Gemv, SplitK

EARLY_BYTES = 16 << 20  # of weights that are asked for before the kernel ahead has ended: they wait in the L2


def fp8_matmul(
    x: Rounded | Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    tile: Gemv | SplitK,
    *,
    bias: Tensor | None = None,
    arrivals: Tensor | None = None,
    early: int = EARLY_BYTES,
) -> Tensor:
    """x [M, K] W[N, K]^T, times the scales of both, plus bias [N]: [M, N] in the dtype that x had.

    weight_scale: float32 [N, 1].  Up to 4 rows, rounded or not, with a Gemv; up to 256, rounded, with a
    SplitK.  arrivals: at least ceil(N / block_n) int32 zeros, needed where the inputs are split, and zeros
    again afterwards; two products on them must not overlap.
    """
    rows, scales = (x.values, x.scales) if isinstance(x, Rounded) else (x, None)
    (num_rows, num_in), num_out = rows.shape, weight.shape[0]
    most = MAX_GEMV_ROWS if isinstance(tile, Gemv) else MAX_ROWS
    assert 1 <= num_rows <= most, f"{num_rows} rows, {tile} takes 1 to {most}"
    assert weight.shape == (num_out, num_in) and weight_scale.shape == (num_out, 1), weight_scale.shape
    assert rows.stride(1) == 1 and weight.is_contiguous() and weight.dtype == FP8
    out = torch.empty((num_rows, num_out), dtype=x.dtype, device=weight.device)
    operands = (rows, scales, weight, weight_scale, bias, out)
    grid_n = triton.cdiv(num_out, tile.block_n)
    if isinstance(tile, Gemv):
        fp8_gemv_kernel[(grid_n,)](
            *operands,
            num_rows,
            num_out,
            rows.stride(0),
            K=num_in,
            ROWS=triton.next_power_of_2(num_rows),
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            num_warps=tile.num_warps,
            **dependent(),
        )
        return out
    assert scales is not None, "a SplitK multiplies rounded rows"
    padded = max(8, triton.next_power_of_2(num_rows))
    partial = None
    if tile.splits > 1:
        assert arrivals is not None and len(arrivals) >= grid_n, "arrivals: one for each block of outputs"
        partial = torch.empty(
            (grid_n, tile.splits, tile.block_n, padded), dtype=torch.float32, device=weight.device
        )
    num_programs = grid_n * tile.splits
    fp8_split_k_kernel[(grid_n, tile.splits)](
        *operands,
        partial,
        arrivals,
        num_rows,
        num_out,
        num_in,
        rows.stride(0),
        early // (num_programs * tile.block_n * tile.block_k),
        ROWS=padded,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        IS_EVEN=num_in % tile.block_k == 0,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **dependent(),
    )
    return out


def fp8_matmul_ref(
    x: Rounded, weight: Tensor, weight_scale: Tensor, *, bias: Tensor | None = None
) -> Tensor:
    """The same in float64, as float32."""
    y = x.values.double() @ weight.double().T * x.scales * weight_scale.view(1, -1)
    return (y if bias is None else y + bias).float()


@triton.jit(do_not_specialize=["num_rows"])
def fp8_gemv_kernel(
    x_ptr,
    x_scale_ptr,  # None: x is not rounded yet
    weight_ptr,
    weight_scale_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_out,
    x_stride,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a block of outputs."""
    PARTS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    let_next_start(DEPENDENT)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    here = tl.minimum(n, num_out - 1)  # past the last output it is the last one, not to be stored
    w_at = weight_ptr + here.to(tl.int64)[:, None] * K + lane[None, :]
    weights = ()
    for i in tl.static_range(PARTS):
        weights = weights + (load_part(w_at, i * BLOCK_K, (i * BLOCK_K + lane)[None, :], K, BLOCK_K),)
    scale = tl.load(weight_scale_ptr + here)
    wait(DEPENDENT)
    for m in tl.static_range(ROWS):
        row = tl.minimum(m, num_rows - 1)
        x_at = x_ptr + row * x_stride + lane
        parts = ()
        for i in tl.static_range(PARTS):
            parts = parts + (load_part(x_at, i * BLOCK_K, i * BLOCK_K + lane, K, BLOCK_K),)
        if x_scale_ptr is None:
            largest = tl.zeros((BLOCK_K,), tl.float32)
            for i in tl.static_range(PARTS):
                largest = tl.maximum(largest, tl.abs(parts[i].to(tl.float32)))
            x_scale = fp8_scale(tl.max(largest, 0))
            inverse = inverse_of(x_scale)
            rounded = ()
            for i in tl.static_range(PARTS):
                rounded = rounded + (to_fp8(parts[i].to(tl.float32), inverse, weight_ptr.dtype.element_ty),)
            parts = rounded
        else:
            x_scale = tl.load(x_scale_ptr + row)
        sums = tl.zeros((BLOCK_N, BLOCK_K // 16), tl.float32)
        for i in tl.static_range(PARTS):
            products = parts[i].to(tl.float32)[None, :] * weights[i].to(tl.float32)
            sums += tl.sum(tl.reshape(products, (BLOCK_N, BLOCK_K // 16, 16)), 2)
        y = tl.sum(sums, 1) * x_scale * scale
        if bias_ptr is not None:
            y += tl.load(bias_ptr + here).to(tl.float32)
        inside = (n < num_out) & (tl.full((BLOCK_N,), m, tl.int32) < num_rows)
        tl.store(out_ptr + m * num_out + n, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def load_part(at, start, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """What is `start` elements behind `at`; inputs k past the last one are zeros."""
    if K % BLOCK_K == 0:
        part = tl.load(at + start)
    else:
        part = tl.load(at + start, mask=k < K, other=0.0)
    return part


@triton.jit(do_not_specialize=["num_rows", "num_early"])
def fp8_split_k_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    weight_scale_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,  # [blocks of N, splits, BLOCK_N, ROWS]
    arrivals_ptr,  # [blocks of N]
    num_rows,
    num_out,
    num_in,
    x_stride,
    num_early,  # tiles of a program's weights that are asked for before the kernel ahead has ended
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_EVEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a block of outputs and a range of inputs; the last one of a block adds the ranges up."""
    let_next_start(DEPENDENT)
    block, split, num_splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    column, row = tl.arange(0, BLOCK_N), tl.arange(0, ROWS)
    n = block * BLOCK_N + column
    k = tl.arange(0, BLOCK_K)
    length = tl.cdiv(tl.cdiv(num_in, BLOCK_K), num_splits) * BLOCK_K
    begin = split * length
    end = tl.minimum(begin + length, num_in)
    # Past the last output or row it is the last one, not to be stored.
    w_at = weight_ptr + tl.minimum(n, num_out - 1).to(tl.int64)[:, None] * num_in + k[None, :]
    x_at = x_ptr + tl.minimum(row, num_rows - 1)[None, :] * x_stride + k[:, None]
    if DEPENDENT:
        prefetch(weight_ptr, n, num_out, num_in, begin, tl.minimum(end, begin + num_early * BLOCK_K), BLOCK_K)
    wait(DEPENDENT)
    y = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for start in range(begin, end, BLOCK_K):
        if IS_EVEN:
            w, x = tl.load(w_at + start), tl.load(x_at + start)
        else:
            w = tl.load(w_at + start, mask=(start + k < num_in)[None, :], other=0.0)
            x = tl.load(x_at + start, mask=(start + k < num_in)[:, None], other=0.0)
        y = tl.dot(w, x, y, max_num_imprecise_acc=BLOCK_K)

    if partial_ptr is not None:
        partials = partial_ptr + block * num_splits * ROWS * BLOCK_N + column[:, None] * ROWS + row[None, :]
        tl.store(partials + split * ROWS * BLOCK_N, y)
        # All of this program's threads have stored before one of them reports.
        tl.debug_barrier()
        if tl.atomic_add(arrivals_ptr + block, 1, sem="acq_rel") < num_splits - 1:
            return
        tl.store(arrivals_ptr + block, 0)
        y = tl.zeros((BLOCK_N, ROWS), tl.float32)
        for i in range(num_splits):
            y += tl.load(partials + i * ROWS * BLOCK_N, cache_modifier=".cg")
    y *= tl.load(weight_scale_ptr + n, mask=n < num_out, other=0.0)[:, None]
    y *= tl.load(x_scale_ptr + row, mask=row < num_rows, other=0.0)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n, mask=n < num_out, other=0.0).to(tl.float32)[:, None]
    inside = (n < num_out)[:, None] & (row < num_rows)[None, :]
    at = out_ptr + row[None, :] * num_out + n[:, None]
    tl.store(at, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def prefetch(weight_ptr, n, num_out, num_in, begin, end, BLOCK_K: tl.constexpr):
    """Bring inputs begin to end of outputs n to the L2."""
    line = tl.arange(0, BLOCK_K // 128) * 128
    at = weight_ptr + tl.minimum(n, num_out - 1).to(tl.int64)[:, None] * num_in + line[None, :]
    for start in range(begin, end, BLOCK_K):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [(at + start).to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
