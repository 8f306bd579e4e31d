# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0915, PLR0917, SIM300
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportOptionalCall=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
"""y = x W^T with a packed W of 4 or 8 bits on Hopper GPUs, for 1 to 256 rows.

As in `hopper_matmul.py`, one warp copies steps of W and x by the TMA unit, W's first ones before the kernel
before this one has ended, and programs that share a tile each add up a share of its rows, in a fixed order.
Here W's steps are codes, a quarter of the bytes: each multiplying thread loads 16 bytes, which are its own,
and makes of them in registers the numbers of its fragments, two at a time in one instruction: `lop3` puts two
codes into the mantissas of two 16-bit numbers, 128 or 1,024 and more, which are subtracted, exactly, and the
scale is multiplied, rounded once (the trick is of Kim et al., arXiv:2211.10017).  That is less than two
instructions a weight, for any number of rows, so that memory is all that counts for up to 64 rows.
The reference is `packed_matmul_ref`.

Legend: M rows, N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from pellucid.kernels.attention.hopper_prefill import barrier, boxes_of, copy_box
from pellucid.kernels.lang.dependent import dependent, let_next_start, wait
from pellucid.kernels.packed.packed_weight import Numbers, PackedWeight
from pellucid.kernels.products.hopper_matmul import LINE_BYTES, LINES, finish_tile, num_arrivals, seen_as
from pellucid.kernels.products.tiles import RING_BYTES, SPARE, Wgmma

STEP = gl.constexpr(128)  # inputs that are copied at once: two tiles of W
HALF = gl.constexpr(64)  # inputs of a tile
MOST_ROWS = (16, 32, 64, 128, 256)
CODES = gl.constexpr(4096)  # bytes of a step's codes for 64 outputs
FEW_ROWS_RING = 72 << 10  # of steps of up to 32 rows: the kernel behind finds room for its own beside


def packed_hopper(
    x: Tensor,
    weight: PackedWeight,
    tile: Wgmma,
    *,
    bias: Tensor | None = None,
    act: str | None = None,
    arrivals: Tensor | None = None,
) -> Tensor:
    """x [M, K] W^T plus bias [N] -> [M, N].  arrivals: as `hopper_matmul` wants them.

    act: of a weight that is `gated`; then what is gated comes out, [M, N / 2].  Without it, the outputs of
    such a weight come as they lie.
    """
    assert act is None or weight.gated, act
    num_rows, num_tiles, num_groups = len(x), weight.words.shape[1], weight.scale.shape[1]
    assert x.dtype == weight.dtype and x.shape[1] == weight.num_in, (x.shape, x.dtype)
    assert tile.splits in (1, 2, 4, 8) and 8 * tile.splits <= tile.rows, tile
    assert (
        tile.stages * CODES.value * weight.bits // 4 % (tile.rows // tile.splits * LINES.value * x.itemsize)
        == 0
    ), tile
    width = weight.num_out // 2 if act else weight.num_out
    out = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(num_rows, tile.rows), triton.cdiv(weight.num_out, tile.block_n), tile.splits)
    partial = None
    if tile.splits > 1:
        assert arrivals is not None and len(arrivals) >= num_arrivals(weight.num_out, num_rows, tile)
        size = grid[0] * grid[1] * tile.splits * tile.block_n * tile.rows
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
    packed_hopper_kernel[grid](
        boxes_of(x, [tile.rows, HALF.value]),
        boxes_of(weight.words.view(-1, 32), [8 * weight.bits, 32]),
        in_pairs(weight.scale),
        in_pairs(weight.zero),
        in_pairs(weight.offset),
        bias,
        out,
        partial,
        arrivals if tile.splits > 1 else None,
        num_rows,
        weight.num_out,
        num_tiles,
        ASM=assembly(
            *(weight.numbers, weight.bits, weight.dtype, weight.table_bits),
            has_offset=weight.offset is not None,
        ),
        ADD=f"add.rn.{type_of(weight.dtype)} $0, $1, $2;",
        MIDDLE=middle_of(weight.middle, weight.bits, weight.dtype),
        BITS=weight.bits,
        GROUP=weight.group,
        NUM_GROUPS=num_groups,
        PADDED=triton.next_power_of_2(triton.cdiv(num_groups, tile.splits) + 1),
        ROWS=tile.rows,
        GROUPS=tile.block_n // LINES.value,
        STAGES=tile.stages,
        SPLITS=tile.splits,
        ACT=act,
        num_warps=4,
        maxnreg=registers_of(tile),
        **dependent(),
    )
    return out


def in_pairs(lanes: Tensor | None) -> Tensor | None:
    """16-bit numbers of rows r and r + 8, which lie side by side, as one int32."""
    return None if lanes is None else lanes.view(torch.int32)


def registers_of(tile: Wgmma) -> int | None:
    """Of a thread, such that a small tile leaves room for the programs of the kernels around."""
    return 128 if tile.rows <= 64 else None


def most_rows(weight: PackedWeight) -> tuple[int, ...]:
    """Up to how many rows such codes have tiles for, rising; none if this kernel does not take them."""
    aligned = weight.num_in % 8 == 0 and weight.num_out % 8 == 0
    return MOST_ROWS if aligned and weight.dtype.itemsize == 2 else ()


def takes(x: Tensor) -> bool:
    """Whether the TMA unit can copy these rows."""
    return x.stride(1) == 1 and not any(each % 16 for each in (x.data_ptr(), x.stride(0) * x.itemsize))


def tile_for(num_rows: int, num_out: int, num_in: int, num_multiprocessors: int, bits: int = 4) -> Wgmma:
    """The tile with which the last of rounds of programs ends first.

    Programs that share a tile wait for one another, so all of them must find room at once.
    """
    fewest = min(128, max(16, triton.next_power_of_2(num_rows)))
    best = None
    for width in (192, 128, 64):
        for splits in (4, 2, 1):
            rows = max(fewest, 8 * splits)
            programs = -(-num_rows // rows) * -(-num_out // width) * splits
            has_room = programs <= num_multiprocessors - SPARE and 512 * splits <= num_in
            if splits > 1 and not has_room:
                continue
            cost = -(-programs // num_multiprocessors) * width / splits
            if best is None or cost < best[0]:
                best = cost, width, rows, splits
    assert best is not None, (num_rows, num_out, num_in)
    _, width, rows, splits = best
    codes = CODES.value * bits // 4
    stage = width // LINES.value * codes + 2 * rows * LINE_BYTES.value
    whole = max(1, rows // splits * LINE_BYTES.value // codes)  # steps that make room for results
    ring = FEW_ROWS_RING if rows <= 32 else RING_BYTES
    stages = min(ring // stage, 16) // whole * whole
    return Wgmma(width, rows, splits, max(stages, whole))


@gluon.jit
def doubled(pair):
    """An int32 of two 16-bit numbers as two int32, each of one of them twice."""
    return gl.inline_asm_elementwise(
        # In words that a multiplication can take halves of, without an instruction.
        "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $2; mov.b32 $0, {lo, lo}; mov.b32 $1, {hi, hi}; }",
        "=&r,=&r,r",
        [pair],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


E2M1 = {"bf16x2": (6, 0x01C001C0, 0x7E807E80), "f16x2": (9, 0x0E000E00, 0x74007400)}  # and 2^126, 2^14
ABOVE = {"bf16x2": 0x4300, "f16x2": 0x6400}  # 128 and 1,024, whose last bits are units


def type_of(dtype: torch.dtype) -> str:
    """PTX's word for two of these."""
    return "bf16x2" if dtype == torch.bfloat16 else "f16x2"


