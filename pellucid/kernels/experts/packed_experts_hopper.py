# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0915, PLR0917, SIM102
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportOptionalCall=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
"""Grouped products of experts whose weights are packed, on Hopper GPUs, for any number of rows.

As `packed_hopper.py`, whose way of making numbers of codes this is: one warp copies steps of codes and of
their scales by the TMA unit, and one those of x, groups of four warps unpack 64 outputs each in registers
and multiply them with all rows of the tile, or with half of them where its expert has no more.  A program is
a tile of rows of one expert and a block of its outputs; nobody shares a sum.  Rows of an expert lie side by
side in x, since the TMA unit copies no others; what else its box holds, other experts' rows, is multiplied
for nobody.  Of few tokens a tile is a pair, and nothing is sorted.  Down follows gates and ups, and nothing
else, so its codes are on their way before these have ended; so are those of gates and ups, where the first
tiles are the experts' own, whatever rows there are.
The reference is `mix_packed_ref`.

Legend: E experts, P pairs, N outputs of an expert, gates and ups by turns of eight, K inputs, G groups.
"""

from __future__ import annotations

from typing import NamedTuple

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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pellucid.kernels.attention.hopper_prefill import barrier, boxes_of, copy_box
from pellucid.kernels.lang.dependent import dependent, let_next_start, wait
from pellucid.kernels.packed.packed_hopper import (
    CODES,
    HALF,
    HALVES,
    LANES,
    STEP,
    WORDS,
    assembly,
    middle_of,
    numbers_of,
    type_of,
)
from pellucid.kernels.packed.packed_weight import PackedWeight
from pellucid.kernels.pointwise.silu_mul import activate
from pellucid.kernels.products.hopper_matmul import (
    EIGHT,
    HAS_REINTERPRET,
    LINE_BYTES,
    LINES,
    rounded,
    seen_as,
)
from pellucid.kernels.products.tiles import RING_BYTES

MULTIPROCESSORS = 132  # of a Hopper GPU
STAGES = 4  # of steps: more were slower
REGISTERS = 65_536  # of a multiprocessor
COPYING = gl.constexpr(40)  # registers of the copying warp
MOST_SCALES = 1024  # bytes of a step's scales for 64 outputs


class ExpertTile(NamedTuple):
    """How the product of one expert's rows is cut."""

    rows: int  # 8, 16, 32, 64 or 128
    groups: int  # of four warps, 64 outputs each: 1, 2 or 3
    stages: int
    programs: int = 1  # that a multiprocessor has registers for at once


class Work(NamedTuple):
    """What the programs of a grouped product are told.

    few: tiles are pairs, and `tiles` has the expert of each.  in_turn: the first tiles are the experts' own.
    """

    order: Tensor  # as `Sorted` has them
    starts: Tensor
    tiles: Tensor
    top_k: int
    num_experts: int
    few: bool = False
    in_turn: bool = False


def boxes_of_groups(lanes: Tensor | None, group: int) -> TensorDescriptor | None:
    """Scales, say, [tiles, G, 64] for copies of the groups of a step."""
    if lanes is None:
        return None
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    pairs = lanes.view(torch.int32).view(-1, LANES.value)
    return TensorDescriptor.from_tensor(pairs, [groups_of_step(group), LANES.value], layout)


def groups_of_step(group: int) -> int:
    """How many groups of inputs a step may touch."""
    if group <= HALF.value:
        return STEP.value // group
    return 1 if group % STEP.value == 0 else 2


