# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
"""Mixtures of gated MLPs whose weights stay codes: what `experts.py` does for plain ones.

All experts of a layer are one packed matrix, an expert's outputs below another's, each filled up to whole
tiles of 64; gates and ups lie in it by turns of eight.  Few tokens are multiplied pair by pair, more are
sorted by experts, both by kernels that unpack codes in registers: Hopper's (`packed_experts_hopper.py`), or
the one below on any GPU.  Of very many rows an expert, the numbers of some experts at a time are written to
memory, and the grouped product of plain matrices follows.  Same bits in every run, as there.

Legend: T tokens, E experts, k of a token, P = T * k pairs, D model dim, I hidden features of an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from pellucid.kernels.experts.experts import (
    FEW_TOKENS,
    ExpertWeights,
    Gating,
    More,
    Pairs,
    gated,
    grouped,
    in_slices,
    mix_experts_ref,
    most_tokens,
    rows_for,
    tiles_for,
)
from pellucid.kernels.experts.routing import Chosen, Sorted, most_tiles, sort_pairs
from pellucid.kernels.lang.dependent import dependent, let_next_start, wait
from pellucid.kernels.lang.language import tl, triton
from pellucid.kernels.packed.packed_matmul import TILE, tile_of
from pellucid.kernels.packed.packed_weight import (
    GroupCodes,
    Numbers,
    PackedWeight,
    by_turns,
    numbers_of,
    packed,
    spread,
)
from pellucid.platform import platform_of

SCRATCH_BYTES = 512 << 20  # of experts' numbers at a time
RAISED = 126  # powers of two that bfloat16's exponents lack when they are E2M1's bits
MOST_ROWS = 64  # of an expert, that the kernel for any GPU multiplies at once
ROWS_UNPACKED = 64  # of an expert on average; from so many on its numbers are written first
GATHER_BLOCK = 4096
MOST_SORTED = 1024  # pairs that each program of one kernel looks through, to place its own


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedExperts:
    """All experts that are here, as codes."""

    gate_up: PackedWeight  # of E * padded(2 * I) outputs
    down: PackedWeight  # of E * padded(D)
    num_experts: int
    hidden: int  # I
    dim: int  # D
    gate_up_bias: Tensor | None = None  # [E, 2 * I], gate and up by turns
    down_bias: Tensor | None = None  # [E, D]


def pack_experts(
    experts: Sequence[Sequence[GroupCodes]], dtype: torch.dtype, *, gated: bool = False
) -> PackedWeight:
    """One matrix of those of all experts; of each expert one, or if they are `gated` gates and ups.

    Raises ValueError for codes that do not stay packed, or that differ among experts.
    """
    made = [packed([whole_tiles(p, gated=gated) for p in parts], dtype, gated=gated) for parts in experts]
    first = made[0]
    if len({kind_of(each) for each in made}) > 1:
        raise ValueError("experts of one layer have codes of different kinds")

    def below(name: str) -> Tensor | None:
        values = [getattr(each, name) for each in made]
        return None if values[0] is None else torch.cat(values)

    words, scale = below("words"), below("scale")
    assert words is not None and scale is not None
    zero, offset, num_out = below("zero"), below("offset"), len(words) * int(TILE.value)
    joined = replace(first, words=words, scale=scale, zero=zero, offset=offset, num_out=num_out)
    whole = experts[0][0].q.shape
    by_hopper = platform_of(words.device).is_hopper and not (whole[0] % 8 or whole[1] % 8)
    return folded(joined) if by_hopper else joined


def folded(weight: PackedWeight) -> PackedWeight:
    """The same with scales raised by what E2M1's numbers lack, if these stay finite, and words spread."""
    largest = float(weight.scale.abs().max())
    if weight.numbers is not Numbers.E2M1 or weight.dtype != torch.bfloat16 or largest > 1:
        return weight
    return replace(weight, words=spread(weight.words), scale=weight.scale * 2.0**RAISED, raised=RAISED)


def kind_of(weight: PackedWeight) -> tuple[object, ...]:
    """What kernels must be told of it."""
    return (
        *(weight.numbers, weight.middle, weight.group, weight.table_bits),
        *(weight.zero is None, weight.offset is None),
    )


