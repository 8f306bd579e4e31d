# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
"""Mixtures of gated MLPs: each token's k experts, weighed and added up (Shazeer et al. 2017).

A few tokens are multiplied pair by pair, in two launches: a pair's gate and up in one, and in the other all
that a token's experts give, added up in registers.  More are sorted by experts first (`sort_pairs`), so that
an expert's weights are read once for all its tokens, as tiles of rows: gate and up, gated as they leave the
tensor cores; down, back to the order of pairs; and the sum.  No copy of x is made, its rows are gathered.

A pair is summed up over its inputs in one chain and rounded once, the pairs of a token in the order of
falling scores in float32, what is added to them last: the same bits in every run.  Experts that no token goes
to are not read, nor are any for tokens that go to nobody.

Gate and up lie in memory by turns, rows 2i and 2i + 1, so that what is gated lies side by side in a tile.

Legend: T tokens, E experts, k of a token, P = T * k pairs, D model dim, I hidden features of an expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from pellucid.kernels.attention.paged_attention import SHARED_MEMORY
from pellucid.kernels.experts.routing import Chosen, Sorted, sort_pairs
from pellucid.kernels.lang.dependent import ask_for, dependent, let_next_start, wait
from pellucid.kernels.lang.language import tl, triton
from pellucid.kernels.pointwise.silu_mul import ACTIVATIONS, activate
from pellucid.platform import platform_of

FEW_TOKENS = 4  # that are multiplied pair by pair
PAIR_BYTES = 768 << 20  # of what the pairs give that are multiplied at once
BOX_ALIGNMENT = 16  # bytes, of rows that the TMA unit copies
SUM_BLOCK = 1024  # features that a program of the sum adds up


@dataclass(frozen=True, slots=True)
class Gating:
    """act(gate) * up; with a limit min(gate, limit) * sigmoid(alpha * gate) * (1 + clamp(up)) (gpt-oss)."""

    act: str  # one of ACTIVATIONS
    limit: float | None = None
    alpha: float = 1.0


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """All experts that are here."""

    gate_up: Tensor  # [E, 2 * I, D], gate and up by turns
    down: Tensor  # [E, D, I]
    gate_up_bias: Tensor | None = None  # [E, 2 * I]
    down_bias: Tensor | None = None  # [E, D]


class More(NamedTuple):
    """What is added to the experts' sum: sigmoid(gate) times this, or just this."""

    values: Tensor  # [T, D]
    gate: Tensor | None = None  # [T, 1]


class Pairs(NamedTuple):
    """What each token's experts give, to be added up by whoever adds the sum to something."""

    rows: Tensor  # [P, D]
    chosen: Chosen
    num_experts: int  # that are here
    weighs_input: bool
    more: More | None

    def sum(self) -> Tensor:
        """[T, D]"""
        return sum_pairs(
            self.rows, self.chosen, self.num_experts, weighs_input=self.weighs_input, more=self.more
        )


def added_up(given: Tensor | Pairs) -> Tensor:
    return given.sum() if isinstance(given, Pairs) else given


class Tile(NamedTuple):
    """How a grouped product is cut.  is_swapped: W is the left operand, for few rows."""

    rows: int  # pairs of one expert
    outs: int
    step: int  # inputs at a time
    num_warps: int
    num_stages: int
    is_swapped: bool
    is_boxed: bool = False  # the TMA unit copies W


def mix_experts(
    x: Tensor,
    chosen: Chosen,
    experts: ExpertWeights,
    gating: Gating,
    *,
    weighs_input: bool = False,
    more: More | None = None,
) -> Tensor | Pairs:
    """x [T, D] -> [T, D].  weighs_input: an expert's input is times its weight, not what it gives."""
    if len(x) > most_tokens(x, chosen):
        mix = partial(mix_experts, experts=experts, gating=gating, weighs_input=weighs_input)
        return in_slices(mix, x, chosen, more)
    if len(x) <= FEW_TOKENS:
        hidden = gate_up_of_few(x, chosen, experts, gating, weighs_input=weighs_input)
        return down_of_few(hidden, chosen, experts, weighs_input=weighs_input, more=more)
    rows = rows_for(chosen.ids.numel(), len(experts.down))
    places = sort_pairs(chosen, len(experts.down), rows)
    up, down = tiles_for(rows, x.itemsize, x.device)
    hidden = grouped_gate_up(x, chosen, places, experts, gating, up, weighs_input=weighs_input)
    pairs = grouped_down(hidden, chosen, places, experts, down)
    return Pairs(pairs, chosen, len(experts.down), weighs_input, more)


