# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0915, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false
"""Who attends to what of a step's prompt chunks: planned on the device, which knows how many keys.

A tile of queries and a KV head are an item, and an item takes a step for every KEYS keys that it sees.  Where
there are many items, each program takes whole ones, from the longest to the shortest and back.  Where there
are few, some programs would have nothing to do, or twice as much as others: then all steps, head by head and
tile by tile, are cut into ranges of about the same length, one a program.  A range may begin and end within
an item.  The program with an item's first steps, its newest keys, takes what the others have made of the
rest.  It has a higher number than they have, and they begin with what they give, so nobody waits for a
program that has not been started, nor for one that waits itself.

A segment is what one program takes of an item in a row.  A plan is right if every item's steps are in it
once, and if attention by it is that of `paged_attention_ref`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from pellucid.kernels.attention.paged_attention import PagedRows
from pellucid.kernels.lang.dependent import dependent, let_next_start, wait

KEYS = tl.constexpr(128)  # of a step
KEYS_ALIKE = 128  # tiles whose numbers of keys differ by less count as equally long
MIN_ROUNDS = 3  # of items, before programs go on to other heads
MAX_ROUNDS = tl.constexpr(2 * MIN_ROUNDS)  # of items: from there on all are taken whole
MAX_TILES = tl.constexpr(1024)  # whose items may be cut

# What items cost, in steps: each, beside its steps; giving and taking parts, for the program that takes.
ITEM = tl.constexpr(1)
CUT = 5
MIN_STEPS = tl.constexpr(4)  # of a range, unless it is an item
SNAP = tl.constexpr(2)  # steps: so near to an item's end a range rather ends there

# A plan is int32 numbers on the device.  First, for each program: where its segments begin in the plan, their
# number, and for each group of warps that multiplies whether it has given its part.
PROGRAM_FIELDS, FLAGS_AT = tl.constexpr(4), tl.constexpr(2)
# Then segments, of which those of a program follow one another: the row, the KV head, of the tile the first
# token, the number of queries and the position of the first one, the tokens of the row, of the tiles of keys
# the first and one behind the last, and how many other programs give the rest; -1 - p: program p gives this.
SEGMENT_FIELDS = tl.constexpr(9)
HEAD_AT, TOKEN_AT, QUERIES_AT, POSITION_AT = (tl.constexpr(i) for i in range(1, 5))
LENGTH_AT, BEGIN_AT, END_AT, PARTS_AT = (tl.constexpr(i) for i in range(5, 9))
LANES = tl.constexpr(128)  # segments written at once
NO_END = tl.constexpr(1 << 30)  # of an item
STEADY = ["seq_lens_ptr", "cu_seqlens_q_ptr", "tiles_ptr"]  # views, whose alignment changes with the rows


@dataclass(slots=True)
class PromptTiles:
    """A step's tiles of queries, and what kernels need to know of them, made when they first ask for it."""

    tiles: (
        Tensor  # [num_tiles, 2] int32, prefill_tiles on the device, and behind them one of padding, repeated
    )
    rows: PagedRows
    tile_queries: int
    are_few: bool = False  # then they are taken as they come: to sort them would cost more than it brings
    _longest_first: Tensor | None = None
    # By KV heads, programs, window:
    _plans: dict[tuple[int, int, int | None], Tensor] = field(
        default_factory=dict[tuple[int, int, int | None], Tensor]
    )

    def longest_first(self) -> Tensor:
        """The tiles, as `longest_first` sorts them unless they are few."""
        if self.are_few:
            return self.tiles
        if self._longest_first is None:
            self._longest_first = longest_first(self.tiles, self.rows)
        return self._longest_first

    def plan(self, num_kv_heads: int, num_programs: int, window: int | None = None) -> Tensor:
        key = num_kv_heads, num_programs, window
        if key not in self._plans:
            tiles = self.longest_first()
            made = plan(tiles, self.rows, self.tile_queries, num_kv_heads, num_programs, window)
            self._plans[key] = made
        return self._plans[key]