@cache
def middle_of(middle: int, bits: int, dtype: torch.dtype) -> int:
    """What is subtracted from codes that stand in mantissas: a 16-bit number's bits, twice in an int32."""
    if bits == 8 and dtype == torch.bfloat16:  # of which 128 are gone by then
        number = torch.tensor([float(middle - 128)], dtype=dtype).view(torch.int16)
        twice = (int(number[0]) & 0xFFFF) * 0x10001
        return twice - (twice >> 31 << 32)
    return (ABOVE[type_of(dtype)] + middle) * 0x10001


@cache
def assembly(
    numbers: Numbers,
    bits: int,
    dtype: torch.dtype,
    table_bits: tuple[int, ...] = (),
    *,
    has_offset: bool = False,
    is_folded: bool = False,
) -> str:
    """PTX that makes eight numbers of a word: $0 to $7, of the word $8; or four of 8 bits, of the word $4.

    The next arguments are scales of rows r and r + 8, what is subtracted from their codes, and what is added
    in the end, each twice in an int32.  is_folded: scales of E2M1 are raised already, and its words spread.
    """
    num = 4 if bits == 4 else 2
    names = "word", "scale0", "scale1", "zero0", "zero1", "offset0", "offset1"
    lines = [REGISTERS, *(f"mov.b32 {name}, ${2 * num + i};" for i, name in enumerate(names))]
    lines += unpacking(numbers, bits, dtype, table_bits, is_folded=is_folded)
    for i in range(num):
        scaled = f"fma.rn.{type_of(dtype)} n{i}, n{i}, scale{i % 2}, offset{i % 2};"
        lines += [scaled if has_offset else f"mul.rn.{type_of(dtype)} n{i}, n{i}, scale{i % 2};"]
        lines += [f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, n{i};"]
    return "{" + " ".join(lines) + "}"


REGISTERS = ".reg .b32 word, scale<2>, zero<2>, offset<2>, n<4>, s, t, u<8>;"


def unpacking(
    numbers: Numbers,
    bits: int,
    dtype: torch.dtype,
    table_bits: tuple[int, ...] = (),
    *,
    is_folded: bool = False,
) -> list[str]:
    """PTX that makes pairs of numbers, n0 to n3, or n0 and n1 of 8 bits, of `word`, less zero0 and zero1.

    They are to be scaled yet.  is_folded: see `assembly`.
    """
    type = type_of(dtype)
    match numbers, bits:
        case Numbers.INTEGER, 4:
            return integers(type)
        case Numbers.E2M1, _:
            return spread_floats() if is_folded else small_floats(type)
        case Numbers.TABLE, _:
            return from_table(table_bits)
        case Numbers.INTEGER, _:
            return integers_of_8(type)
        case _:
            return floats_of_8(type, numbers)


def integers_of_8(type: str) -> list[str]:
    """Four bytes of a word: whole in mantissas of ten bits; in those of seven all but their highest bits.

    Of 128 and a byte's other bits, 128 is subtracted if it has the highest one, and else 256: what is next to
    128 in mantissas.  So it is 128 less than the byte.
    """
    lines = ["mov.b32 u1, 0;"]
    for i, order in enumerate(("0x4140", "0x4342")):
        if type == "f16x2":
            lines += [
                f"prmt.b32 n{i}, word, u1, {order};",
                f"lop3.b32 n{i}, n{i}, 0x00ff00ff, 0x64006400, 0xea;",
                f"sub.rn.f16x2 n{i}, n{i}, zero{i};",
            ]
            continue
        lines += [
            f"prmt.b32 s, word, u1, {order};",
            f"lop3.b32 n{i}, s, 0x007f007f, 0x43004300, 0xea;",
            "lop3.b32 s, s, 0x00800080, 0x43804380, 0x6a;",  # (s and 0x0080) xor 0x4380
            f"sub.rn.bf16x2 n{i}, n{i}, s;",
            f"sub.rn.bf16x2 n{i}, n{i}, zero{i};",
        ]
    return lines


def floats_of_8(type: str, numbers: Numbers) -> list[str]:
    """E4M3 and E5M2, where wider types have sign, exponent and mantissa; exponents are then set right."""
    exponent = 4 if numbers is Numbers.E4M3 else 5
    wide = 8 if type == "bf16x2" else 5
    right = wide - exponent
    bias = (1 << wide - 1) - (1 << exponent - 1)  # which their exponents lack
    half = 7 if type == "bf16x2" else 10  # bits of a mantissa
    factor = ((1 << wide - 1) - 1 + bias << half) * 0x10001
    mask = (0x7F00 >> right) * 0x10001
    lines = ["mov.b32 u1, 0;", f"mov.b32 t, {factor:#x};"]
    for i, order in enumerate(("0x1404", "0x3424")):
        lines += [
            f"prmt.b32 s, word, u1, {order};",
            f"shr.u32 n{i}, s, {right};",
            f"and.b32 n{i}, n{i}, {mask:#x};",
            f"lop3.b32 n{i}, s, 0x80008000, n{i}, 0xea;",
            f"mul.rn.{type} n{i}, n{i}, t;",
        ]
    return lines


def integers(type: str) -> list[str]:
    """Codes in mantissas, less what is above them and their zeros."""
    lines = []
    for i in range(4):
        lines += [f"shr.u32 s, word, {4 * i};"] if i else []
        lines += [
            f"lop3.b32 n{i}, {'s' if i else 'word'}, 0x000f000f, {ABOVE[type] * 0x10001:#x}, 0xea;",
            f"sub.rn.{type} n{i}, n{i}, zero{i % 2};",
        ]
    return lines


def spread_floats() -> list[str]:
    """E2M1 of words that are `spread`, but for 2^126: a code's bits lie apart as bfloat16's do, one's in two.

    The turns are `TURNS`: those that lose no bit by it are shifts.
    """
    _, mask, _ = E2M1["bf16x2"]
    mask |= 0x80008000
    return [
        f"and.b32 n0, word, {mask:#x};",
        "shl.b32 s, word, 4;",
        f"and.b32 n1, s, {mask:#x};",
        "shf.l.wrap.b32 s, word, word, 10;",
        f"and.b32 n2, s, {mask:#x};",
        "shl.b32 s, word, 6;",
        f"and.b32 n3, s, {mask & ~0x01000100:#x};",
        "shr.u32 s, word, 2;",
        "lop3.b32 n3, s, 0x01000100, n3, 0xea;",
    ]


def small_floats(type: str) -> list[str]:
    """E2M1: sign, exponent of two bits, which may be zero, mantissa of one, where wider types have them."""
    place, mask, factor = E2M1[type]
    lines = [f"mov.b32 t, {factor:#x};"]
    for i in range(4):
        left = place - 4 * i
        lines += [
            f"{'shl.b32' if left >= 0 else 'shr.u32'} n{i}, word, {abs(left)};",
            f"and.b32 n{i}, n{i}, {mask:#x};",
            f"shl.b32 s, word, {12 - 4 * i};",
            f"lop3.b32 n{i}, s, 0x80008000, n{i}, 0xea;",
            f"mul.rn.{type} n{i}, n{i}, t;",
        ]
    return lines


def from_table(table_bits: tuple[int, ...]) -> list[str]:
    """A table's numbers: lower and upper bytes are chosen apart, four at a time, out of eight and eight."""
    lines = [
        "prmt.b32 t, word, word, 0x3120;",  # codes that become n0 and n1, and those of n2 and n3
        "and.b32 s, t, 0x77777777;",  # a sign would be repeated
        "shr.u32 t, t, 1;",
        "lop3.b32 t, t, 0x44444444, 0x32103210, 0xea;",  # whether of the first or of the last eight
    ]
    for i in range(0, 4, 2):
        for byte in range(2):
            first, last = (places_in(table_bits[8 * half : 8 * half + 8], byte) for half in range(2))
            lines += [
                *(f"mov.b32 u{2 + j}, {first[j]:#x};" for j in range(2)),
                f"prmt.b32 u{byte}, u2, u3, s;",
                *(f"mov.b32 u{2 + j}, {last[j]:#x};" for j in range(2)),
                "prmt.b32 u4, u2, u3, s;",
                f"prmt.b32 u{byte}, u{byte}, u4, t;",
            ]
        lines += [f"prmt.b32 n{i}, u0, u1, 0x6240;", f"prmt.b32 n{i + 1}, u0, u1, 0x7351;"]
        lines += [] if i else ["shr.u32 s, s, 16;", "shr.u32 t, t, 16;"]
    return lines


def places_in(bits: tuple[int, ...], byte: int) -> tuple[int, int]:
    """One of the bytes of each of eight 16-bit numbers, in two words."""
    bytes = [each >> 8 * byte & 255 for each in bits]
    return int.from_bytes(bytes[:4], "little"), int.from_bytes(bytes[4:], "little")


FOUR_BFLOAT16, FOUR_FLOAT16 = gl.constexpr((gl.bfloat16,) * 4), gl.constexpr((gl.float16,) * 4)
EIGHT_BFLOAT16, EIGHT_FLOAT16 = gl.constexpr((gl.bfloat16,) * 8), gl.constexpr((gl.float16,) * 8)
LANES = gl.constexpr(32)  # int32 of scales of 64 outputs
WORDS = gl.constexpr(  # of a tile: warp, lane, thread, step of 16 inputs
    gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2]],
        [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        [[1, 0, 0, 0], [2, 0, 0, 0]],
        [],
        [4, 8, 4, 4],
    )
)
HALVES = gl.constexpr(  # the same of two words, each of which stands for two
    gl.DistributedLinearLayout(
        [[0, 0, 0, 1]],
        [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        [[1, 0, 0, 0], [2, 0, 0, 0]],
        [],
        [4, 8, 4, 2],
    )
)


@gluon.jit
def places_of(block, NUM_GROUPS: gl.constexpr, GROUP: gl.constexpr, BITS: gl.constexpr):
    """Where scales of the first groups lie, for each warp and lane; of small groups 2 or 4, for the words."""
    NUM: gl.constexpr = HALF * 4 // BITS // GROUP  # of a chunk
    LAYOUT: gl.constexpr = HALVES if NUM == 2 else WORDS
    warp = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    lane = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    at = warp[:, None] * 8 + lane[None, :] + block * (NUM_GROUPS * LANES)
    at = at[:, :, None][:, :, :, None]
    if NUM > 1:
        group = gl.arange(0, NUM, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
        at += (group * LANES)[None, :][:, None, :][:, :, None, :]
    return at


@gluon.jit
def over_words(pair, word):
    """A number of each word, where `places_of` had fewer."""
    if pair.shape[3] == 2:
        pair = gl.convert_layout(gl.join(pair, pair).reshape([4, 8, 1, 4]), WORDS, assert_trivial=True)
    return gl.broadcast(pair, word)[0]


@gluon.jit
def doubled_over_words(pair, word):
    """Both numbers of a pair, each twice, for each word."""
    first, second = doubled(pair)
    return over_words(first, word), over_words(second, word)


@gluon.jit
def load_pairs(ptr, at, chunk, CHUNK: gl.constexpr, NUM_GROUPS: gl.constexpr, GROUP: gl.constexpr):
    """The pairs of the groups of a chunk of inputs; of groups that are not there the last ones."""
    if ptr is None:
        return gl.zeros([1], gl.int32, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, WORDS))))
    else:
        PER: gl.constexpr = CHUNK // GROUP if GROUP < CHUNK else 1
        group = gl.minimum(chunk * CHUNK // GROUP, NUM_GROUPS - PER)
        return gl.load(ptr + at + group * LANES)


@gluon.jit
def load_chunk(tables, at, chunk, CHUNK: gl.constexpr, NUM_GROUPS: gl.constexpr, GROUP: gl.constexpr):
    """The pairs of scales, zeros and offsets."""
    scale_ptr, zero_ptr, offset_ptr = tables
    return (
        load_pairs(scale_ptr, at, chunk, CHUNK, NUM_GROUPS, GROUP),
        load_pairs(zero_ptr, at, chunk, CHUNK, NUM_GROUPS, GROUP),
        load_pairs(offset_ptr, at, chunk, CHUNK, NUM_GROUPS, GROUP),
    )


@gluon.jit
def load_half(tables, at, half, NUM_GROUPS: gl.constexpr, GROUP: gl.constexpr, BITS: gl.constexpr):
    """Those of a tile: of its only chunk, or of both."""
    if BITS == 4 or GROUP >= HALF:
        pairs = load_chunk(tables, at, half, HALF, NUM_GROUPS, GROUP)
        return pairs, pairs
    else:
        return (
            load_chunk(tables, at, 2 * half, HALF // 2, NUM_GROUPS, GROUP),
            load_chunk(tables, at, 2 * half + 1, HALF // 2, NUM_GROUPS, GROUP),
        )


@gluon.jit
def load_all(tables, at, step, NUM_GROUPS: gl.constexpr, GROUP: gl.constexpr, BITS: gl.constexpr):
    """Those of a step: of its first half, and of the second one."""
    first = load_half(tables, at, 2 * step, NUM_GROUPS, GROUP, BITS)
    if GROUP % STEP == 0:
        return first, first
    else:
        return first, load_half(tables, at, 2 * step + 1, NUM_GROUPS, GROUP, BITS)


@gluon.jit
def ask_for(ptr, block, first_group, last_group, NUM_GROUPS: gl.constexpr, PADDED: gl.constexpr):
    """Have the scales of these groups in the L2 cache, a line of memory each."""
    if ptr is not None:
        LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        group = first_group + gl.arange(0, PADDED, LINE)
        at = ptr + (block * NUM_GROUPS + gl.minimum(group, last_group)) * LANES
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def numbers_of(
    tiles, number, pairs, HAS_ZERO: gl.constexpr, HAS_OFFSET: gl.constexpr, MIDDLE: gl.constexpr,
    ASM: gl.constexpr, ADD: gl.constexpr, BITS: gl.constexpr, dtype: gl.constexpr, OPERAND: gl.constexpr,
):  # fmt: skip
    """The numbers of a tile of codes in shared memory, [64, 64], as the left operand of a product."""
    if BITS == 4:
        v = unpacked(tiles.index(number), pairs[0], HAS_ZERO, HAS_OFFSET, MIDDLE, ASM, ADD, BITS, dtype)
        low = gl.join(gl.join(v[0], v[1]), gl.join(v[2], v[3]))
        high = gl.join(gl.join(v[4], v[5]), gl.join(v[6], v[7]))
        t = gl.join(low, high).reshape([4, 8, 4, 4, 2, 2, 2])  # warp, lane, thread, step, a, b, c
        t = t.permute((0, 5, 1, 3, 6, 2, 4)).reshape([LINES, HALF])
        return gl.convert_layout(t, OPERAND, assert_trivial=True)
    else:
        tile = tiles.index(2 * number), tiles.index(2 * number + 1)
        v = unpacked(tile[0], pairs[0], HAS_ZERO, HAS_OFFSET, MIDDLE, ASM, ADD, BITS, dtype)
        w = unpacked(tile[1], pairs[1], HAS_ZERO, HAS_OFFSET, MIDDLE, ASM, ADD, BITS, dtype)
        low = gl.join(gl.join(v[0], v[1]), gl.join(v[2], v[3]))
        high = gl.join(gl.join(w[0], w[1]), gl.join(w[2], w[3]))
        t = gl.join(low, high).reshape([4, 8, 4, 2, 2, 2, 2, 2])  # warp, lane, thread, step, c, a, b, half
        t = t.permute((0, 6, 1, 7, 3, 4, 2, 5)).reshape([LINES, HALF])
        return gl.convert_layout(t, OPERAND, assert_trivial=True)


@gluon.jit
def unpacked(
    chunk, pairs, HAS_ZERO: gl.constexpr, HAS_OFFSET: gl.constexpr, MIDDLE: gl.constexpr,
    ASM: gl.constexpr, ADD: gl.constexpr, BITS: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """The numbers of a chunk's words [4, 8, 4, 4]: eight of each, or four of 8 bits."""
    FLAT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    word = gl.convert_layout(chunk.load(FLAT).reshape([4, 8, 4, 4]), WORDS, assert_trivial=True)
    scale, zero, offset = pairs
    scale, other_scale = doubled_over_words(scale, word)
    if HAS_ZERO:
        zero, other_zero = doubled_over_words(zero, word)
        zero, other_zero = raised(zero, MIDDLE, ADD), raised(other_zero, MIDDLE, ADD)
    else:
        zero = gl.full([4, 8, 4, 4], MIDDLE, gl.int32, WORDS)
        other_zero = zero
    if HAS_OFFSET:
        # Signs are turned: it is added.
        offset, other_offset = doubled_over_words(offset ^ -2147450880, word)
    else:
        offset, other_offset = scale, scale
    args = word, scale, other_scale, zero, other_zero, offset, other_offset
    if BITS == 4:
        return gl.inline_asm_elementwise(
            ASM,
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r,r,r,r",
            args,
            dtype=EIGHT_BFLOAT16 if dtype == gl.bfloat16 else EIGHT_FLOAT16,
            is_pure=True,
            pack=1,
        )
    else:
        return gl.inline_asm_elementwise(
            ASM,
            "=h,=h,=h,=h,r,r,r,r,r,r,r",
            args,
            dtype=FOUR_BFLOAT16 if dtype == gl.bfloat16 else FOUR_FLOAT16,
            is_pure=True,
            pack=1,
        )


@gluon.jit
def raised(pair, MIDDLE: gl.constexpr, ADD: gl.constexpr):
    """Zeros and what codes in mantissas have above, both twice in an int32."""
    middle = gl.full_like(pair, MIDDLE)
    return gl.inline_asm_elementwise(ADD, "=r,r,r", [pair, middle], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def range_of(num_tiles, SPLITS: gl.constexpr):
    """(the first one, number) of the steps of this program."""
    total, split = (num_tiles + 1) // 2, gl.program_id(2)
    first = total * split // SPLITS
    return first, total * (split + 1) // SPLITS - first


@gluon.jit
def copy_codes(
    words, parts, full, stage, tile, is_step, num_tiles,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, BITS: gl.constexpr,
):  # fmt: skip
    """Copy a step of this program's codes; of which group, then which stage is a part."""
    for group in gl.static_range(GROUPS):
        block = gl.program_id(1) * GROUPS + group
        copy_box(
            words,
            [(block * num_tiles + tile) * (4 * BITS), 0],
            full,
            parts.index(group * STAGES + stage),
            pred=is_step,
        )


@gluon.jit
def copy_x(x, parts, full, stage, tile, is_step, ROWS: gl.constexpr):
    """Copy a step of x."""
    for half in gl.static_range(2):
        at = [gl.program_id(0) * ROWS, (tile + half) * HALF]
        copy_box(x, at, full, parts.index(2 * stage + half), pred=is_step)


@gluon.jit
def copy_steps(
    operands, num_tiles,
    ROWS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr,
    BITS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """The copying warp: the first steps, as many as there is room for: W, wait, x; then the others."""
    x, words, x_parts, w_parts, bars = operands
    BYTES: gl.constexpr = 2 * ROWS * LINE_BYTES + GROUPS * CODES * BITS // 4
    let_next_start(DEPENDENT)
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
        mbarrier.init(bars.index(STAGES + i), count=GROUPS)
    fence_async_shared()
    mbarrier.arrive(bars.index(2 * STAGES))
    first, num_steps = range_of(num_tiles, SPLITS)
    for i in gl.static_range(STAGES):
        mbarrier.expect(bars.index(i), BYTES, pred=i < num_steps)
        copy_codes(
            words, w_parts, bars.index(i), i, 2 * (first + i), i < num_steps, num_tiles, GROUPS, STAGES, BITS,
        )  # fmt: skip
    wait(DEPENDENT)
    for i in gl.static_range(STAGES):
        copy_x(x, x_parts, bars.index(i), i, 2 * (first + i), i < num_steps, ROWS)
    for step in range(STAGES, num_steps):
        stage, tile = step % STAGES, 2 * (first + step)
        mbarrier.wait(bars.index(STAGES + stage), (step // STAGES & 1) ^ 1)
        mbarrier.expect(bars.index(stage), BYTES)
        copy_x(x, x_parts, bars.index(stage), stage, tile, True, ROWS)
        copy_codes(words, w_parts, bars.index(stage), stage, tile, True, num_tiles, GROUPS, STAGES, BITS)


@gluon.jit
def multiply_steps(
    GROUP_OF_WARPS: gl.constexpr, operands, tables, results, sizes,
    ASM: gl.constexpr, ADD: gl.constexpr, MIDDLE: gl.constexpr,
    BITS: gl.constexpr, GROUP: gl.constexpr, NUM_GROUPS: gl.constexpr, PADDED: gl.constexpr,
    ROWS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr,
    ACT: gl.constexpr,
):  # fmt: skip
    """A multiplying group of warps: its 64 outputs with all rows of the tile.

    While one half of a step is multiplied, the numbers of the next one are made.
    """
    x, words, x_parts, w_parts, bars = operands
    scale_ptr, zero_ptr, offset_ptr = tables
    dtype: gl.constexpr = x_parts.dtype
    num_rows, num_out, num_tiles = sizes
    first, num_steps = range_of(num_tiles, SPLITS)
    tiles = seen_as(w_parts, gl.int32, BITS // 2 * GROUPS * STAGES, 16, 32)
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    HAS_ZERO: gl.constexpr = zero_ptr is not None
    HAS_OFFSET: gl.constexpr = offset_ptr is not None
    y = gl.zeros([LINES, ROWS], gl.float32, PRODUCT)
    block = gl.program_id(1) * GROUPS + GROUP_OF_WARPS
    known_block = gl.minimum(block, (num_out - 1) // LINES)
    first_group = first * STEP // GROUP
    last_group = gl.minimum((first + num_steps) * STEP // GROUP, NUM_GROUPS - 1)
    ask_for(scale_ptr, known_block, first_group, last_group, NUM_GROUPS, PADDED)
    ask_for(zero_ptr, known_block, first_group, last_group, NUM_GROUPS, PADDED)
    ask_for(offset_ptr, known_block, first_group, last_group, NUM_GROUPS, PADDED)
    at = places_of(known_block, NUM_GROUPS, GROUP, BITS)
    # Scales are asked for two steps ahead: they come from the L2 cache.
    pairs, other_pairs = load_all(tables, at, first, NUM_GROUPS, GROUP, BITS)
    next_pairs, next_others = load_all(tables, at, first + 1, NUM_GROUPS, GROUP, BITS)
    mbarrier.wait(bars.index(2 * STAGES), 0)
    mbarrier.wait(bars.index(0), 0)
    own: gl.constexpr = GROUP_OF_WARPS * STAGES
    w = numbers_of(
        tiles, 2 * own, pairs, HAS_ZERO, HAS_OFFSET, MIDDLE, ASM, ADD, BITS, dtype, OPERAND,
        )  # fmt: skip
    for step in range(num_steps):
        stage, next_stage = step % STAGES, (step + 1) % STAGES
        y = warpgroup_mma(w, x_parts.index(2 * stage).permute((1, 0)), y, is_async=True)
        later_pairs, later_others = load_all(tables, at, first + step + 2, NUM_GROUPS, GROUP, BITS)
        other = numbers_of(
            tiles, 2 * (own + stage) + 1, other_pairs,
            HAS_ZERO, HAS_OFFSET, MIDDLE, ASM, ADD, BITS, dtype, OPERAND,
        )  # fmt: skip
        y, w = warpgroup_mma_wait(0, deps=[y, w])
        y = warpgroup_mma(other, x_parts.index(2 * stage + 1).permute((1, 0)), y, is_async=True)
        mbarrier.wait(bars.index(next_stage), (step + 1) // STAGES & 1, pred=step + 1 < num_steps)
        w = numbers_of(
            tiles, 2 * (own + next_stage), next_pairs,
            HAS_ZERO, HAS_OFFSET, MIDDLE, ASM, ADD, BITS, dtype, OPERAND,
        )  # fmt: skip
        other_pairs, next_pairs, next_others = next_others, later_pairs, later_others
        y, other = warpgroup_mma_wait(0, deps=[y, other])
        mbarrier.arrive(bars.index(STAGES + stage))
    barrier()
    bias_ptr, out_ptr, partial_ptr, arrivals_ptr = results
    finish_tile(
        y, w_parts, GROUP_OF_WARPS, (bias_ptr, None, None, out_ptr, partial_ptr, arrivals_ptr), sizes,
        STAGES * CODES * BITS // 4, ROWS, GROUPS, SPLITS, ACT,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["num_rows"])
def packed_hopper_kernel(
    x,  # descriptor of [M, K], in boxes [ROWS, 64]
    words,  # descriptor of [tiles * 4 BITS, 32], in boxes [8 BITS, 32]
    scale_ptr,  # int32 [N / 64, NUM_GROUPS, 32], as are the next two
    zero_ptr,
    offset_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrivals_ptr,
    num_rows,
    num_out,
    num_tiles,  # of inputs
    ASM: gl.constexpr,  # makes numbers of codes
    ADD: gl.constexpr,  # adds two 16-bit numbers to two
    MIDDLE: gl.constexpr,  # what is subtracted of all codes, twice in an int32
    BITS: gl.constexpr,
    GROUP: gl.constexpr,  # inputs that share a scale
    NUM_GROUPS: gl.constexpr,
    PADDED: gl.constexpr,  # a power of two of groups, at least as many as a program's inputs have
    ROWS: gl.constexpr,
    GROUPS: gl.constexpr,  # of four warps
    STAGES: gl.constexpr,
    SPLITS: gl.constexpr,
    ACT: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """One program a tile of rows, a block of outputs and a range of inputs."""
    x_parts = gl.allocate_shared_memory(x.dtype, [2 * STAGES, ROWS, HALF], x.layout)
    w_parts = gl.allocate_shared_memory(gl.int32, [GROUPS * STAGES, 8 * BITS, 32], words.layout)
    # First those that say "full", then those that say "empty", and that all of these are prepared.
    bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES + 1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bars.index(2 * STAGES), count=1)
    fence_async_shared()
    operands, sizes = (x, words, x_parts, w_parts, bars), (num_rows, num_out, num_tiles)
    tables, results = (scale_ptr, zero_ptr, offset_ptr), (bias_ptr, out_ptr, partial_ptr, arrivals_ptr)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (multiply_steps, (
                    gl.constexpr(0), operands, tables, results, sizes, ASM, ADD, MIDDLE,
                    BITS, GROUP, NUM_GROUPS, PADDED, ROWS, GROUPS, STAGES, SPLITS, ACT,
                )),
                (copy_steps, (operands, num_tiles, ROWS, GROUPS, STAGES, SPLITS, BITS, DEPENDENT)),
            ],
            [1],
            [40],
        )  # fmt: skip
    elif GROUPS == 3:
        gl.warp_specialize(
            [
                (multiply_steps, (
                    gl.constexpr(0), operands, tables, results, sizes, ASM, ADD, MIDDLE,
                    BITS, GROUP, NUM_GROUPS, PADDED, ROWS, GROUPS, STAGES, SPLITS, ACT,
                )),
                (multiply_steps, (
                    gl.constexpr(1), operands, tables, results, sizes, ASM, ADD, MIDDLE,
                    BITS, GROUP, NUM_GROUPS, PADDED, ROWS, GROUPS, STAGES, SPLITS, ACT,
                )),
                (multiply_steps, (
                    gl.constexpr(2), operands, tables, results, sizes, ASM, ADD, MIDDLE,
                    BITS, GROUP, NUM_GROUPS, PADDED, ROWS, GROUPS, STAGES, SPLITS, ACT,
                )),
                (copy_steps, (operands, num_tiles, ROWS, GROUPS, STAGES, SPLITS, BITS, DEPENDENT)),
            ],
            [4, 4, 1],
            [152, 152, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (multiply_steps, (
                    gl.constexpr(0), operands, tables, results, sizes, ASM, ADD, MIDDLE,
                    BITS, GROUP, NUM_GROUPS, PADDED, ROWS, GROUPS, STAGES, SPLITS, ACT,
                )),
                (multiply_steps, (
                    gl.constexpr(1), operands, tables, results, sizes, ASM, ADD, MIDDLE,
                    BITS, GROUP, NUM_GROUPS, PADDED, ROWS, GROUPS, STAGES, SPLITS, ACT,
                )),
                (copy_steps, (operands, num_tiles, ROWS, GROUPS, STAGES, SPLITS, BITS, DEPENDENT)),
            ],
            [4, 1],
            [232 if ROWS > 64 else 160, 40],
        )  # fmt: skip