def most_tokens(x: Tensor, chosen: Chosen) -> int:
    """That are multiplied at once."""
    return max(FEW_TOKENS + 1, PAIR_BYTES // (chosen.ids.shape[1] * x.shape[1] * x.itemsize))


def in_slices(mix: Callable[..., Tensor | Pairs], x: Tensor, chosen: Chosen, more: More | None) -> Tensor:
    """mix(x, chosen, more=more), such as `mix_experts`, of more tokens than are multiplied at once."""
    out, most = [], most_tokens(x, chosen)
    for first in range(0, len(x), most):
        part = slice(first, first + most)
        those = Chosen(chosen.ids[part], chosen.weights[part])
        also = None if more is None else More(*(t if t is None else t[part] for t in more))
        out.append(added_up(mix(x[part], those, more=also)))
    return torch.cat(out)


def mix_experts_ref(
    x: Tensor,
    chosen: Chosen,
    experts: ExpertWeights,
    gating: Gating,
    *,
    weighs_input: bool = False,
    more: More | None = None,
) -> Tensor:
    """The same in plain torch, expert by expert of those that are hit: what CPUs run."""
    num_here, top_k = len(experts.down), chosen.ids.shape[1]
    pairs = x.new_zeros(len(x) * top_k, x.shape[1])
    ids, weights = chosen.ids.flatten(), chosen.weights.flatten()
    for expert in ids.unique().tolist():
        if expert == num_here:
            continue
        mine = (ids == expert).nonzero()[:, 0]
        inputs = x[mine // top_k]
        if weighs_input:
            inputs = (inputs.float() * weights[mine, None]).to(x.dtype)
        hidden = hidden_ref(inputs, experts, expert, gating)
        pairs[mine] = F.linear(hidden, experts.down[expert], row_of(experts.down_bias, expert))
    return sum_pairs_ref(pairs.view(-1, top_k, x.shape[1]), chosen, weighs_input=weighs_input, more=more)


def hidden_ref(inputs: Tensor, experts: ExpertWeights, expert: int, gating: Gating) -> Tensor:
    """inputs [.., D] of one expert -> [.., I]."""
    product = F.linear(inputs, experts.gate_up[expert], row_of(experts.gate_up_bias, expert))
    return gate_ref(product, gating)


def row_of(biases: Tensor | None, expert: int) -> Tensor | None:
    return None if biases is None else biases[expert]


def gate_ref(gate_up: Tensor, gating: Gating) -> Tensor:
    """[..., 2 * I], gate and up by turns -> [..., I]."""
    gate, up = gate_up[..., 0::2], gate_up[..., 1::2]
    if gating.limit is None:
        return ACTIVATIONS[gating.act](gate) * up
    gate, up = gate.clamp(max=gating.limit), up.clamp(-gating.limit, gating.limit)
    return gate * torch.sigmoid(gating.alpha * gate) * (up + 1)


def sum_pairs_ref(pairs: Tensor, chosen: Chosen, *, weighs_input: bool, more: More | None) -> Tensor:
    """pairs [T, k, D], zeros where they are nobody's -> [T, D]."""
    total = pairs.new_zeros(pairs.shape[0], pairs.shape[2], dtype=torch.float32)
    for j in range(pairs.shape[1]):
        part = pairs[:, j].float()
        total = total + (part if weighs_input else part * chosen.weights[:, j, None])
    if more is not None:
        factor = 1.0 if more.gate is None else more.gate.float().sigmoid()
        total = total + more.values.float() * factor
    return total.to(pairs.dtype)


def gate_up_of_few(
    x: Tensor, chosen: Chosen, experts: ExpertWeights, gating: Gating, *, weighs_input: bool
) -> Tensor:
    """x [T, D] -> [P, I], pair by pair."""
    num_experts, num_out, num_in = experts.gate_up.shape
    hidden = x.new_empty(chosen.ids.numel(), num_out // 2)
    assert x.stride(1) == 1 and experts.gate_up.is_contiguous(), x.stride()
    if len(hidden):
        outs = FEW.outs
        few_gate_up_kernel[(len(hidden), triton.cdiv(num_out // 2, outs))](
            x,
            experts.gate_up,
            experts.gate_up_bias,
            chosen.ids,
            chosen.weights,
            hidden,
            x.stride(0),
            num_experts,
            gating.limit or 0.0,
            gating.alpha,
            NUM_OUT=num_out,
            NUM_IN=num_in,
            TOP_K=chosen.ids.shape[1],
            ACT=gating.act if gating.limit is None else None,
            WEIGHS=weighs_input,
            OUTS=outs,
            STEP=min(FEW.step, triton.next_power_of_2(num_in)),
            num_warps=FEW.num_warps,
            **dependent(),
        )
    return hidden


def down_of_few(
    hidden: Tensor, chosen: Chosen, experts: ExpertWeights, *, weighs_input: bool, more: More | None
) -> Tensor:
    """hidden [P, I], pair by pair -> [T, D]."""
    num_experts, num_out, num_in = experts.down.shape
    num_tokens, top_k = chosen.ids.shape
    out = hidden.new_empty(num_tokens, num_out)
    assert experts.down.is_contiguous() and hidden.is_contiguous()
    if num_tokens:
        few_down_kernel[(num_tokens, triton.cdiv(num_out, FEW_DOWN.outs))](
            hidden,
            experts.down,
            experts.down_bias,
            chosen.ids,
            chosen.weights,
            *pointers_of(more),
            out,
            num_experts,
            0 if more is None else more.values.stride(0),
            NUM_OUT=num_out,
            NUM_IN=num_in,
            TOP_K=top_k,
            K_PADDED=triton.next_power_of_2(top_k),
            WEIGHS=not weighs_input,
            OUTS=FEW_DOWN.outs,
            STEP=min(FEW_DOWN.step, triton.next_power_of_2(num_in)),
            num_warps=FEW_DOWN.num_warps,
            **dependent(),
        )
    return out


def pointers_of(more: More | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if more is None else (more.values, more.gate)


def grouped_gate_up(
    x: Tensor,
    chosen: Chosen,
    places: Sorted,
    experts: ExpertWeights,
    gating: Gating,
    tile: Tile,
    *,
    weighs_input: bool,
) -> Tensor:
    """x [T, D] -> [P, I], in the order of `places`."""
    hidden = x.new_empty(chosen.ids.numel(), experts.gate_up.shape[1] // 2)
    assert x.stride(1) == 1, x.stride()
    weights = chosen.weights if weighs_input else None
    return grouped(
        x, experts.gate_up, experts.gate_up_bias, weights, chosen, places, hidden, tile, gating=gating
    )


def grouped_down(
    hidden: Tensor, chosen: Chosen, places: Sorted, experts: ExpertWeights, tile: Tile
) -> Tensor:
    """hidden [P, I] in the order of `places` -> [P, D], pair by pair; what is nobody's stays garbage."""
    pairs = hidden.new_empty(len(hidden), experts.down.shape[1])
    return grouped(hidden, experts.down, experts.down_bias, None, chosen, places, pairs, tile)


def grouped(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weights: Tensor | None,
    chosen: Chosen,
    places: Sorted,
    out: Tensor,
    tile: Tile,
    *,
    gating: Gating | None = None,
    first: int = 0,
) -> Tensor:
    """Every pair's row times its expert's W [E, N, K]; pairs of experts that W lacks stay as they are.

    gating: x has a row for each token, and `out` is in the order of `places`; None: the other way round.
    first: the number of W's first expert.
    """
    num_experts, num_out, num_in = weight.shape
    assert weight.is_contiguous() and out.is_contiguous() and x.shape[1] == num_in, (x.shape, weight.shape)
    if len(places.tiles):
        step = min(tile.step, max(16, triton.next_power_of_2(num_in)))
        is_boxed = tile.is_boxed and num_in * weight.itemsize % BOX_ALIGNMENT == 0
        grouped_kernel[(len(places.tiles) * triton.cdiv(num_out, tile.outs),)](
            x,
            boxes_of(weight, tile.outs, step) if is_boxed else weight,
            bias,
            weights,
            places.order,
            places.starts,
            places.tiles,
            out,
            x.stride(0),
            first,
            num_experts,
            0.0 if gating is None else gating.limit or 0.0,
            1.0 if gating is None else gating.alpha,
            NUM_OUT=num_out,
            NUM_IN=num_in,
            TOP_K=chosen.ids.shape[1],
            GATED=gating is not None,
            ACT=None if gating is None or gating.limit is not None else gating.act,
            ROWS=tile.rows,
            OUTS=tile.outs,
            STEP=step,
            SWAPPED=tile.is_swapped,
            BOXED=is_boxed,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **dependent(),
        )
    return out


def boxes_of(weight: Tensor, outs: int, step: int) -> Any:
    """W [E, N, K] as one matrix, for copies by the TMA unit."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(weight.view(-1, weight.shape[2]), [outs, step])


def sum_pairs(
    pairs: Tensor, chosen: Chosen, num_experts: int, *, weighs_input: bool, more: More | None
) -> Tensor:
    """pairs [P, D] -> [T, D]."""
    num_tokens, top_k = chosen.ids.shape
    dim = pairs.shape[1]
    out = pairs.new_empty(num_tokens, dim)
    block = min(SUM_BLOCK, triton.next_power_of_2(dim))
    if num_tokens:
        sum_pairs_kernel[(num_tokens, triton.cdiv(dim, block))](
            pairs,
            chosen.ids,
            chosen.weights,
            *pointers_of(more),
            out,
            num_experts,
            0 if more is None else more.values.stride(0),
            DIM=dim,
            TOP_K=top_k,
            WEIGHS=not weighs_input,
            BLOCK=block,
            num_warps=4,
            **dependent(),
        )
    return out


# As measured on an H200 with 64 experts of 1,408 features, and 128 of 768.
FEW = Tile(1, 1, 1024, 4, 1, is_swapped=False)  # outs: gated ones, of two rows of W each
FEW_DOWN = Tile(1, 4, 128, 4, 1, is_swapped=False)


def rows_for(num_pairs: int, num_experts: int, least: int = 16) -> int:
    """Rows of a tile: so many that, by chance, fourteen experts of fifteen have no more."""
    average = num_pairs / num_experts
    return min(128, max(least, triton.next_power_of_2(math.ceil(average + 1.5 * average**0.5))))


def tiles_for(rows: int, itemsize: int, device: torch.device) -> tuple[Tile, Tile]:
    """How gate_up and down are cut for tiles of so many rows."""
    platform = platform_of(device)
    room = platform.shared_memory or SHARED_MEMORY
    up, down = (fitted(tile, itemsize, room, boxes=platform.reaches(9)) for tile in TILES[rows])
    return up, down


def fitted(tile: Tile, itemsize: int, room: int, *, boxes: bool) -> Tile:
    """The tile with as many stages as there is room for, in bytes.  boxes: the GPU has a TMA unit."""
    if itemsize > 2:  # in float32 the same takes twice the room, and registers
        tile = tile._replace(step=32, outs=min(64, tile.outs))
    stage = (tile.rows + tile.outs) * tile.step * itemsize
    return tile._replace(
        num_stages=max(1, min(tile.num_stages, room // stage)), is_boxed=tile.is_boxed and boxes
    )


LARGE = Tile(128, 256, 64, 8, 4, is_swapped=False, is_boxed=True)
# As measured on an H100 with 128 experts of 768 features: few rows at 91 % of its bandwidth, and 490 TFLOP/s
# of rows that fill two thirds of their tiles.
TILES: dict[int, tuple[Tile, Tile]] = {
    16: (Tile(16, 64, 128, 4, 4, is_swapped=True), Tile(16, 64, 128, 4, 4, is_swapped=True)),
    32: (Tile(32, 64, 128, 4, 4, is_swapped=True), Tile(32, 64, 128, 4, 4, is_swapped=True)),
    64: (Tile(64, 128, 128, 4, 3, is_swapped=True), Tile(64, 128, 128, 4, 3, is_swapped=True)),
    128: (LARGE, LARGE),
}


@triton.jit
def gated(gate, up, limit, alpha, ACT: tl.constexpr):
    """As `gate_ref`, in float32.  ACT None: with a limit."""
    if ACT is None:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        y = gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
    else:
        y = activate(gate, ACT) * up
    return y


@triton.jit(do_not_specialize=["num_experts"])
def few_gate_up_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    out_ptr,
    x_stride,
    num_experts,
    limit,
    alpha,
    NUM_OUT: tl.constexpr,
    NUM_IN: tl.constexpr,
    TOP_K: tl.constexpr,
    ACT: tl.constexpr,
    WEIGHS: tl.constexpr,
    OUTS: tl.constexpr,
    STEP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a pair and block of gated outputs.

    What comes next starts behind what was before this, so it may read which experts are chosen.
    """
    pair, block = tl.program_id(0), tl.program_id(1)
    row = block * 2 * OUTS + tl.arange(0, 2 * OUTS)
    k = tl.arange(0, STEP)
    wait(DEPENDENT)
    let_next_start(DEPENDENT)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    if expert < num_experts:
        x_at = x_ptr + (pair // TOP_K).to(tl.int64) * x_stride + k
        w_at = weight_ptr + expert * NUM_OUT * NUM_IN + row[:, None] * NUM_IN + k[None, :]
        sums = tl.zeros((2 * OUTS, STEP), tl.float32)
        for start in tl.static_range(0, NUM_IN, STEP):
            inside = start + k < NUM_IN
            x = tl.load(x_at + start, mask=inside, other=0.0).to(tl.float32)
            w = tl.load(w_at + start, mask=(row < NUM_OUT)[:, None] & inside[None, :], other=0.0)
            sums += w.to(tl.float32) * x[None, :]
        y = tl.sum(sums, 1)
        if WEIGHS:
            y *= tl.load(weights_ptr + pair)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + expert * NUM_OUT + row, mask=row < NUM_OUT, other=0.0).to(tl.float32)
        gate, up = tl.split(y.reshape(OUTS, 2))
        out = block * OUTS + tl.arange(0, OUTS)
        hidden = gated(gate, up, limit, alpha, ACT)
        at = out_ptr + pair.to(tl.int64) * (NUM_OUT // 2) + out
        tl.store(at, hidden.to(out_ptr.dtype.element_ty), mask=out < NUM_OUT // 2)


@triton.jit
def plus_more(total, token, column, inside, more_ptr, more_gate_ptr, more_stride):
    """`total` and what `More` has of these features of a token."""
    if more_ptr is not None:
        more = tl.load(more_ptr + token * more_stride + column, mask=inside, other=0.0).to(tl.float32)
        if more_gate_ptr is not None:
            more = more / (1.0 + tl.exp(-tl.load(more_gate_ptr + token).to(tl.float32)))
        total += more
    return total


@triton.jit
def ask_for_rows(weight_ptr, expert, column, NUM_OUT: tl.constexpr, NUM_IN: tl.constexpr):
    """Have these rows of these experts' W [NUM_OUT, NUM_IN] in the L2 cache."""
    LINE: tl.constexpr = 1024 // weight_ptr.dtype.element_ty.primitive_bitwidth  # numbers of a line of memory
    LINES: tl.constexpr = (NUM_IN + LINE - 1) // LINE
    line = tl.minimum(tl.arange(0, triton.next_power_of_2(LINES)), LINES - 1)
    row = expert[:, None] * NUM_OUT + tl.minimum(column, NUM_OUT - 1)[None, :]
    ask_for(weight_ptr + row[:, :, None] * NUM_IN + line[None, None, :] * LINE)


@triton.jit(do_not_specialize=["num_experts"])
def few_down_kernel(
    hidden_ptr,
    weight_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    more_ptr,
    more_gate_ptr,
    out_ptr,
    num_experts,
    more_stride,
    NUM_OUT: tl.constexpr,
    NUM_IN: tl.constexpr,
    TOP_K: tl.constexpr,
    K_PADDED: tl.constexpr,
    WEIGHS: tl.constexpr,
    OUTS: tl.constexpr,
    STEP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a token and block of outputs: all its experts', whose weights are under way at once.

    They are asked for while gates and ups are still multiplied.
    """
    let_next_start(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    k = tl.arange(0, STEP)
    j = tl.arange(0, K_PADDED)
    pair = token * TOP_K + j
    expert = tl.load(ids_ptr + pair, mask=j < TOP_K, other=num_experts).to(tl.int64)
    if DEPENDENT:
        ask_for_rows(weight_ptr, tl.minimum(expert, num_experts - 1), column, NUM_OUT, NUM_IN)
    wait(DEPENDENT)
    dtype = out_ptr.dtype.element_ty
    num_in = tl.where(expert < num_experts, NUM_IN, 0)  # of nobody's, none
    weight = tl.load(weights_ptr + pair, mask=j < TOP_K, other=0.0)
    outs = tl.where(expert < num_experts, NUM_OUT, 0)[:, None]
    w_at = weight_ptr + expert[:, None, None] * NUM_OUT * NUM_IN + column[None, :, None] * NUM_IN
    h_at = hidden_ptr + pair[:, None] * NUM_IN
    sums = tl.zeros((K_PADDED, OUTS, STEP), tl.float32)
    for start in tl.static_range(0, NUM_IN, STEP):
        inside = (start + k)[None, :] < num_in[:, None]
        h = tl.load(h_at + (start + k)[None, :], mask=inside, other=0.0).to(tl.float32)
        known = (column[None, :] < outs)[:, :, None] & inside[:, None, :]
        w = tl.load(w_at + (start + k)[None, None, :], mask=known, other=0.0)
        sums += w.to(tl.float32) * h[:, None, :]
    y = tl.sum(sums, 2)
    if bias_ptr is not None:
        bias_at = bias_ptr + expert[:, None] * NUM_OUT + column[None, :]
        y += tl.load(bias_at, mask=column[None, :] < outs, other=0.0).to(tl.float32)
    y = y.to(dtype).to(tl.float32)
    if WEIGHS:
        y *= weight[:, None]
    total = tl.sum(y, 0)
    total = plus_more(total, token, column, column < NUM_OUT, more_ptr, more_gate_ptr, more_stride)
    tl.store(out_ptr + token * NUM_OUT + column, total.to(dtype), mask=column < NUM_OUT)


@triton.jit(do_not_specialize=["first_expert", "num_experts"])
def grouped_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    weights_ptr,  # [P], what x is to be times, or None
    order_ptr,
    starts_ptr,
    tiles_ptr,
    out_ptr,
    x_stride,
    first_expert,  # that is here
    num_experts,
    limit,
    alpha,
    NUM_OUT: tl.constexpr,
    NUM_IN: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    ACT: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    STEP: tl.constexpr,
    SWAPPED: tl.constexpr,
    BOXED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a tile of pairs and block of outputs; the blocks of a tile are neighbours."""
    let_next_start(DEPENDENT)
    num_blocks = tl.cdiv(NUM_OUT, OUTS)
    tile, block = tl.program_id(0) // num_blocks, tl.program_id(0) % num_blocks
    wait(DEPENDENT)
    expert = tl.load(tiles_ptr + 2 * tile) - first_expert
    if (expert >= 0) & (expert < num_experts):
        place = tl.load(tiles_ptr + 2 * tile + 1) + tl.arange(0, ROWS)
        known = place < tl.load(starts_ptr + first_expert + expert + 1)
        pair = tl.load(order_ptr + place, mask=known, other=0)
        column, k = block * OUTS + tl.arange(0, OUTS), tl.arange(0, STEP)
        x_row = pair // TOP_K if GATED else place
        x_at = x_ptr + x_row.to(tl.int64)[:, None] * x_stride + k[None, :]
        if not BOXED:
            first = expert.to(tl.int64) * NUM_OUT
            w_at = weight_ptr + (first + column)[:, None] * NUM_IN + k[None, :]
        WHOLE_OUTS: tl.constexpr = NUM_OUT % OUTS == 0
        WHOLE_STEPS: tl.constexpr = NUM_IN % STEP == 0
        y = tl.zeros((OUTS, ROWS) if SWAPPED else (ROWS, OUTS), tl.float32)
        for start in range(0, NUM_IN, STEP):
            inside = start + k < NUM_IN
            if BOXED:  # outputs beyond the last one are the next expert's, and not stored
                w = weight_ptr.load([expert * NUM_OUT + block * OUTS, start])
            elif WHOLE_OUTS and WHOLE_STEPS:
                w = tl.load(w_at + start)
            else:
                w = tl.load(w_at + start, mask=(column < NUM_OUT)[:, None] & inside[None, :], other=0.0)
            x = tl.load(x_at + start, mask=known[:, None] & inside[None, :], other=0.0)
            if SWAPPED:
                y = tl.dot(w, x.T, y, input_precision="ieee")
            else:
                y = tl.dot(x, w.T, y, input_precision="ieee")
        if SWAPPED:
            y = y.T
        if weights_ptr is not None:
            y *= tl.load(weights_ptr + pair, mask=known, other=0.0)[:, None]
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + expert * NUM_OUT + column, mask=column < NUM_OUT, other=0.0)
            y += bias.to(tl.float32)[None, :]
        dtype = out_ptr.dtype.element_ty
        if GATED:
            gate, up = tl.split(y.reshape(ROWS, OUTS // 2, 2))
            hidden = gated(gate, up, limit, alpha, ACT)
            out = block * (OUTS // 2) + tl.arange(0, OUTS // 2)
            at = out_ptr + place.to(tl.int64)[:, None] * (NUM_OUT // 2) + out[None, :]
            tl.store(at, hidden.to(dtype), mask=known[:, None] & (out < NUM_OUT // 2)[None, :])
        else:
            at = out_ptr + pair.to(tl.int64)[:, None] * NUM_OUT + column[None, :]
            tl.store(at, y.to(dtype), mask=known[:, None] & (column < NUM_OUT)[None, :])


@triton.jit
def sum_of_pairs(
    pairs_ptr, ids_ptr, weights_ptr, more_ptr, more_gate_ptr, token, column, num_experts, more_stride,
    DIM: tl.constexpr, TOP_K: tl.constexpr, WEIGHS: tl.constexpr,
):  # fmt: skip
    """These features of what a token's experts give, and of what is added to that, in float32."""
    total = tl.zeros(column.shape, tl.float32)
    for j in tl.static_range(TOP_K):
        pair = token * TOP_K + j
        dim = tl.where(tl.load(ids_ptr + pair) < num_experts, DIM, 0)
        part = tl.load(pairs_ptr + pair * DIM + column, mask=column < dim, other=0.0).to(tl.float32)
        total += part * tl.load(weights_ptr + pair) if WEIGHS else part
    return plus_more(total, token, column, column < DIM, more_ptr, more_gate_ptr, more_stride)


@triton.jit(do_not_specialize=["num_experts"])
def sum_pairs_kernel(
    pairs_ptr,
    ids_ptr,
    weights_ptr,
    more_ptr,
    more_gate_ptr,
    out_ptr,
    num_experts,
    more_stride,
    DIM: tl.constexpr,
    TOP_K: tl.constexpr,
    WEIGHS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a token and block of features."""
    let_next_start(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < DIM
    wait(DEPENDENT)
    total = sum_of_pairs(
        pairs_ptr, ids_ptr, weights_ptr, more_ptr, more_gate_ptr, token, column, num_experts, more_stride,
        DIM, TOP_K, WEIGHS,
    )  # fmt: skip
    tl.store(out_ptr + token * DIM + column, total.to(out_ptr.dtype.element_ty), mask=inside)