def whole_tiles(part: GroupCodes, *, gated: bool) -> GroupCodes:
    """Filled up with outputs of zeros, to whole tiles, of which gates are one half."""
    more = -len(part.q) % (int(TILE.value) // 2 if gated else int(TILE.value))
    return part.padded(len(part.q) + more)


def mix_packed(
    x: Tensor,
    chosen: Chosen,
    experts: PackedExperts,
    gating: Gating,
    *,
    weighs_input: bool = False,
    more: More | None = None,
) -> Tensor | Pairs:
    """x [T, D] -> [T, D]; see `mix_experts`."""
    if len(x) > most_tokens(x, chosen):
        mix = partial(mix_packed, experts=experts, gating=gating, weighs_input=weighs_input)
        return in_slices(mix, x, chosen, more)
    if not len(x):
        return torch.empty_like(x)
    if hopper_multiplies(x, experts):
        pairs = pairs_by_hopper(x, chosen, experts, gating, weighs_input=weighs_input)
    elif -(-chosen.ids.numel() // experts.num_experts) >= ROWS_UNPACKED:
        pairs = pairs_unpacked(x, chosen, experts, gating, weighs_input=weighs_input)
    else:
        pairs = pairs_by_any(x, chosen, experts, gating, weighs_input=weighs_input)
    return Pairs(pairs, chosen, experts.num_experts, weighs_input, more)


def mix_packed_ref(
    x: Tensor,
    chosen: Chosen,
    experts: PackedExperts,
    gating: Gating,
    *,
    weighs_input: bool = False,
    more: More | None = None,
) -> Tensor:
    """The same in plain torch, with the numbers of those experts that are hit."""
    those = chosen.ids.unique()
    here = those[those < experts.num_experts]
    places = torch.full((experts.num_experts + 1,), len(here), dtype=torch.int32, device=x.device)
    places[here] = torch.arange(len(here), dtype=torch.int32, device=x.device)
    chosen = Chosen(places[chosen.ids], chosen.weights)
    hit = unpacked_ref(experts_at(experts, here))
    return mix_experts_ref(x, chosen, hit, gating, weighs_input=weighs_input, more=more)


def experts_at(experts: PackedExperts, those: Tensor) -> PackedExperts:
    """Some of them."""

    def some(values: Tensor | None) -> Tensor | None:
        if values is None or not len(values):
            return values
        return values.unflatten(0, (experts.num_experts, -1))[those].flatten(0, 1)

    def part(weight: PackedWeight) -> PackedWeight:
        words, scale = some(weight.words), some(weight.scale)
        assert words is not None and scale is not None
        num_out = weight.num_out // experts.num_experts * len(those)
        zero, offset = some(weight.zero), some(weight.offset)
        return replace(weight, words=words, scale=scale, zero=zero, offset=offset, num_out=num_out)

    return replace(
        experts,
        gate_up=part(experts.gate_up),
        down=part(experts.down),
        num_experts=len(those),
        gate_up_bias=some(experts.gate_up_bias),
        down_bias=some(experts.down_bias),
    )


def unpacked_ref(experts: PackedExperts) -> ExpertWeights:
    """Their numbers, as plain experts have them."""
    num, hidden, tile = experts.num_experts, experts.hidden, int(TILE.value)
    num_lines = -(-2 * hidden // tile) * tile, -(-experts.dim // tile) * tile  # of an expert, filled up
    lines = numbers_of(replace(experts.gate_up, gated=False)).view(num, num_lines[0], experts.dim)
    matrices = torch.empty_like(lines)
    matrices[:, by_turns(lines.shape[1]).to(lines.device)] = lines
    pair = matrices.view(num, 2, num_lines[0] // 2, experts.dim)[:, :, :hidden]
    gate_up = pair.transpose(1, 2).reshape(num, 2 * hidden, experts.dim)
    down = numbers_of(experts.down).view(num, num_lines[1], hidden)[:, : experts.dim]
    return ExpertWeights(gate_up, down, experts.gate_up_bias, experts.down_bias)


def hopper_multiplies(x: Tensor, experts: PackedExperts) -> bool:
    """Whether Hopper's kernel takes them: its TMA unit copies rows of whole 16 bytes."""
    is_hopper = platform_of(x.device).is_hopper
    return is_hopper and x.itemsize == 2 and not (experts.dim % 8 or experts.hidden % 8)


def pairs_by_hopper(
    x: Tensor, chosen: Chosen, experts: PackedExperts, gating: Gating, *, weighs_input: bool
) -> Tensor:
    """x [T, D] -> [P, D], pair by pair."""
    from pellucid.kernels.experts.packed_experts_hopper import Work, expert_tile, packed_experts_hopper
    from pellucid.kernels.packed.packed_hopper import takes

    num_pairs, num, top_k = chosen.ids.numel(), experts.num_experts, chosen.ids.shape[1]
    if len(x) <= FEW_TOKENS and not weighs_input:
        rows, work = 8, Work(chosen.ids, chosen.ids, chosen.ids.view(-1), top_k, num, few=True)
    else:
        rows = rows_for(num_pairs, num, least=8)
        is_small = num_pairs <= MOST_SORTED
        if is_small:
            places, x = sort_rows(x, chosen, num, rows, weighs_input=weighs_input)
        else:
            places = sort_pairs(chosen, num, rows, has_places=True)
            x = gather_pairs(x, chosen, places, weighs_input=weighs_input)
        work = Work(places.order, places.starts, places.tiles, top_k, num, in_turn=is_small)
    up, down = (
        expert_tile(rows, weight.words.shape[0] // num, weight.bits, num_pairs if work.few else num)
        for weight in (experts.gate_up, experts.down)
    )
    hidden, pairs = x.new_empty(num_pairs, experts.hidden), x.new_empty(num_pairs, experts.dim)
    how = {"act": gating.act, "limit": gating.limit, "alpha": gating.alpha}
    x = x if takes(x) else x.clone(memory_format=torch.contiguous_format)
    packed_experts_hopper(x, experts.gate_up, hidden, work, up, bias=experts.gate_up_bias, **how)
    return packed_experts_hopper(hidden, experts.down, pairs, work, down, bias=experts.down_bias)


def pairs_by_any(
    x: Tensor, chosen: Chosen, experts: PackedExperts, gating: Gating, *, weighs_input: bool
) -> Tensor:
    """The same, on any GPU."""
    num_pairs, num = chosen.ids.numel(), experts.num_experts
    rows = min(MOST_ROWS, rows_for(num_pairs, num))
    places = sort_pairs(chosen, num, rows)
    hidden, pairs = x.new_empty(num_pairs, experts.hidden), x.new_empty(num_pairs, experts.dim)
    weights = chosen.weights if weighs_input else None
    bias = experts.gate_up_bias, experts.down_bias
    multiply_packed(x, experts.gate_up, bias[0], weights, chosen, places, hidden, rows, num, gating)
    return multiply_packed(hidden, experts.down, bias[1], None, chosen, places, pairs, rows, num)


def pairs_unpacked(
    x: Tensor, chosen: Chosen, experts: PackedExperts, gating: Gating, *, weighs_input: bool
) -> Tensor:
    """The same by way of numbers in memory, of so many experts at a time as there is room for."""
    num_pairs, num = chosen.ids.numel(), experts.num_experts
    rows = rows_for(num_pairs, num)
    places = sort_pairs(chosen, num, rows)
    tiles = tiles_for(rows, x.itemsize, x.device)
    hidden, pairs = x.new_empty(num_pairs, experts.hidden), x.new_empty(num_pairs, experts.dim)
    assert x.stride(1) == 1, x.stride()
    weights = chosen.weights if weighs_input else None
    for first, last in slices_of(experts, x.itemsize):
        numbers = write_numbers(experts.gate_up, first, last, num, 2 * experts.hidden)
        bias = between(experts.gate_up_bias, first, last)
        grouped(x, numbers, bias, weights, chosen, places, hidden, tiles[0], gating=gating, first=first)
    for first, last in slices_of(experts, x.itemsize):
        numbers = write_numbers(experts.down, first, last, num, experts.dim)
        bias = between(experts.down_bias, first, last)
        grouped(hidden, numbers, bias, None, chosen, places, pairs, tiles[1], first=first)
    return pairs


def between(values: Tensor | None, first: int, last: int) -> Tensor | None:
    return None if values is None else values[first:last]


def slices_of(experts: PackedExperts, itemsize: int) -> list[tuple[int, int]]:
    """Experts whose numbers there is room for at a time, from the first of them to behind the last."""
    step = max(1, SCRATCH_BYTES // (2 * experts.hidden * experts.dim * itemsize))
    return [(first, min(first + step, experts.num_experts)) for first in range(0, experts.num_experts, step)]


def sort_rows(
    x: Tensor, chosen: Chosen, num_experts: int, tile: int, *, weighs_input: bool
) -> tuple[Sorted, Tensor]:
    """`sort_pairs` and `gather_pairs` in one, of up to MOST_SORTED pairs.

    Of the tiles the first ones are each expert's first, so that who has a tile of these knows its expert.
    """
    num_pairs, dim, device = chosen.ids.numel(), x.shape[1], x.device
    assert num_pairs <= MOST_SORTED and x.stride(1) == 1 and chosen.ids.is_contiguous(), (
        num_pairs,
        x.stride(),
    )
    num_tiles = most_tiles(num_pairs, num_experts, tile)
    places = Sorted(
        torch.empty(num_pairs, dtype=torch.int32, device=device),
        torch.empty(num_experts + 1, dtype=torch.int32, device=device),
        torch.empty((num_tiles, 2), dtype=torch.int32, device=device),
    )
    out = x.new_empty(num_pairs, dim)
    sort_rows_kernel[(num_experts + 1 + num_pairs,)](
        x,
        chosen.ids,
        chosen.weights if weighs_input else None,
        places.order,
        places.starts,
        places.tiles,
        out,
        x.stride(0),
        num_pairs,
        num_tiles,
        E=num_experts,
        TILE=tile,
        TOP_K=chosen.ids.shape[1],
        DIM=dim,
        PADDED=triton.next_power_of_2(dim),
        BLOCK=max(128, triton.next_power_of_2(num_pairs)),
        num_warps=4,
        **dependent(),
    )
    return places, out


def gather_pairs(x: Tensor, chosen: Chosen, places: Sorted, *, weighs_input: bool) -> Tensor:
    """x [T, D] -> [P, D], in the order of `places`, which tell where pairs are; nobody's stay garbage.

    Each token is read once: 16,384 of 2,880 features, four times each, take 126 us on an H200, and 238 where
    each place fetches its own.
    """
    (num_tokens, dim), top_k = x.shape, chosen.ids.shape[1]
    assert x.stride(1) == 1 and places.places is not None, x.stride()
    out = x.new_empty(num_tokens * top_k, dim)
    block = min(GATHER_BLOCK, triton.next_power_of_2(dim))
    gather_pairs_kernel[(num_tokens, triton.cdiv(dim, block))](
        x,
        chosen.ids,
        chosen.weights if weighs_input else None,
        places.places,
        out,
        x.stride(0),
        len(places.starts) - 1,
        DIM=dim,
        TOP_K=top_k,
        BLOCK=block,
        num_warps=max(1, block // 256),  # a load of 16 bytes a thread
        **dependent(),
    )
    return out


def multiply_packed(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    weights: Tensor | None,
    chosen: Chosen,
    places: Sorted,
    out: Tensor,
    rows: int,
    num_experts: int,
    gating: Gating | None = None,
) -> Tensor:
    """Every pair's row times its expert's W; as `experts.grouped`."""
    assert weight.gated == (gating is not None) and out.is_contiguous() and x.shape[1] == weight.num_in
    assert not weight.raised, "for Hopper's kernel"
    num_blocks = weight.words.shape[0] // num_experts
    if len(places.tiles):
        packed_grouped_kernel[(len(places.tiles) * num_blocks,)](
            x,
            weight.words,
            weight.scale,
            weight.zero,
            weight.offset,
            weight.table,
            bias,
            weights,
            places.order,
            places.starts,
            places.tiles,
            out,
            x.stride(0),
            num_experts,
            0.0 if gating is None else gating.limit or 0.0,
            1.0 if gating is None else gating.alpha,
            NUM_OUT=out.shape[1] * (1 if gating is None else 2),
            NUM_IN=weight.num_in,
            NUM_BLOCKS=num_blocks,
            NUM_STEPS=weight.words.shape[1],
            TOP_K=chosen.ids.shape[1],
            GATED=gating is not None,
            ACT=None if gating is None or gating.limit is not None else gating.act,
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


def write_numbers(weight: PackedWeight, first: int, last: int, num_experts: int, num_out: int) -> Tensor:
    """The numbers of experts first .. last, [last - first, num_out, K], gates and ups by turns."""
    assert not weight.raised, "for Hopper's kernel"
    num_blocks, num_steps = weight.words.shape[0] // num_experts, weight.words.shape[1]
    out = torch.empty(last - first, num_out, weight.num_in, dtype=weight.dtype, device=weight.device)
    write_numbers_kernel[((last - first) * num_blocks, num_steps)](
        weight.words,
        weight.scale,
        weight.zero,
        weight.offset,
        weight.table,
        out,
        first * num_blocks,
        num_out,
        K=weight.num_in,
        NUM_BLOCKS=num_blocks,
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


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def sort_rows_kernel(
    x_ptr,
    ids_ptr,
    weights_ptr,  # [P], what x is to be times, or None
    order_ptr,
    starts_ptr,
    tiles_ptr,
    out_ptr,
    x_stride,
    num_pairs,
    num_tiles,
    E: tl.constexpr,
    TILE: tl.constexpr,
    TOP_K: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program an expert, one for the tiles that are nobody's, and one a pair."""
    let_next_start(DEPENDENT)
    mine, lane = tl.program_id(0), tl.arange(0, BLOCK)
    wait(DEPENDENT)
    ids = tl.load(ids_ptr + lane, mask=lane < num_pairs, other=E + 1)
    if mine <= E:
        start, count = tl.sum((ids < mine).to(tl.int32), 0), tl.sum((ids == mine).to(tl.int32), 0)
        tl.store(starts_ptr + mine, start)
        # Behind all first tiles every expert has room for its others, whatever the counts.
        first, last = E + start // TILE, E + (start + count) // TILE
        if mine == E:
            count, last = 0, num_tiles
        else:
            tl.store(tiles_ptr + 2 * mine, tl.where(count > 0, mine, E))
            tl.store(tiles_ptr + 2 * mine + 1, start)
        at = first + lane
        offset = (lane + 1) * TILE
        tl.store(tiles_ptr + 2 * at, tl.where(offset < count, mine, E), mask=at < last)
        tl.store(tiles_ptr + 2 * at + 1, start + offset, mask=at < last)
    else:
        pair = mine - E - 1
        column = tl.arange(0, PADDED)
        x = tl.load(x_ptr + (pair // TOP_K).to(tl.int64) * x_stride + column, mask=column < DIM, other=0.0)
        own = tl.load(ids_ptr + pair)
        place = tl.sum(((ids < own) | ((ids == own) & (lane < pair))).to(tl.int32), 0)
        if weights_ptr is not None:
            x = (x.to(tl.float32) * tl.load(weights_ptr + pair)).to(x.dtype)
        tl.store(order_ptr + place, pair)
        tl.store(out_ptr + place.to(tl.int64) * DIM + column, x, mask=column < DIM)


@triton.jit(do_not_specialize=["num_experts"])
def gather_pairs_kernel(
    x_ptr,
    ids_ptr,
    weights_ptr,  # [P], what x is to be times, or None
    places_ptr,
    out_ptr,
    x_stride,
    num_experts,
    DIM: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a token and block of features."""
    let_next_start(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait(DEPENDENT)
    x = tl.load(x_ptr + token * x_stride + column, mask=column < DIM, other=0.0)
    for j in tl.static_range(TOP_K):
        pair = token * TOP_K + j
        dim = tl.where(tl.load(ids_ptr + pair) < num_experts, DIM, 0)
        place = tl.load(places_ptr + pair).to(tl.int64)
        y = x
        if weights_ptr is not None:
            y = (x.to(tl.float32) * tl.load(weights_ptr + pair)).to(x.dtype)
        tl.store(out_ptr + place * DIM + column, y, mask=column < dim)


@triton.jit(do_not_specialize=["num_experts"])
def packed_grouped_kernel(
    x_ptr,
    words_ptr,
    scale_ptr,
    zero_ptr,
    offset_ptr,
    table_ptr,
    bias_ptr,
    weights_ptr,  # [P], what x is to be times, or None
    order_ptr,
    starts_ptr,
    tiles_ptr,
    out_ptr,
    x_stride,
    num_experts,
    limit,
    alpha,
    NUM_OUT: tl.constexpr,
    NUM_IN: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    NUM_STEPS: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    ACT: tl.constexpr,
    NUMBERS: tl.constexpr,
    MIDDLE: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a tile of pairs and 64 outputs; the blocks of a tile are neighbours."""
    let_next_start(DEPENDENT)
    tile, block = tl.program_id(0) // NUM_BLOCKS, tl.program_id(0) % NUM_BLOCKS
    wait(DEPENDENT)
    expert = tl.load(tiles_ptr + 2 * tile)
    if expert < num_experts:
        place = tl.load(tiles_ptr + 2 * tile + 1) + tl.arange(0, ROWS)
        known = place < tl.load(starts_ptr + expert + 1)
        pair = tl.load(order_ptr + place, mask=known, other=0)
        k = tl.arange(0, TILE)
        x_row = pair // TOP_K if GATED else place
        x_at = x_ptr + x_row.to(tl.int64)[None, :] * x_stride + k[:, None]
        own = expert.to(tl.int64) * NUM_BLOCKS + block
        y = tl.zeros((TILE, ROWS), tl.float32)
        for step in range(NUM_STEPS):
            w = tile_of(
                words_ptr, scale_ptr, zero_ptr, offset_ptr, table_ptr, own, step, NUM_STEPS,
                NUMBERS, MIDDLE, BITS, GROUP, GROUPS,
            )  # fmt: skip
            inside = known[None, :] & (k + step * TILE < NUM_IN)[:, None]
            x = tl.load(x_at + step * TILE, mask=inside, other=0.0)
            y = tl.dot(w, x, y, input_precision="ieee")
        line = tl.arange(0, TILE)
        column = block * TILE + line
        if GATED:  # by turns of eight, as packed_weight.by_turns has them
            column = block * TILE + (line // 16 * 8 + line % 8) * 2 + line // 8 % 2
        if weights_ptr is not None:
            y *= tl.load(weights_ptr + pair, mask=known, other=0.0)[None, :]
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + expert * NUM_OUT + column, mask=column < NUM_OUT, other=0.0)
            y += bias.to(tl.float32)[:, None]
        dtype = out_ptr.dtype.element_ty
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(y, (4, 2, 8, ROWS)), (0, 2, 3, 1)))
            hidden = tl.reshape(gated(gate, up, limit, alpha, ACT), (TILE // 2, ROWS))
            out = block * (TILE // 2) + tl.arange(0, TILE // 2)
            at = out_ptr + place.to(tl.int64)[None, :] * (NUM_OUT // 2) + out[:, None]
            tl.store(at, hidden.to(dtype), mask=known[None, :] & (out < NUM_OUT // 2)[:, None])
        else:
            at = out_ptr + pair.to(tl.int64)[None, :] * NUM_OUT + column[:, None]
            tl.store(at, y.to(dtype), mask=known[None, :] & (column < NUM_OUT)[:, None])


@triton.jit
def write_numbers_kernel(
    words_ptr,
    scale_ptr,
    zero_ptr,
    offset_ptr,
    table_ptr,
    out_ptr,
    first_block,
    num_out,
    K: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
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
    line, k = tl.arange(0, TILE), step * TILE + tl.arange(0, TILE)
    row = block % NUM_BLOCKS * TILE + line
    if GATED:
        row = block % NUM_BLOCKS * TILE + (line // 16 * 8 + line % 8) * 2 + line // 8 % 2
    inside = (row < num_out)[:, None] & (k < K)[None, :]
    at = out_ptr + (block // NUM_BLOCKS * num_out + row)[:, None] * K + k[None, :]
    tl.store(at, w, mask=inside)