def longest_first(tiles: Tensor, rows: PagedRows) -> Tensor:
    """Sort tiles [num_tiles, 2] on the device by the keys they see, which evens out the end of the kernel.

    Tiles of a row that see about as many stay together, and find their keys in the L2 cache.
    """
    row, first_query = tiles.unbind(1)
    num_query = rows.cu_seqlens_q.diff()
    num_keys = (rows.seq_lens - num_query)[row] + first_query
    order = torch.argsort(num_keys // KEYS_ALIKE, descending=True, stable=True)
    return tiles[order]


def heads_at_once(num_items: int, num_kv_heads: int, width: int) -> int:
    """KV heads whose items programs take together: few, but enough to give each program some of them."""
    heads = num_kv_heads
    while heads % 2 == 0 and num_items * heads >= 2 * MIN_ROUNDS * width * num_kv_heads:
        heads //= 2
    return heads


def plan(
    tiles: Tensor,
    rows: PagedRows,
    tile_queries: int,
    num_kv_heads: int,
    num_programs: int,
    window: int | None = None,
) -> Tensor:
    """Deal out the items of tiles [num_tiles, 2], of so many queries each, to programs.

    The longest first is best, but what must be is that padding comes last.
    """
    num_tiles = tiles.shape[0]
    num_items = num_tiles * num_kv_heads
    num_segments = num_items + num_programs  # at most, those of programs with nothing to do included
    made = tiles.new_empty(num_programs * PROGRAM_FIELDS.value + num_segments * SEGMENT_FIELDS.value)
    may_cut = num_tiles <= MAX_TILES.value and num_items < MAX_ROUNDS.value * num_programs
    plan_kernel[(num_programs,)](
        tiles,
        rows.seq_lens,
        rows.cu_seqlens_q,
        made,
        num_tiles,
        num_kv_heads,
        tile_queries,
        NO_END.value if window is None else window,
        heads_at_once(num_items, num_kv_heads, num_programs),
        int(may_cut),
        CUT,
        PROGRAMS=triton.next_power_of_2(num_programs),
        **dependent(),
    )
    return made


@cache
def room_for_parts(num_numbers: int, device: torch.device) -> Tensor:
    """Room for float32 numbers that programs give to others.

    One for all launches, so two on different streams of a process must not overlap.
    """
    return torch.empty(num_numbers, dtype=torch.float32, device=device)


COUNTS = ["num_tiles", "num_kv_heads", "tile_queries", "window", "heads_at_once", "may_cut", "cut"]


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=STEADY)
def plan_kernel(
    tiles_ptr,
    seq_lens_ptr,
    cu_seqlens_q_ptr,
    plan_ptr,
    num_tiles,
    num_kv_heads,
    tile_queries,
    window,  # keys that a query sees at most
    heads_at_once,
    may_cut,
    cut,  # what a cut costs, in steps
    PROGRAMS: tl.constexpr,  # no more of them, a power of two
    DEPENDENT: tl.constexpr,
):
    """Each program plans for one of the attention's."""
    let_next_start(DEPENDENT)
    program, width = tl.program_id(0), tl.num_programs(0)
    wait(DEPENDENT)
    batch = (tiles_ptr, seq_lens_ptr, cu_seqlens_q_ptr, num_tiles, tile_queries, window)
    tile = tl.arange(0, MAX_TILES)
    steps, _, _, _, _, _, _ = look_up(tile, batch)
    num_real = tl.sum((steps > 0).to(tl.int32))
    for start in range(MAX_TILES, num_tiles, MAX_TILES):
        further, _, _, _, _, _, _ = look_up(start + tile, batch)
        num_real += tl.sum((further > 0).to(tl.int32))
    num_items = num_real * num_kv_heads
    # Of one head: what its items cost, and up to the end of each.
    costs = tl.where(steps > 0, steps + ITEM, 0)
    ends = tl.cumsum(costs, 0)
    cost = tl.sum(costs)
    # Some program has the longest item.  And of so many of the longest items and one, a program has one more
    # than others need to have; of tiles that are not sorted this is only about so.
    longest = tl.max(costs, 0)
    for round in tl.static_range(MAX_ROUNDS):
        longest = tl.maximum(
            longest, (round + 1) * tl.sum(tl.where(tile == round * width // num_kv_heads, costs, 0))
        )
    num_ranges = tl.maximum(num_items, tl.sum(steps) * num_kv_heads // MIN_STEPS)
    num_ranges = tl.maximum(tl.minimum(num_ranges, width), 1)
    is_cut = (may_cut != 0) & (cost * num_kv_heads + cut * num_ranges < longest * num_ranges)
    segments_ptr = plan_ptr + width * PROGRAM_FIELDS
    first, num_segments = num_tiles * num_kv_heads + program, 0
    if is_cut:
        if program < num_ranges:
            items = (tile, steps, ends, cost, num_kv_heads, num_real, num_ranges)
            first, num_segments = take_range(program, items, segments_ptr, batch, PROGRAMS)
    elif num_items > 0:
        first, num_segments = take_whole(
            program, width, first, num_real, num_kv_heads, heads_at_once, segments_ptr, batch
        )
    if num_segments == 0:  # what is read all the same
        field = tl.arange(0, 16)
        none_at = segments_ptr + first * SEGMENT_FIELDS + field
        tl.store(none_at, field * 0, mask=field < SEGMENT_FIELDS)
    plan_ptr += program * PROGRAM_FIELDS
    tl.store(plan_ptr, width * PROGRAM_FIELDS + first * SEGMENT_FIELDS)
    tl.store(plan_ptr + 1, num_segments)
    tl.store(plan_ptr + FLAGS_AT, 0)
    tl.store(plan_ptr + FLAGS_AT + 1, 0)


@triton.jit
def take_range(program, items, segments_ptr, batch, PROGRAMS: tl.constexpr):
    """Write the segments of a program's range: (the first one, their number).

    The last program has the first range, and so waits for none but those that started before it.
    """
    _, _, _, cost, num_kv_heads, num_real, num_ranges = items
    mine = num_ranges - 1 - program
    item, step, _, _ = place_of(mine, items)
    end_item, end_step, end_begin, end_steps = place_of(mine + 1, items)
    # Ranges that begin within the item in which this one ends.
    later = mine + 1 + tl.arange(0, PROGRAMS)
    at_step = begin_of(later, cost, num_kv_heads, num_ranges) - end_begin
    is_within = (later < num_ranges) & (at_step > SNAP) & (at_step < end_steps - SNAP)
    others = tl.where(end_step > 0, tl.sum(is_within.to(tl.int32)), 0)
    # As if each range before this one had ended within an item: then there is room in any case.
    first = item + mine
    num_segments = end_item - item + (end_step > 0).to(tl.int32)
    for start in range(0, num_segments, LANES):
        number = start + tl.arange(0, LANES)
        here = item + number
        begin, end = tl.where(number == 0, step, 0), tl.where(here == end_item, end_step, NO_END)
        parts = tl.where(begin > 0, -1 - program, tl.where(here == end_item, others, 0))
        at = segments_ptr + (first + number) * SEGMENT_FIELDS
        is_mine = number < num_segments
        store_segments(at, is_mine, here % num_real, here // num_real, begin, end, parts, batch)
    return first, num_segments


@triton.jit
def take_whole(program, width, nowhere, num_tiles, num_kv_heads, heads, segments_ptr, batch):
    """Write a program's share of whole items: (the first segment, their number).

    Back and forth, so that all programs get long tiles and short ones.  Some heads after others, whose keys
    and values the L2 cache then holds for all tiles; from the shortest tile to the longest and back, and at
    last to the shortest, so that programs end together.
    """
    num_items = num_tiles * num_kv_heads
    rounds = num_items // width
    rest = num_items - rounds * width  # which the first programs take, or those at the other end
    turn = tl.where(rounds % 2 == 0, program, width - 1 - program)
    num_segments = rounds + (turn < rest).to(tl.int32)
    before = tl.where(rounds % 2 == 0, tl.minimum(program, rest), tl.maximum(program - (width - rest), 0))
    first = tl.where(num_segments > 0, rounds * program + before, nowhere)
    for start in range(0, num_segments, LANES):
        number = start + tl.arange(0, LANES)
        item = number * width + tl.where(number % 2 == 0, program, width - 1 - program)
        section, item = item // (num_tiles * heads), item % (num_tiles * heads)
        descends = (num_kv_heads // heads - section) % 2 == 1
        tile = tl.where(descends, item // heads, num_tiles - 1 - item // heads)
        none = number * 0
        at = segments_ptr + (first + number) * SEGMENT_FIELDS
        is_mine = number < num_segments
        store_segments(at, is_mine, tile, section * heads + item % heads, none, none + NO_END, none, batch)
    return first, num_segments


@triton.jit
def look_up(tile, batch):
    """(steps, row, first token, queries, position of the first one, tokens of the row, first tile of keys).

    There are no steps where a tile is none: behind the last one, without queries, or like the one before it.
    """
    tiles_ptr, seq_lens_ptr, cu_seqlens_q_ptr, num_tiles, tile_queries, window = batch
    is_tile = tile < num_tiles
    at, has_one_before = tiles_ptr + tile * 2, is_tile & (tile > 0)
    row = tl.load(at, mask=is_tile, other=0)
    first_query = tl.load(at + 1, mask=is_tile, other=0)
    is_like = (tl.load(at - 2, mask=has_one_before, other=-1) == row) & (
        tl.load(at - 1, mask=has_one_before, other=-1) == first_query
    )
    first_token = tl.load(cu_seqlens_q_ptr + row, mask=is_tile, other=0)
    num_query = tl.load(cu_seqlens_q_ptr + row + 1, mask=is_tile, other=0) - first_token
    seq_len = tl.load(seq_lens_ptr + row, mask=is_tile, other=0)
    queries = tl.minimum(tile_queries, num_query - first_query)
    position = seq_len - num_query + first_query
    is_there = is_tile & (is_like == 0) & (queries > 0)
    first_keys = tl.maximum(position - window + 1, 0) // KEYS
    steps = tl.where(is_there, (position + queries + KEYS - 1) // KEYS - first_keys, 0)
    return steps, row, first_token + first_query, queries, position, seq_len, first_keys


@triton.jit
def place_of(number, items):
    """Where a range begins: (item, step of it, where the item's first step would be among all, its steps)."""
    tile, steps, ends, cost, num_kv_heads, num_real, num_ranges = items
    at = begin_of(number, cost, num_kv_heads, num_ranges)
    head = at // cost
    is_before = ends <= at - head * cost
    mine = tl.sum(is_before.to(tl.int32))
    begin = head * cost + tl.max(tl.where(is_before, ends, 0)) + ITEM
    item_steps = tl.sum(tl.where(tile == mine, steps, 0))
    step = at - begin
    is_behind = (step > SNAP) & (step >= item_steps - SNAP)
    step = tl.where((step <= SNAP) | is_behind, 0, step)
    return head * num_real + mine + is_behind.to(tl.int32), step, begin, item_steps


@triton.jit
def begin_of(number, cost, num_kv_heads, num_ranges):
    """Where a range begins among what all items cost.  cost: of a head's."""
    return (number.to(tl.int64) * (cost * num_kv_heads) // num_ranges).to(tl.int32)


@triton.jit
def store_segments(at, is_mine, tile, head, begin, end, parts, batch):
    """Write steps begin .. end of items, of which the first step has the newest keys."""
    tile = tl.where(is_mine, tile, 0)
    steps, row, first_token, queries, position, seq_len, first_keys = look_up(tile, batch)
    last_keys = first_keys + steps
    tl.store(at, row, mask=is_mine)
    tl.store(at + HEAD_AT, head, mask=is_mine)
    tl.store(at + TOKEN_AT, first_token, mask=is_mine)
    tl.store(at + QUERIES_AT, queries, mask=is_mine)
    tl.store(at + POSITION_AT, position, mask=is_mine)
    tl.store(at + LENGTH_AT, seq_len, mask=is_mine)
    tl.store(at + BEGIN_AT, last_keys - tl.minimum(end, steps), mask=is_mine)
    tl.store(at + END_AT, last_keys - begin, mask=is_mine)
    tl.store(at + PARTS_AT, parts, mask=is_mine)