def expert_tile(rows: int, num_blocks: int, bits: int, num_tiles: int) -> ExpertTile:
    """For so many tiles of rows, or more, and experts of so many blocks of 64 outputs: measured on an H200.

    Programs beside each other hide how each begins and ends.  Where all find room at once, less of them on a
    multiprocessor leave none idle, and longer rings are full before what is multiplied has come.
    """
    if rows <= 32:
        most = max(1, -(-num_blocks * num_tiles // MULTIPROCESSORS))
        groups, programs = 1, 4 if most > 4 else max(2, min(3, most))
    elif rows == 64:
        groups, programs = 2, 2
    else:
        groups, programs = 3 if num_blocks % 3 == 0 else 2, 1
    codes = CODES.value * bits // 4
    stage = groups * (codes + MOST_SCALES) + 2 * rows * LINE_BYTES.value
    whole = max(1, rows * LINE_BYTES.value // codes)  # steps that make room for results
    room = min(RING_BYTES // programs // stage, 8 if programs == 2 and groups == 1 else STAGES)
    return ExpertTile(rows, groups, max(whole, room // whole * whole), programs)


def part_of(rows: int) -> int:
    """Rows that are copied at a time: of a tile's parts, those in which an expert has none are left out."""
    return min(rows, max(16, rows // 4))


def registers_of(tile: ExpertTile) -> tuple[int, int]:
    """Of a thread: at first, and while it multiplies, when the copying warp has given up its own."""
    warps = 4 * (tile.groups + 1)  # it counts as four
    at_first = REGISTERS // (32 * warps * tile.programs) // 8 * 8
    multiplying = (at_first * warps - COPYING.value * 4) // (4 * tile.groups) // 8 * 8
    return at_first, min(multiplying, 232)


def packed_experts_hopper(
    x: Tensor,
    weight: PackedWeight,
    out: Tensor,
    work: Work,
    tile: ExpertTile,
    *,
    bias: Tensor | None = None,
    act: str | None = None,
    limit: float | None = None,
    alpha: float = 1.0,
) -> Tensor:
    """Every pair's row times its expert's W.

    act: x [P, K], in the order of `work`, or [T, K] if there are few -> out [P, N / 2], in that order.  None:
    x [P, K] in that order -> out [P, N], pair by pair.  bias: [E, N], gates and ups by turns.
    """
    num_blocks, num_tiles = weight.words.shape[0] // work.num_experts, weight.words.shape[1]
    num_out = out.shape[1] * (2 if act else 1)
    assert weight.gated == (act is not None) and x.dtype == weight.dtype and x.shape[1] == weight.num_in
    assert out.is_contiguous() and tile.stages * CODES.value * weight.bits // 4 % (
        tile.rows * LINE_BYTES.value
    ) in (0, tile.rows * 64), tile
    num = len(work.tiles)
    if not num:
        return out
    at_first, multiplying = registers_of(tile)
    num_groups = weight.scale.shape[1]
    packed_experts_hopper_kernel[(num * triton.cdiv(num_blocks, tile.groups),)](
        boxes_of(x, [part_of(tile.rows), HALF.value]),
        boxes_of(weight.words.view(-1, 32), [8 * weight.bits, 32]),
        *(boxes_of_groups(each, weight.group) for each in (weight.scale, weight.zero, weight.offset)),
        bias,
        out,
        work.order,
        work.starts,
        work.tiles,
        work.num_experts,
        num_out,
        num_tiles,
        limit or 0.0,
        alpha,
        ASM=assembly(
            *(weight.numbers, weight.bits, weight.dtype, weight.table_bits),
            has_offset=weight.offset is not None,
            is_folded=weight.raised > 0,
        ),
        ADD=f"add.rn.{type_of(weight.dtype)} $0, $1, $2;",
        MIDDLE=middle_of(weight.middle, weight.bits, weight.dtype),
        BITS=weight.bits,
        GROUP=weight.group,
        NUM_GROUPS=num_groups,
        NUM_BLOCKS=num_blocks,
        TOP_K=work.top_k,
        FEW=work.few,
        IN_TURN=work.in_turn,
        ROWS=tile.rows,
        GROUPS=tile.groups,
        STAGES=tile.stages,
        GATED=act is not None,
        ACT=None if limit is not None else act,
        ODD=num_tiles % 2,
        REGISTERS=multiplying,
        num_warps=4,
        maxnreg=at_first,
        **dependent(),
    )
    return out


@gluon.jit
def place_of(
    work, num_experts,
    NUM_BLOCKS: gl.constexpr, GROUPS: gl.constexpr, TOP_K: gl.constexpr,
    FEW: gl.constexpr, IN_TURN: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Of this program: expert, first block of outputs, first row of x, first place, where its expert's end.

    Nobody's tile has the expert `num_experts`.  Read from the L2 cache: down has not waited yet.
    """
    order_ptr, starts_ptr, tiles_ptr = work
    width = (NUM_BLOCKS + GROUPS - 1) // GROUPS
    tile, block = gl.program_id(0) // width, gl.program_id(0) % width * GROUPS
    if FEW:
        expert = gl.load(tiles_ptr + tile, cache_modifier=".cg")
        row = tile // TOP_K if GATED else tile
        return expert, block, row, tile, tile + 1
    else:
        is_own = tile < (num_experts if IN_TURN else 0)
        if is_own:
            first = gl.load(starts_ptr + tile, cache_modifier=".cg")
            last = gl.load(starts_ptr + tile + 1, cache_modifier=".cg")
            expert = gl.where(first < last, tile, num_experts)
        else:
            expert = gl.load(tiles_ptr + 2 * tile, cache_modifier=".cg")
            first = gl.load(tiles_ptr + 2 * tile + 1, cache_modifier=".cg")
            last = gl.load(starts_ptr + gl.minimum(expert + 1, num_experts), cache_modifier=".cg")
        return expert, block, first, first, last


@gluon.jit
def copy_rows(
    x, parts, full, stage, tile, row, is_step,
    PARTS: gl.constexpr, ROWS: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Copy the first PARTS parts of a step of x."""
    mbarrier.expect(full, PARTS * 2 * PART * LINE_BYTES, pred=is_step)
    for part in gl.static_range(PARTS):
        for half in gl.static_range(2):
            at = [row + part * PART, (tile + half) * HALF]
            copy_box(x, at, full, parts.index((2 * stage + half) * (ROWS // PART) + part), pred=is_step)


@gluon.jit
def copy_codes(
    words, tables, parts, table_parts, full, stage, tile, first_block, num_tiles, is_step,
    BITS: gl.constexpr, GROUP: gl.constexpr, NUM_GROUPS: gl.constexpr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy a step of this program's codes and scales; of which group, then which stage is a part."""
    for group in gl.static_range(GROUPS):
        line = ((first_block + group) * num_tiles + tile) * (4 * BITS)
        part = group * STAGES + stage
        copy_box(words, [line, 0], full, parts.index(part), pred=is_step)
        line = (first_block + group) * NUM_GROUPS + tile * HALF // GROUP
        for i in gl.static_range(3):
            if tables[i] is not None:
                copy_box(tables[i], [line, 0], full, table_parts[i].index(part), pred=is_step)


@gluon.constexpr_function
def layout_of_groups(num):
    """Of [groups, 32]: those that a thread's four words have, in each thread of its row."""
    registers = {1: [[0, 0], [0, 0]], 2: [[1, 0]], 4: [[1, 0], [2, 0]]}[num]
    lanes = [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 8], [0, 16]], [], [num, 32])


@gluon.jit
def pairs_of(
    table, parts, part, half, chunk: gl.constexpr, BITS: gl.constexpr, GROUP: gl.constexpr
):  # fmt: skip
    """A table's pairs of a chunk, for each warp and lane.  half: of all steps' halves."""
    CHUNK: gl.constexpr = HALF * 4 // BITS
    NUM: gl.constexpr = CHUNK // GROUP if GROUP < CHUNK else 1
    if table is None:
        return gl.zeros([1], gl.int32, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, WORDS))))
    else:
        LAYOUT: gl.constexpr = HALVES if NUM == 2 else WORDS
        SHAPE: gl.constexpr = [parts.shape[0] * parts.shape[1] // NUM, NUM, 32]
        if HAS_REINTERPRET:
            chunks = parts.reinterpret(gl.int32, SHAPE, parts.layout)
        else:
            chunks = parts._reinterpret(gl.int32, SHAPE, parts.layout)
        first = part * (parts.shape[1] // NUM)
        if GROUP <= HALF:
            first += (half % 2 * HALF + chunk * CHUNK) // (GROUP * NUM)
        elif GROUP % STEP != 0:
            first += half * HALF // GROUP - half // 2 * STEP // GROUP
        pairs = chunks.index(first).load(layout_of_groups(NUM)).reshape([NUM, 4, 8])
        pairs = pairs.permute((1, 2, 0)).reshape([4, 8, 1, NUM])
        return gl.convert_layout(pairs, LAYOUT, assert_trivial=True)


@gluon.jit
def pairs_of_chunk(
    tables, table_parts, part, half, chunk: gl.constexpr, BITS: gl.constexpr, GROUP: gl.constexpr
):  # fmt: skip
    """Those of scales, zeros and offsets."""
    return (
        pairs_of(tables[0], table_parts[0], part, half, chunk, BITS, GROUP),
        pairs_of(tables[1], table_parts[1], part, half, chunk, BITS, GROUP),
        pairs_of(tables[2], table_parts[2], part, half, chunk, BITS, GROUP),
    )


@gluon.jit
def pairs_of_half(tables, table_parts, part, half, BITS: gl.constexpr, GROUP: gl.constexpr):
    """Those of half a step: of its only chunk, or of both."""
    first = pairs_of_chunk(tables, table_parts, part, half, 0, BITS, GROUP)
    if BITS == 4:
        return first, first
    else:
        return first, pairs_of_chunk(tables, table_parts, part, half, 1, BITS, GROUP)


@gluon.jit
def begin(GATED: gl.constexpr, DEPENDENT: gl.constexpr):
    """Of gates and ups: have what was before this ended, and only then let the next kernel start.

    That is the product of what they let through, which so knows where its pairs are before it waits.
    """
    if GATED:
        wait(DEPENDENT)
    let_next_start(DEPENDENT)


@gluon.jit
def copy_steps(
    operands, tables, table_parts, work, num_experts, num_tiles,
    BITS: gl.constexpr, GROUP: gl.constexpr, NUM_GROUPS: gl.constexpr,
    NUM_BLOCKS: gl.constexpr, TOP_K: gl.constexpr, FEW: gl.constexpr, IN_TURN: gl.constexpr,
    GATED: gl.constexpr, ROWS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """The warp that copies codes and scales: of the first steps, as many as have room; then of the others.

    What is copied for an expert whom no row has chosen, which shows behind the wait, has to come, too.
    """
    x, words, x_parts, w_parts, bars = operands
    NUM_TABLES: gl.constexpr = 1 + (tables[1] is not None) + (tables[2] is not None)
    SCALES: gl.constexpr = tables[0].block_shape[0] * LINE_BYTES * NUM_TABLES
    BYTES: gl.constexpr = GROUPS * (CODES * BITS // 4 + SCALES)
    num_steps = (num_tiles + 1) // 2
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=2)
        mbarrier.init(bars.index(STAGES + i), count=GROUPS)
    fence_async_shared()
    mbarrier.arrive(bars.index(2 * STAGES))
    width = (NUM_BLOCKS + GROUPS - 1) // GROUPS
    own = gl.program_id(0) // width
    is_own = own < (num_experts if IN_TURN else 0)
    if IN_TURN:
        first_block = own * NUM_BLOCKS + gl.program_id(0) % width * GROUPS
        for i in gl.static_range(STAGES):
            is_step = is_own & (i < num_steps)
            mbarrier.expect(bars.index(i), BYTES, pred=is_step)
            copy_codes(
                words, tables, w_parts, table_parts, bars.index(i), i, 2 * i, first_block, num_tiles,
                is_step, BITS, GROUP, NUM_GROUPS, GROUPS, STAGES,
            )  # fmt: skip
    begin(GATED, DEPENDENT)
    expert, block, row, place, end = place_of(
        work, num_experts, NUM_BLOCKS, GROUPS, TOP_K, FEW, IN_TURN, GATED
    )  # fmt: skip
    is_anybodys, known = expert < num_experts, gl.minimum(expert, num_experts - 1)
    first_block = known * NUM_BLOCKS + block
    for i in gl.static_range(STAGES):
        is_step = is_anybodys & (i < num_steps)
        if IN_TURN:
            is_step = is_step & (own >= num_experts)
        mbarrier.expect(bars.index(i), BYTES, pred=is_step)
        copy_codes(
            words, tables, w_parts, table_parts, bars.index(i), i, 2 * i, first_block, num_tiles, is_step,
            BITS, GROUP, NUM_GROUPS, GROUPS, STAGES,
        )  # fmt: skip
    if IN_TURN:
        if is_own & (expert == num_experts):
            for i in gl.static_range(STAGES):
                mbarrier.arrive(bars.index(i), pred=i < num_steps)
                mbarrier.wait(bars.index(i), 0, pred=i < num_steps)
    if is_anybodys:
        for step in range(STAGES, num_steps):
            stage, tile = step % STAGES, 2 * step
            mbarrier.wait(bars.index(STAGES + stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(bars.index(stage), BYTES)
            copy_codes(
                words, tables, w_parts, table_parts, bars.index(stage), stage, tile, first_block, num_tiles,
                True, BITS, GROUP, NUM_GROUPS, GROUPS, STAGES,
            )  # fmt: skip
    if not GATED:
        wait(DEPENDENT)


@gluon.jit
def copy_rows_of_steps(
    operands, work, num_experts, num_tiles,
    NUM_BLOCKS: gl.constexpr, TOP_K: gl.constexpr, FEW: gl.constexpr, IN_TURN: gl.constexpr,
    GATED: gl.constexpr, ROWS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """The warp that copies x, for which down waits: as many parts of each step as have rows."""
    x, bars = operands[0], operands[4]
    begin(GATED, DEPENDENT)
    mbarrier.wait(bars.index(2 * STAGES), 0)
    expert, _, row, place, end = place_of(
        work, num_experts, NUM_BLOCKS, GROUPS, TOP_K, FEW, IN_TURN, GATED
    )  # fmt: skip
    if not GATED:
        wait(DEPENDENT)
    if expert < num_experts:
        PART: gl.constexpr = x.block_shape[0]
        NUM: gl.constexpr = ROWS // PART
        for last in gl.static_range(NUM):
            has_those = end - place > last * PART
            if last + 1 < NUM:
                has_those = has_those & (end - place <= (last + 1) * PART)
            if has_those:
                copy_parts(last + 1, operands, row, num_tiles, ROWS, STAGES)


@gluon.jit
def copy_parts(
    PARTS: gl.constexpr, operands, row, num_tiles, ROWS: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Of each step as many parts: a number that is known needs no questions at each copy."""
    x, words, x_parts, w_parts, bars = operands
    PART: gl.constexpr = x.block_shape[0]
    num_steps = (num_tiles + 1) // 2
    for i in gl.static_range(STAGES):
        copy_rows(x, x_parts, bars.index(i), i, 2 * i, row, i < num_steps, PARTS, ROWS, PART)
    for step in range(STAGES, num_steps):
        stage = step % STAGES
        mbarrier.wait(bars.index(STAGES + stage), (step // STAGES & 1) ^ 1)
        copy_rows(x, x_parts, bars.index(stage), stage, 2 * step, row, True, PARTS, ROWS, PART)


@gluon.jit
def gated(opening, up, limit, alpha, ACT: gl.constexpr):
    """As `gate_ref` of experts.py, in float32.  ACT None: with a limit."""
    if ACT is None:
        opening = gl.minimum(opening, limit)
        up = gl.minimum(gl.maximum(up, -limit), limit)
        return opening / (1.0 + gl.exp(-(opening * alpha))) * (up + 1.0)
    else:
        return activate(opening, ACT) * up


@gluon.jit
def store_tile(
    y, room, place, end, block, expert, order_ptr, bias_ptr, out_ptr, num_out, limit, alpha,
    FEW: gl.constexpr, GATED: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """Add the bias to y [LINES, rows], gate, turn, store; of few, and of what is gated, in order."""
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    rows: gl.constexpr = y.shape[1]
    if bias_ptr is not None:
        line = gl.arange(0, LINES, gl.SliceLayout(1, y.type.layout))
        n = block * LINES + line
        if GATED:
            n = block * LINES + (line // 16 * EIGHT + line % EIGHT) * 2 + line // EIGHT % 2
        y += gl.load(bias_ptr + expert * num_out + n, mask=n < num_out, other=0.0).to(gl.float32)[:, None]
    if GATED:
        opening, up = y.reshape([4, 2, EIGHT, rows]).permute((0, 2, 3, 1)).split()
        y = gated(opening, up, limit, alpha, ACT).reshape([LINES // 2, rows])
        num_out = num_out // 2
    width: gl.constexpr = y.shape[0]
    # By way of shared memory, so that threads write whole lines.
    room.permute((1, 0)).store(rounded(y, dtype))
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // width, width // 8], [4, 1], [1, 0])
    result = room.load(LAYOUT)
    at = place + gl.arange(0, rows, gl.SliceLayout(1, LAYOUT))
    is_own = at < end
    if not (FEW or GATED):
        at = gl.load(order_ptr + at, mask=is_own, other=0)
    n = block * width + gl.arange(0, width, gl.SliceLayout(0, LAYOUT))[None, :]
    lines = out_ptr + at.to(gl.int64)[:, None] * num_out
    gl.store(lines + n, result, mask=is_own[:, None] & (n < num_out))


@gluon.jit
def multiply_rows(
    USED: gl.constexpr, GROUP_OF_WARPS: gl.constexpr, operands, tables, table_parts, results, order_ptr,
    sizes, expert, block, place, end,
    ASM: gl.constexpr, ADD: gl.constexpr, MIDDLE: gl.constexpr, BITS: gl.constexpr, GROUP: gl.constexpr,
    FEW: gl.constexpr, ROWS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
    GATED: gl.constexpr, ACT: gl.constexpr, ODD: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """64 outputs with the first USED rows of the tile.

    While one half of a step is multiplied, the numbers of the next one are made.  Of an odd number of tiles
    the last one is half a step.
    """
    x, words, x_parts, w_parts, bars = operands
    bias_ptr, out_ptr = results
    num_experts, num_out, num_tiles, limit, alpha = sizes
    dtype: gl.constexpr = x_parts.dtype
    own_block = block + GROUP_OF_WARPS
    num_steps = (num_tiles + 1) // 2
    EACH: gl.constexpr = ROWS // USED
    rows = seen_as(x_parts, dtype, 2 * STAGES * EACH, USED, HALF)
    tiles = seen_as(w_parts, gl.int32, BITS // 2 * GROUPS * STAGES, 16, 32)
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, USED, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    HAS_ZERO: gl.constexpr = tables[1] is not None
    HAS_OFFSET: gl.constexpr = tables[2] is not None
    y = gl.zeros([LINES, USED], gl.float32, PRODUCT)
    mbarrier.wait(bars.index(0), 0)
    own: gl.constexpr = GROUP_OF_WARPS * STAGES
    pairs = pairs_of_half(tables, table_parts, own, 0, BITS, GROUP)
    w = numbers_of(
        tiles, 2 * own, pairs, HAS_ZERO, HAS_OFFSET, MIDDLE, ASM, ADD, BITS, dtype, OPERAND,
    )  # fmt: skip
    for step in range(num_tiles // 2):
        stage, next_stage = step % STAGES, (step + 1) % STAGES
        y = warpgroup_mma(w, rows.index(2 * stage * EACH).permute((1, 0)), y, is_async=True)
        pairs = pairs_of_half(tables, table_parts, own + stage, 2 * step + 1, BITS, GROUP)
        other = numbers_of(
            tiles, 2 * (own + stage) + 1, pairs,
            HAS_ZERO, HAS_OFFSET, MIDDLE, ASM, ADD, BITS, dtype, OPERAND,
        )  # fmt: skip
        y = warpgroup_mma(other, rows.index((2 * stage + 1) * EACH).permute((1, 0)), y, is_async=True)
        y, w = warpgroup_mma_wait(1, deps=[y, w])
        mbarrier.wait(bars.index(next_stage), (step + 1) // STAGES & 1, pred=step + 1 < num_steps)
        pairs = pairs_of_half(tables, table_parts, own + next_stage, 2 * step + 2, BITS, GROUP)
        w = numbers_of(
            tiles, 2 * (own + next_stage), pairs,
            HAS_ZERO, HAS_OFFSET, MIDDLE, ASM, ADD, BITS, dtype, OPERAND,
        )  # fmt: skip
        y, other = warpgroup_mma_wait(0, deps=[y, other])
        mbarrier.arrive(bars.index(STAGES + stage))
    if ODD:
        last = (num_steps - 1) % STAGES
        pairs = pairs_of_half(tables, table_parts, own + last, 0, BITS, GROUP)
        w = numbers_of(
            tiles, 2 * (own + last), pairs,
            HAS_ZERO, HAS_OFFSET, MIDDLE, ASM, ADD, BITS, dtype, OPERAND,
        )  # fmt: skip
        y = warpgroup_mma(w, rows.index(2 * last * EACH).permute((1, 0)), y, is_async=True)
        y, w = warpgroup_mma_wait(0, deps=[y, w])
    if not GATED:
        wait(DEPENDENT)
    barrier()
    WIDTH: gl.constexpr = LINES // 2 if GATED else LINES
    rooms: gl.constexpr = STAGES * CODES * BITS // 4 // (USED * WIDTH * 2)
    room = seen_as(w_parts, out_ptr.dtype.element_ty, GROUPS * rooms, USED, WIDTH)
    store_tile(
        y, room.index(GROUP_OF_WARPS * rooms), place, gl.minimum(end, place + USED), own_block, expert,
        order_ptr, bias_ptr, out_ptr, num_out, limit, alpha, FEW, GATED, ACT,
    )  # fmt: skip


@gluon.jit
def multiply_tile(
    GROUP_OF_WARPS: gl.constexpr, operands, tables, table_parts, results, work, sizes,
    ASM: gl.constexpr, ADD: gl.constexpr, MIDDLE: gl.constexpr,
    BITS: gl.constexpr, GROUP: gl.constexpr,
    NUM_BLOCKS: gl.constexpr, TOP_K: gl.constexpr, FEW: gl.constexpr, IN_TURN: gl.constexpr,
    ROWS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
    GATED: gl.constexpr, ACT: gl.constexpr, ODD: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """A multiplying group of warps: its 64 outputs with the tile's rows, or half of them if that is all."""
    bars = operands[4]
    num_experts = sizes[0]
    begin(GATED, DEPENDENT)
    mbarrier.wait(bars.index(2 * STAGES), 0)
    expert, block, _, place, end = place_of(work, num_experts, NUM_BLOCKS, GROUPS, TOP_K, FEW, IN_TURN, GATED)
    HALVED: gl.constexpr = (ROWS == 32) | (ROWS == 64)
    if expert < num_experts:
        if HALVED and end - place <= ROWS // 2:
            multiply_rows(
                ROWS // 2, GROUP_OF_WARPS, operands, tables, table_parts, results, work[0], sizes,
                expert, block, place, end,
                ASM, ADD, MIDDLE, BITS, GROUP, FEW, ROWS, GROUPS, STAGES,
                GATED, ACT, ODD, DEPENDENT,
            )  # fmt: skip
        else:
            multiply_rows(
                ROWS, GROUP_OF_WARPS, operands, tables, table_parts, results, work[0], sizes,
                expert, block, place, end,
                ASM, ADD, MIDDLE, BITS, GROUP, FEW, ROWS, GROUPS, STAGES,
                GATED, ACT, ODD, DEPENDENT,
            )  # fmt: skip
    elif not GATED:
        wait(DEPENDENT)


@gluon.jit(do_not_specialize=["num_experts", "num_tiles"])
def packed_experts_hopper_kernel(
    x,  # descriptor of [P or T, K], in boxes [`part_of`(ROWS), 64]
    words,  # descriptor of [tiles * 4 BITS, 32], in boxes [8 BITS, 32]
    scales,  # descriptor of int32 [E * NUM_BLOCKS * NUM_GROUPS, 32], in boxes of a step's groups
    zeros,  # as scales, or None
    offsets,
    bias_ptr,  # [E, num_out]
    out_ptr,
    order_ptr,
    starts_ptr,
    tiles_ptr,
    num_experts,
    num_out,
    num_tiles,  # of inputs
    limit,
    alpha,
    ASM: gl.constexpr,  # makes numbers of codes
    ADD: gl.constexpr,  # adds two 16-bit numbers to two
    MIDDLE: gl.constexpr,  # what is subtracted of all codes, twice in an int32
    BITS: gl.constexpr,
    GROUP: gl.constexpr,  # inputs that share a scale
    NUM_GROUPS: gl.constexpr,
    NUM_BLOCKS: gl.constexpr,  # of 64 outputs of an expert
    TOP_K: gl.constexpr,
    FEW: gl.constexpr,
    IN_TURN: gl.constexpr,  # who has one of the first tiles knows its expert
    ROWS: gl.constexpr,
    GROUPS: gl.constexpr,  # of four warps
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
    ACT: gl.constexpr,
    ODD: gl.constexpr,  # 1 of an odd number of tiles of inputs
    REGISTERS: gl.constexpr,  # of a multiplying thread
    DEPENDENT: gl.constexpr,
):
    """One program a tile of rows and a block of outputs; the blocks of a tile are neighbours."""
    PART: gl.constexpr = x.block_shape[0]
    x_parts = gl.allocate_shared_memory(x.dtype, [2 * STAGES * ROWS // PART, PART, HALF], x.layout)
    w_parts = gl.allocate_shared_memory(gl.int32, [GROUPS * STAGES, 8 * BITS, 32], words.layout)
    s_parts = gl.allocate_shared_memory(
        gl.int32, [GROUPS * STAGES, scales.block_shape[0], LANES], scales.layout
    )
    z_parts, o_parts = s_parts, s_parts  # nobody looks at what is not there
    if zeros is not None:
        z_parts = gl.allocate_shared_memory(
            gl.int32, [GROUPS * STAGES, zeros.block_shape[0], LANES], zeros.layout
        )
    if offsets is not None:
        o_parts = gl.allocate_shared_memory(
            gl.int32, [GROUPS * STAGES, offsets.block_shape[0], LANES], offsets.layout
        )
    # First those that say "full", then those that say "empty", and that all of these are prepared.
    bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES + 1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bars.index(2 * STAGES), count=1)
    fence_async_shared()
    operands, work = (x, words, x_parts, w_parts, bars), (order_ptr, starts_ptr, tiles_ptr)
    tables, table_parts, results = (scales, zeros, offsets), (s_parts, z_parts, o_parts), (bias_ptr, out_ptr)
    sizes = num_experts, num_out, num_tiles, limit, alpha
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (multiply_tile, (
                    gl.constexpr(0), operands, tables, table_parts, results, work, sizes, ASM, ADD, MIDDLE,
                    BITS, GROUP, NUM_BLOCKS, TOP_K, FEW, IN_TURN, ROWS, GROUPS, STAGES,
                    GATED, ACT, ODD, DEPENDENT,
                )),
                (copy_steps, (
                    operands, tables, table_parts, work, num_experts, num_tiles, BITS, GROUP, NUM_GROUPS,
                    NUM_BLOCKS, TOP_K, FEW, IN_TURN, GATED, ROWS, GROUPS, STAGES, DEPENDENT,
                )),
                (copy_rows_of_steps, (
                    operands, work, num_experts, num_tiles,
                    NUM_BLOCKS, TOP_K, FEW, IN_TURN, GATED, ROWS, GROUPS, STAGES, DEPENDENT,
                )),
            ],
            [1, 1],
            [COPYING, COPYING],
        )  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (multiply_tile, (
                    gl.constexpr(0), operands, tables, table_parts, results, work, sizes, ASM, ADD, MIDDLE,
                    BITS, GROUP, NUM_BLOCKS, TOP_K, FEW, IN_TURN, ROWS, GROUPS, STAGES,
                    GATED, ACT, ODD, DEPENDENT,
                )),
                (multiply_tile, (
                    gl.constexpr(1), operands, tables, table_parts, results, work, sizes, ASM, ADD, MIDDLE,
                    BITS, GROUP, NUM_BLOCKS, TOP_K, FEW, IN_TURN, ROWS, GROUPS, STAGES,
                    GATED, ACT, ODD, DEPENDENT,
                )),
                (copy_steps, (
                    operands, tables, table_parts, work, num_experts, num_tiles, BITS, GROUP, NUM_GROUPS,
                    NUM_BLOCKS, TOP_K, FEW, IN_TURN, GATED, ROWS, GROUPS, STAGES, DEPENDENT,
                )),
                (copy_rows_of_steps, (
                    operands, work, num_experts, num_tiles,
                    NUM_BLOCKS, TOP_K, FEW, IN_TURN, GATED, ROWS, GROUPS, STAGES, DEPENDENT,
                )),
            ],
            [4, 1, 1],
            [REGISTERS, COPYING, COPYING],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (multiply_tile, (
                    gl.constexpr(0), operands, tables, table_parts, results, work, sizes, ASM, ADD, MIDDLE,
                    BITS, GROUP, NUM_BLOCKS, TOP_K, FEW, IN_TURN, ROWS, GROUPS, STAGES,
                    GATED, ACT, ODD, DEPENDENT,
                )),
                (multiply_tile, (
                    gl.constexpr(1), operands, tables, table_parts, results, work, sizes, ASM, ADD, MIDDLE,
                    BITS, GROUP, NUM_BLOCKS, TOP_K, FEW, IN_TURN, ROWS, GROUPS, STAGES,
                    GATED, ACT, ODD, DEPENDENT,
                )),
                (multiply_tile, (
                    gl.constexpr(2), operands, tables, table_parts, results, work, sizes, ASM, ADD, MIDDLE,
                    BITS, GROUP, NUM_BLOCKS, TOP_K, FEW, IN_TURN, ROWS, GROUPS, STAGES,
                    GATED, ACT, ODD, DEPENDENT,
                )),
                (copy_steps, (
                    operands, tables, table_parts, work, num_experts, num_tiles, BITS, GROUP, NUM_GROUPS,
                    NUM_BLOCKS, TOP_K, FEW, IN_TURN, GATED, ROWS, GROUPS, STAGES, DEPENDENT,
                )),
                (copy_rows_of_steps, (
                    operands, work, num_experts, num_tiles,
                    NUM_BLOCKS, TOP_K, FEW, IN_TURN, GATED, ROWS, GROUPS, STAGES, DEPENDENT,
                )),
            ],
            [4, 4, 1, 1],
            [REGISTERS, REGISTERS, COPYING, COPYING],
        )  # fmt: skip
