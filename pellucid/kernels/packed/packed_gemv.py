# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportOptionalCall=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
"""y = x W^T with a packed W of 4 or 8 bits for one row, on Hopper GPUs.

A program multiplies 16 outputs; its warps take chunks of their inputs by turns, as many as a thread has four
words of, and add up in the end.  Each thread unpacks its own words (`packed_hopper.unpacking`) into a warp's
left operand of `mma.sync`, in one piece of PTX, so that no number ever leaves registers.  Scales are
multiplied to the sums of their groups, in float32: numbers are not rounded, as `packed_hopper` has them.

Memory and registers: x lies in shared memory, what a thread multiplies in a step side by side.  Codes go
straight to registers: a warp has DEPTH chunks of them under way, of a thread 4 registers each and their
scales.  With sums, x and what unpacking takes that is 77 registers for a depth of 8 (95 to 111 for long rows,
groups of 16 or 32): a multiprocessor holds six programs of four warps, among them those of the kernel behind
this one, which ask for their first chunks before they wait.
Numbers of a table are looked up two at a time: all 256 pairs lie in shared memory, 32 KB, once for each lane,
whose bank of it is its own.  That takes 16 instructions for eight codes, of which 8 are the integer unit's;
to choose bytes of the table in registers takes 22 of that unit, which starts one in two clocks.
The reference is `packed_matmul_ref`.

Legend: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pellucid.kernels.lang.dependent import dependent, let_next_start, wait
from pellucid.kernels.packed.packed_hopper import REGISTERS, from_table, in_pairs, middle_of, unpacking
from pellucid.kernels.packed.packed_weight import Numbers, PackedWeight
from pellucid.kernels.pointwise.silu_mul import gate
from pellucid.kernels.products.hopper_matmul import HAS_REINTERPRET

OUTPUTS = gl.constexpr(16)  # of a program
PART = gl.constexpr(128)  # words of a chunk of 16 outputs
LANES = gl.constexpr(32)  # int32 of scales of 64 outputs
PAIRS = gl.constexpr(256 * 32)  # int32 of a table's pairs of numbers, for each lane


@dataclass(frozen=True, slots=True)
class GemvTile:
    """How a program goes about it."""

    num_warps: int  # which take chunks of inputs by turns
    depth: int  # chunks of codes that a warp has under way


def packed_gemv(
    x: Tensor, weight: PackedWeight, tile: GemvTile, *, bias: Tensor | None = None, act: str | None = None
) -> Tensor:
    """x [1, K] W^T plus bias [N] -> [1, N].

    act: of a weight that is `gated`; then what is gated comes out, [1, N / 2].  Without it, the outputs of
    such a weight come as they lie.
    """
    assert act is None or weight.gated, act
    assert x.dtype == weight.dtype and x.shape == (1, weight.num_in), (x.shape, x.dtype)
    assert x.itemsize == 2 and x.stride(1) == 1, (x.dtype, x.stride())
    width = weight.num_out // 2 if act else weight.num_out
    out = torch.empty(1, width, dtype=x.dtype, device=x.device)
    packed_gemv_kernel[(triton.cdiv(weight.num_out, OUTPUTS.value),)](
        x[0].view(torch.int32),
        weight.words,
        in_pairs(weight.scale),
        in_pairs(weight.zero),
        in_pairs(weight.offset),
        bias,
        out,
        weight.num_out,
        ASM=products(
            *(weight.numbers, weight.bits, weight.dtype, weight.table_bits),
            middle=middle_of(weight.middle, weight.bits, weight.dtype),
            has_zero=weight.zero is not None,
            has_offset=weight.offset is not None,
            group=min(4, weight.group * weight.bits // 64),
        ),
        WRITE_PAIRS=(
            writing_pairs(weight.table_bits, tile.num_warps) if weight.numbers is Numbers.TABLE else None
        ),
        BITS=weight.bits,
        GROUP=weight.group,
        NUM_GROUPS=weight.scale.shape[1],
        K=weight.num_in,
        WARPS=tile.num_warps,
        DEPTH=tile.depth,
        ACT=act,
        num_warps=tile.num_warps,
        **dependent(),
    )
    return out


def gemv_tile(num_in: int, numbers: Numbers, bits: int = 4) -> GemvTile:
    """What is fastest for each of Qwen3-8B's products on an H200; long rows of x take more registers.

    Pairs of a table and a long row leave room for few programs.  Integers of 8 bits fill twice as many
    chunks: with 16 of them, all of 4,096 inputs, a layer takes 65 us, with 8 84, of one scale a row.
    """
    most = 8192 if numbers is Numbers.TABLE else 16_384
    return GemvTile(4 if num_in <= most else 8, 16 if (numbers, bits) == (Numbers.INTEGER, 8) else 8)


@cache
def products(
    numbers: Numbers,
    bits: int,
    dtype: torch.dtype,
    table_bits: tuple[int, ...],
    *,
    middle: int,
    has_zero: bool,
    has_offset: bool,
    group: int,
) -> str:
    """PTX that adds up a chunk: four words of each thread of a warp, times x, eight times.

    Results: four float32.  Arguments, four registers each: words, scales, zeros, offsets, x (of 4 bits two
    times), what there is to be added to, and of a table where the lane's pairs begin.  group: words that have
    the same scales.
    """
    words, scales, zeros, offsets, x = (4 * (1 + i) for i in range(5))
    sums = x + (8 if bits == 4 else 4)
    type = "bf16" if dtype == torch.bfloat16 else "f16"
    one = 0x3F803F80 if type == "bf16" else 0x3C003C00
    product = f"mma.sync.aligned.m16n8k16.row.col.f32.{type}.{type}.f32"
    made = looked_up(sums + 4) if numbers is Numbers.TABLE else unpacking(numbers, bits, dtype, table_bits)
    # The compiler moves no load across this: it would ask for the next chunks when it has no other work.
    lines = ["bar.warp.sync 0xffffffff;"]
    lines += [REGISTERS, ".reg .b32 m<2>, middle, one;", ".reg .b16 h<2>;"]
    lines += [".reg .f32 factor<2>, minus<2>, c<4>, d<4>;"]
    lines += [
        f"mov.b32 middle, {middle & 0xFFFFFFFF:#x};",
        "mov.b32 zero0, middle;",
        "mov.b32 zero1, middle;",
    ]
    lines += [f"mov.b32 one, {one:#x};"] if has_offset else []
    for first in range(0, 4, group):
        if has_zero:
            lines += twice("zero", zeros + first)
            lines += [f"add.rn.{type}x2 zero{i}, zero{i}, middle;" for i in range(2)]
        lines += [f"mov.b32 {name}{i}, 0;" for name in "cd" for i in range(4)]
        for word in range(first, first + group):
            lines += [f"mov.b32 word, ${words + word};", *made]
            if bits == 8 and word % 2 == 0:
                lines += ["mov.b32 m0, n0;", "mov.b32 m1, n1;"]
                continue
            at = x + word
            left = "n0, n1, n2, n3" if bits == 4 else "m0, m1, n0, n1"
            right = f"${at}, ${at + 4}" if bits == 4 else f"${at - 1}, ${at}"
            lines += [f"{product} {{c0, c1, c2, c3}}, {{{left}}}, {{{right}}}, {{c0, c1, c2, c3}};"]
            if has_offset:  # of which the sum of x is a multiple
                ones = "{d0, d1, d2, d3}, {one, one, one, one}"
                lines += [f"{product} {ones}, {{{right}}}, {{d0, d1, d2, d3}};"]
        lines += as_floats("factor", scales + first, type)
        if has_offset:
            lines += as_floats("minus", offsets + first, type)
            lines += [f"neg.f32 minus{i}, minus{i};" for i in range(2)]
        for i in range(4):
            before = f"${i}" if first else f"${sums + i}"
            lines += [f"fma.rn.f32 ${i}, c{i}, factor{i // 2}, {before};"]
            lines += [f"fma.rn.f32 ${i}, d{i}, minus{i // 2}, ${i};"] if has_offset else []
    return "{" + " ".join(lines) + "}"


def looked_up(place: int) -> list[str]:
    """PTX that makes n0 to n3 of `word`: of each byte, whose codes are of two rows, a pair of the table."""
    lines = [f"prmt.b32 u{i}, word, 0, {0x4440 + i:#x};" for i in range(4)]
    lines += [f"mad.lo.u32 u{i}, u{i}, 128, ${place};" for i in range(4)]
    lines += [f"ld.shared.b32 u{i}, [u{i}];" for i in range(4)]
    orders = "0x5410", "0x7632"
    return lines + [
        f"prmt.b32 n{2 * i + j}, u{i}, u{i + 2}, {orders[j]};" for i in range(2) for j in range(2)
    ]


@cache
def writing_pairs(table_bits: tuple[int, ...], num_warps: int) -> str:
    """PTX that writes a thread's share of the table's pairs, and gives where its lane's begin: $0.

    The pair of a byte lies at its number, the lower four bits' number below the other's.  $1: the thread.
    """
    assert num_warps in (4, 8), num_warps
    # Before, the first codes are asked for.
    lines = ["bar.warp.sync 0xffffffff;", REGISTERS, ".reg .pred is_last;"]
    lines += ["mov.u32 u7, global_smem;", "shr.u32 word, $1, 3;", "and.b32 word, word, 15;"]
    lines += from_table(table_bits)  # n0: of the code `word`, and above it of 0
    lines += ["and.b32 n0, n0, 0xffff;", "and.b32 u6, $1, 127;", "shl.b32 u6, u6, 4;", "add.u32 u6, u6, u7;"]
    rounds = num_warps // 4  # of 16 pairs each, that all threads write at once
    lines += ["setp.gt.u32 is_last, $1, 127;", "@is_last add.u32 u6, u6, 2048;"] if rounds > 1 else []
    for first in range(0, 16, rounds):
        lines += [f"mov.b32 s, {table_bits[first] << 16:#x};"]
        lines += [f"@is_last mov.b32 s, {table_bits[first + 1] << 16:#x};"] if rounds > 1 else []
        lines += ["or.b32 s, s, n0;", f"st.shared.v4.b32 [u6+{2048 * first}], {{s, s, s, s}};"]
    lines += ["and.b32 u6, $1, 31;", "shl.b32 u6, u6, 2;", "add.u32 $0, u6, u7;"]
    return "{" + " ".join(lines) + "}"


def as_floats(name: str, argument: int, type: str) -> list[str]:
    """Numbers of rows r and r + 8, which lie side by side, as float32."""
    if type == "f16":
        both = [f"cvt.f32.f16 {name}{i}, h{i};" for i in range(2)]
        return [f"mov.b32 {{h0, h1}}, ${argument};", *both]
    lower = [f"shl.b32 s, ${argument}, 16;", f"mov.b32 {name}0, s;"]
    return [*lower, f"and.b32 s, ${argument}, 0xffff0000;", f"mov.b32 {name}1, s;"]


def twice(name: str, argument: int) -> list[str]:
    """Numbers of rows r and r + 8, which lie side by side, each twice in a register."""
    orders = "0x1010", "0x3232"
    return [f"prmt.b32 {name}{i}, ${argument}, ${argument}, {order};" for i, order in enumerate(orders)]


@gluon.jit
def load_pairs(
    ptr, lane, chunk, inside,
    BITS: gl.constexpr, GROUP: gl.constexpr, EVEN: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """What a chunk's words are scaled by, say: one for each thread, or each word; nothing if none is."""
    CHUNK: gl.constexpr = 256 // BITS
    if ptr is None:
        return ()
    else:
        if GROUP < CHUNK:
            word = gl.arange(0, 4, gl.SliceLayout(0, LAYOUT))
            group = (chunk * (CHUNK // GROUP))[:, None] + (word * 4 // BITS * 16 // GROUP)[None, :]
            at = ptr + lane[:, None] + group * LANES
            inside = inside[:, None]
        else:
            at = ptr + lane + chunk * CHUNK // GROUP * LANES
        if EVEN:
            return (gl.load(at),)
        else:
            return (gl.load(at, mask=inside, other=0),)


@gluon.jit
def load_step(
    words_at, tables, lane, step, warp,
    CHUNKS: gl.constexpr, BITS: gl.constexpr, GROUP: gl.constexpr, EVEN: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """A step's words, scales, zeros and offsets; zeros of a chunk that there is not."""
    scale_ptr, zero_ptr, offset_ptr = tables
    WARPS: gl.constexpr = LAYOUT.warps_per_cta[0]
    chunk = step * WARPS + warp
    inside = chunk < CHUNKS
    at = words_at + step * (WARPS * 4 * PART)
    if EVEN:
        words = gl.load(at, eviction_policy="evict_first")
    else:
        words = gl.load(at, mask=inside[:, None], other=0, eviction_policy="evict_first")
    return (
        words,
        load_pairs(scale_ptr, lane, chunk, inside, BITS, GROUP, EVEN, LAYOUT),
        load_pairs(zero_ptr, lane, chunk, inside, BITS, GROUP, EVEN, LAYOUT),
        load_pairs(offset_ptr, lane, chunk, inside, BITS, GROUP, EVEN, LAYOUT),
    )


@gluon.jit
def spread(pairs, like):
    """Those of each word; if there are none, anything."""
    if len(pairs) == 0:
        return like
    else:
        pair = pairs[0]
        if len(pair.shape) == 1:
            pair = pair[:, None]
        return gl.broadcast(pair, like)[0]


@gluon.jit
def multiply(ASM: gl.constexpr, loaded, xs, y, lane_pairs):
    """The sums and the products of a step."""
    words, scales, zeros, offsets = loaded
    args = (words, spread(scales, words), spread(zeros, words), spread(offsets, words)) + xs + (y,)
    return gl.inline_asm_elementwise(
        ASM,
        "=&f,=&f,=&f,=&f" + ",r" * (16 + 4 * len(xs)) + ",f,f,f,f" + ",r,r,r,r" * len(lane_pairs),
        args + lane_pairs,
        dtype=gl.float32,
        is_pure=False,
        pack=4,
    )


@gluon.jit
def write_pairs(WRITE_PAIRS: gl.constexpr, thread, like):
    """Write the table's pairs to where shared memory begins; where the lane's lie, if there are any."""
    if WRITE_PAIRS is None:
        return ()
    else:
        at = gl.inline_asm_elementwise(WRITE_PAIRS, "=&r,r", [thread], dtype=gl.int32, is_pure=False, pack=1)
        return (gl.broadcast(at[:, None], like)[0],)


@gluon.jit
def keep_x(
    x_parts, x_ptr, FIRST: gl.constexpr,
    K: gl.constexpr, BITS: gl.constexpr, WARPS: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """Copy x to shared memory: what a thread multiplies in a step side by side, zeros past the last.

    FIRST: the part that is the first step's.
    """
    NUM_PARTS: gl.constexpr = x_parts.shape[0]
    NUM_STEPS: gl.constexpr = NUM_PARTS - FIRST
    STEPS: gl.constexpr = (NUM_STEPS | FIRST) & -(NUM_STEPS | FIRST)  # at once: a power of two
    SIZE: gl.constexpr = STEPS * WARPS * 128 // BITS
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    loaded = ()
    for part in gl.static_range(NUM_STEPS // STEPS):
        k = part * SIZE + gl.arange(0, SIZE, LAYOUT)
        if WHOLE:
            loaded = loaded + (gl.load(x_ptr + k),)
        else:
            loaded = loaded + (gl.load(x_ptr + k, mask=k < K // 2, other=0),)
    SHAPE: gl.constexpr = [NUM_PARTS // STEPS, STEPS * WARPS * 4, 32 // BITS]
    if HAS_REINTERPRET:
        parts = x_parts.reinterpret(gl.int32, SHAPE, x_parts.layout)
    else:
        parts = x_parts._reinterpret(gl.int32, SHAPE, x_parts.layout)
    for part in gl.static_range(NUM_STEPS // STEPS):
        x = loaded[part].reshape([STEPS * WARPS, 4, 8 // BITS, 4])  # step and warp, word, half, thread
        x = x.permute((0, 3, 1, 2)).reshape([STEPS * WARPS * 4, 32 // BITS])
        parts.index(FIRST // STEPS + part).store(x)


@gluon.constexpr_function
def flat_layout(num_warps, halves):
    """Of [warp, thread] by [word, half]: all eight lanes of a warp have it."""
    bits = [1 << i for i in range(8)]
    return gl.DistributedLinearLayout(
        [[0, bit] for bit in bits[: 1 + halves]],
        [[1, 0], [2, 0]] + [[0, 0]] * 3,
        [[4 * bit, 0] for bit in bits[: num_warps.bit_length() - 1]],
        [],
        [4 * num_warps, 4 * halves],
    )


@gluon.jit
def x_of(x_part, WARPS: gl.constexpr, HALVES: gl.constexpr, LAYOUT: gl.constexpr):
    """The right operands of a step's products: those of four words.  An instruction multiplies eight rows."""
    WIDE: gl.constexpr = gl.BlockedLayout(  # warp, copy, thread, word, half
        [1, 1, 1, 4, HALVES], [1, 8, 4, 1, 1], [WARPS, 1, 1, 1, 1], [4, 3, 2, 1, 0]
    )
    NARROW: gl.constexpr = gl.SliceLayout(1, WIDE)
    FLAT: gl.constexpr = flat_layout(WARPS, HALVES)
    x = gl.convert_layout(x_part.load(FLAT).reshape([WARPS, 4, 4, HALVES]), NARROW, assert_trivial=True)
    x = x[:, None, :, :, :] + gl.zeros([WARPS, 8, 4, 4, HALVES], gl.int32, WIDE)
    if HALVES == 2:
        low, high = x.reshape([32 * WARPS, 4, 2]).split()
        return (
            gl.convert_layout(low, LAYOUT, assert_trivial=True),
            gl.convert_layout(high, LAYOUT, assert_trivial=True),
        )
    else:
        return (gl.convert_layout(x.reshape([32 * WARPS, 4]), LAYOUT, assert_trivial=True),)


@gluon.jit
def packed_gemv_kernel(
    x_ptr,  # int32 [K / 2]
    words_ptr,
    scale_ptr,  # int32 [N / 64, NUM_GROUPS, 32], as are the next two
    zero_ptr,
    offset_ptr,
    bias_ptr,
    out_ptr,
    num_out,
    ASM: gl.constexpr,  # adds up a chunk
    WRITE_PAIRS: gl.constexpr,  # to shared memory, of a table's numbers; or nothing
    BITS: gl.constexpr,
    GROUP: gl.constexpr,  # inputs that share a scale
    NUM_GROUPS: gl.constexpr,
    K: gl.constexpr,
    WARPS: gl.constexpr,
    DEPTH: gl.constexpr,
    ACT: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """One program 16 outputs, a fourth of a tile."""
    let_next_start(DEPENDENT)
    CHUNKS: gl.constexpr = (K + 63) // 64 * BITS // 4
    STEPS: gl.constexpr = (CHUNKS + WARPS - 1) // WARPS
    LOOPS: gl.constexpr = (STEPS + DEPTH - 1) // DEPTH
    EVEN: gl.constexpr = CHUNKS == LOOPS * DEPTH * WARPS  # each warp has a chunk in each step
    WHOLE: gl.constexpr = EVEN and K % 64 == 0
    HALVES: gl.constexpr = 8 // BITS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    # Pairs, then the steps of x: one piece, so that it begins where shared memory does.
    FIRST: gl.constexpr = 0 if WRITE_PAIRS is None else PAIRS // (WARPS * 16 * HALVES)
    x_parts = gl.allocate_shared_memory(
        gl.int32, [FIRST + LOOPS * DEPTH, WARPS * 4, 4 * HALVES], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    thread = gl.arange(0, 32 * WARPS, gl.SliceLayout(1, LAYOUT))
    word = gl.arange(0, 4, gl.SliceLayout(0, LAYOUT))[None, :]
    warp = thread // 32
    block, part = gl.program_id(0) // 4, gl.program_id(0) % 4
    words_at = words_ptr + (block.to(gl.int64) * (CHUNKS * 4 * PART) + part * PART)
    words_at = words_at + (warp * (4 * PART) + thread % 32 * 4)[:, None] + word
    lane = thread % 32 // 4 + (block * NUM_GROUPS * LANES + part * 8)
    tables = scale_ptr, zero_ptr, offset_ptr
    ring = ()
    for early in gl.static_range(DEPTH):
        ring = ring + (load_step(words_at, tables, lane, early, warp, CHUNKS, BITS, GROUP, EVEN, LAYOUT),)
    lane_pairs = write_pairs(WRITE_PAIRS, thread, ring[0][0])
    wait(DEPENDENT)
    keep_x(x_parts, x_ptr, FIRST, K, BITS, WARPS, WHOLE)
    y = gl.zeros([32 * WARPS, 4], gl.float32, LAYOUT)
    for loop in range(LOOPS - 1):
        for i in gl.static_range(DEPTH):
            step = loop * DEPTH + i
            y = multiply(
                ASM, ring[0], x_of(x_parts.index(FIRST + step), WARPS, HALVES, LAYOUT), y, lane_pairs
            )
            later = load_step(words_at, tables, lane, step + DEPTH, warp, CHUNKS, BITS, GROUP, EVEN, LAYOUT)
            ring = ring[1:] + (later,)
    for last in gl.static_range(DEPTH):
        x = x_of(x_parts.index(FIRST + (LOOPS - 1) * DEPTH + last), WARPS, HALVES, LAYOUT)
        y = multiply(ASM, ring[last], x, y, lane_pairs)
    store_sums(y, num_out, bias_ptr, out_ptr, WARPS, ACT)


@gluon.jit
def store_sums(y, num_out, bias_ptr, out_ptr, WARPS: gl.constexpr, ACT: gl.constexpr):
    """Add up what the warps have of 16 outputs, add the bias, gate if there is an ACT, store.

    Of eight rows that a thread's group of four has, all are the same.
    """
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    y = gl.convert_layout(gl.sum(y.reshape([WARPS, 32, 4]), 0), LAYOUT)
    thread = gl.arange(0, 32, gl.SliceLayout(1, LAYOUT))[:, None]
    number = gl.arange(0, 4, gl.SliceLayout(0, LAYOUT))[None, :]
    half = number // 2
    is_first = thread % 4 * 2 + number % 2 == 0
    if ACT is None:
        n = gl.program_id(0) * OUTPUTS + thread // 4 + half * 8
        inside = n < num_out
    else:  # eight gates, and eight that these open
        n = gl.program_id(0) * (OUTPUTS // 2) + thread // 4 + half * (num_out // 2)
        inside = n - half * (num_out // 2) < num_out // 2
    if bias_ptr is not None:
        y += gl.load(bias_ptr + n, mask=inside, other=0.0).to(gl.float32)
    if ACT is None:
        gl.store(out_ptr + n, y.to(dtype), mask=is_first & inside)
    else:
        opening, x = y.to(dtype).reshape([32, 2, 2]).permute((0, 2, 1)).split()
        at = gl.broadcast(n, y)[0].reshape([32, 2, 2]).permute((0, 2, 1)).split()[0]
        inside = (inside & is_first).reshape([32, 2, 2]).permute((0, 2, 1)).split()[0]
        gl.store(out_ptr + at, gate(opening, x, ACT), mask=inside)
