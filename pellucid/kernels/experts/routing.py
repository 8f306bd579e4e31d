# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
"""Which experts each token goes to, and the tokens of each expert side by side.

A *pair* is a token and one of its experts, number token * k + j.  `route` chooses and weighs; `sort_pairs`
puts the pairs in order of their experts, those of one expert by number, and cuts them into tiles.  One
program an expert counts and places its own pairs, so no atomics add anything up, and the same tokens have the
same order in every run.  All shapes follow from the number of tokens alone, as recorded graphs need it.

Legend: T tokens, E experts, k chosen of a token, P = T * k pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pellucid.kernels.lang.dependent import ask_for, dependent, let_next_start, wait
from pellucid.kernels.lang.language import tl, triton
from pellucid.kernels.sampling.noise import PRIME, keys_ref, uniform

# Tokens whose logits are summed up here, as measured on an H200; of few, each expert's in one program.
FEW_TOKENS, MOST_TOKENS = 2, 512
PART_PROGRAMS = 512
BLOCKS = 1024, 2048, 8192  # pairs that a program counts at a time: the last where there are more


@dataclass(frozen=True, slots=True)
class Routing:
    """How experts are chosen and weighed.

    Softmax over the chosen ones is softmax over all of them, renormalised.
    """

    num_experts: int
    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = True  # weights add up to 1, before they are scaled
    scale: float = 1.0
    floor: float = 0.0  # added to the sum that weights are divided by
    groups: int = 1  # of experts side by side
    top_groups: int = 1  # of which experts may be chosen
    group_score: Literal["max", "top2"] = "max"  # a group's best score, or the sum of its two best

    def __post_init__(self) -> None:
        """Raises ValueError for more experts a token than it may choose among."""
        most = self.num_experts // self.groups * self.top_groups
        if self.top_k > most:
            raise ValueError(
                f"config.json has tokens take {self.top_k} experts (num_experts_per_tok), and choose among "
                f"{most}: of {self.num_experts} in {self.groups} groups those of the best {self.top_groups}"
            )


@dataclass(frozen=True, slots=True)
class Share:
    """Which experts are here: `num` from `first` on."""

    first: int
    num: int


@dataclass(frozen=True, slots=True)
class Uniform:
    """Choose by chance instead: what models with random weights do when their speed is measured."""

    token_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int64
    salt: int  # of the layer


class Parts(NamedTuple):
    """Logits whose sums over inputs are not added up yet."""

    sums: Tensor  # [S, T, E] float32
    added: Tensor | None = None  # [E], a bias of the product
    dtype: torch.dtype = torch.float32  # that they are rounded to

    def total(self) -> Tensor:
        """[T, E] float32"""
        total = self.sums.sum(0)
        total = total if self.added is None else total + self.added
        return total.to(self.dtype).float()


@dataclass(frozen=True, slots=True)
class Chosen:
    """Of each token, in the order of falling scores."""

    ids: Tensor  # [T, k] int32, numbers among the experts that are here; their number: nobody here
    weights: Tensor  # [T, k] float32


@dataclass(frozen=True, slots=True)
class Sorted:
    """The pairs by experts."""

    order: Tensor  # [P] int32, pairs by (expert, number); behind those that are anybody's, garbage
    starts: Tensor  # [E + 1] int32, where each expert's begin in `order`, and where the last one's end
    tiles: Tensor  # [most tiles, 2] int32: an expert and where in `order` it begins; E: nobody's tile
    places: Tensor | None = None  # [P] int32, where in `order` each pair is; of nobody's, garbage


def route(
    logits: Tensor | Parts,
    routing: Routing,
    share: Share,
    *,
    bias: Tensor | None = None,
    end: Tensor | None = None,
    uniform: Uniform | None = None,
) -> Chosen:
    """logits [T, E].  bias [E] float32: to choose by, not to weigh with.

    end: one integer; tokens from this number on are padding, which goes to nobody.
    """
    logits, added, dtype = logits if isinstance(logits, Parts) else (logits, None, torch.float32)
    num_tokens, num_experts = logits.shape[-2:]
    assert num_experts == routing.num_experts and logits.stride(-1) == 1, logits.shape
    ids = torch.empty((num_tokens, routing.top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((num_tokens, routing.top_k), dtype=torch.float32, device=logits.device)
    if num_tokens:
        route_kernel[(num_tokens,)](
            logits,
            added,
            bias,
            end,
            None if uniform is None else uniform.token_ids,
            None if uniform is None else uniform.positions,
            ids,
            weights,
            logits.stride(-2),
            logits.stride(0),
            0 if uniform is None else uniform.salt,
            share.first,
            share.num,
            routing.scale,
            routing.floor,
            E=num_experts,
            E_PADDED=triton.next_power_of_2(num_experts),
            PARTS=len(logits) if logits.ndim == 3 else 1,
            DTYPE=getattr(tl, str(dtype).removeprefix("torch.")),
            TOP_K=routing.top_k,
            K_PADDED=triton.next_power_of_2(routing.top_k),
            SIGMOID=routing.score == "sigmoid",
            RENORMALISE=routing.renormalise,
            GROUPS=routing.groups,
            TOP_GROUPS=routing.top_groups,
            TOP2=routing.group_score == "top2",
            num_warps=1 if num_experts <= 128 else 2,
            **dependent(),
        )
    return Chosen(ids, weights)


def route_ref(
    logits: Tensor | Parts,
    routing: Routing,
    share: Share,
    *,
    bias: Tensor | None = None,
    end: Tensor | None = None,
    uniform: Uniform | None = None,
) -> Chosen:
    """The same in plain torch: what CPUs run."""
    logits = logits.total() if isinstance(logits, Parts) else logits.float()
    logits = logits if uniform is None else chances_ref(uniform, routing.num_experts)
    scores = logits.softmax(-1) if routing.score == "softmax" else logits.sigmoid()
    liking = scores if bias is None else scores + bias
    if routing.groups > 1:
        liking = in_best_groups_ref(liking, routing)
    ids = liking.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    weights = scores.gather(1, ids)
    if routing.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + routing.floor)
    here = ids - share.first
    nobody = (here < 0) | (here >= share.num)
    if end is not None:
        nobody |= (torch.arange(len(ids), device=ids.device) >= end)[:, None]
    return Chosen(here.masked_fill(nobody, share.num).int(), weights * routing.scale)


def logit_parts(x: Tensor, weight: Tensor, added: Tensor | None = None) -> Parts | None:
    """x [T, D] W^T of W [E, D], in x's dtype or float32, plus a bias; None where the library is as fast."""
    num_tokens, num_experts = len(x), len(weight)
    if x.itemsize > 2 or not 0 < num_tokens <= MOST_TOKENS or x.stride(1) != 1:
        return None
    if num_tokens <= FEW_TOKENS:
        return Parts(sums_of_few(x, weight), added, weight.dtype)
    rows, outs, step = part_tile(num_experts, weight.itemsize)
    blocks = triton.cdiv(num_tokens, rows) * triton.cdiv(num_experts, outs)
    num_parts = max(1, min(PART_PROGRAMS // blocks, x.shape[1] // (2 * step), 32))
    num_parts = 1 << num_parts.bit_length() - 1  # of few kinds of launches
    sums = torch.empty(num_parts, num_tokens, num_experts, dtype=torch.float32, device=x.device)
    grid = triton.cdiv(num_tokens, rows), triton.cdiv(num_experts, outs), num_parts
    logit_parts_kernel[grid](
        x,
        weight,
        sums,
        num_tokens,
        x.stride(0),
        NUM_IN=x.shape[1],
        E=num_experts,
        ROWS=rows,
        OUTS=outs,
        STEP=step,
        num_warps=4,
        num_stages=3,
        **dependent(),
    )
    return Parts(sums, added, weight.dtype)


def part_tile(num_experts: int, itemsize: int) -> tuple[int, int, int]:
    """Tokens, experts and inputs at a time, as measured on an H200.  itemsize: bytes of a weight."""
    outs = 64 if num_experts > 32 else 32
    return 16, outs, 128 if itemsize == 2 and outs == 64 else 64


def sums_of_few(x: Tensor, weight: Tensor) -> Tensor:
    """The same, [1, T, E], with weights that are asked for while the kernel before still runs."""
    num_experts, num_in = weight.shape
    out = torch.empty(1, len(x), num_experts, dtype=torch.float32, device=x.device)
    few_logits_kernel[(num_experts,)](
        x,
        weight,
        out,
        len(x),
        x.stride(0),
        num_experts,
        NUM_IN=num_in,
        PADDED=triton.next_power_of_2(num_in),
        num_warps=4,
        **dependent(),
    )
    return out


def chances_ref(uniform: Uniform, num_experts: int) -> Tensor:
    """Numbers on [0, 1) in the place of logits, float32 [T, E]."""
    purposes = torch.arange(num_experts, device=uniform.positions.device)[:, None]
    seeds = uniform.token_ids.long() + uniform.salt * SALT.value
    hashed = keys_ref(seeds, uniform.positions, purposes) * PRIME.value
    return (hashed.float().abs() * 2.0**-63).T.contiguous()


def in_best_groups_ref(liking: Tensor, routing: Routing) -> Tensor:
    """liking [T, E], -inf outside of each token's best groups."""
    by_group = liking.unflatten(1, (routing.groups, -1))
    best = by_group.topk(min(2 if routing.group_score == "top2" else 1, by_group.shape[-1]), -1).values.sum(
        -1
    )
    chosen = best.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_groups]
    is_open = torch.zeros_like(best, dtype=torch.bool).scatter_(1, chosen, value=True)
    return by_group.masked_fill(~is_open[:, :, None], float("-inf")).flatten(1)


def most_tiles(num_pairs: int, num_experts: int, tile: int) -> int:
    """So many tiles hold any pairs of any experts: each expert has at most one that is not full."""
    return num_pairs // tile + num_experts


def sort_pairs(chosen: Chosen, num_experts: int, tile: int, *, has_places: bool = False) -> Sorted:
    """Order the pairs of so many experts, and cut each expert's into tiles of `tile`.

    has_places: the result is to tell where each pair is.
    """
    ids = chosen.ids
    num_pairs, device = ids.numel(), ids.device
    num_tiles = most_tiles(num_pairs, num_experts, tile)
    order = torch.empty(num_pairs, dtype=torch.int32, device=device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    tiles = torch.empty((num_tiles, 2), dtype=torch.int32, device=device)
    places = torch.empty(num_pairs, dtype=torch.int32, device=device) if has_places else None
    assert ids.is_contiguous()
    block = next((size for size in BLOCKS if num_pairs <= size), BLOCKS[-1])
    if num_pairs:
        sort_kernel[(num_experts + 1,)](
            ids,
            order,
            places,
            starts,
            tiles,
            num_pairs,
            num_tiles,
            E=num_experts,
            TILE=tile,
            BLOCK=block,
            num_warps=4 if block < BLOCKS[-1] else 8,
            **dependent(),
        )
    return Sorted(order, starts, tiles, places)


def sort_pairs_ref(chosen: Chosen, num_experts: int, tile: int) -> Sorted:
    """The same in plain torch."""
    ids = chosen.ids.flatten()
    order = ids.sort(stable=True).indices.int()
    counts = torch.bincount(ids, minlength=num_experts + 1)[:num_experts]
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    tiles = torch.full((most_tiles(len(ids), num_experts, tile), 2), num_experts)
    for expert, (first, last) in enumerate(zip(starts.tolist(), starts.tolist()[1:], strict=False)):
        for i, at in enumerate(range(first, last, tile)):
            tiles[first // tile + expert + i] = torch.tensor([expert, at])
    places = torch.empty_like(order)
    places[order.long()] = torch.arange(len(order), dtype=torch.int32, device=order.device)
    return Sorted(order, starts.int(), tiles.int(), places)


SALT = tl.constexpr(1 << 32)  # above all token ids
AHEAD = tl.constexpr(2)  # steps of weights to ask for before the kernel before has ended
NEVER = tl.constexpr(float("-inf"))
LAST = tl.constexpr(-(2**63))


@triton.jit
def best_of(values):
    """(largest, its place), the first one if there are several."""
    return tl.max(values, 0), tl.argmax(values, 0)


@triton.jit
def in_best_groups(
    liking, expert, E: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr
):
    """As `in_best_groups_ref`, of one token."""
    SIZE: tl.constexpr = E // GROUPS
    group = expert // SIZE
    scores = tl.full(expert.shape, NEVER, tl.float32)  # of group g at place g
    for g in tl.static_range(GROUPS):
        members = tl.where(group == g, liking, NEVER)
        score, place = best_of(members)
        if TOP2 and SIZE > 1:
            score += tl.max(tl.where(expert == place, NEVER, members), 0)
        scores = tl.where(expert == g, score, scores)
    is_open = expert < 0
    for _ in tl.static_range(TOP_GROUPS):
        _, best = best_of(scores)
        is_open = is_open | (group == best)
        scores = tl.where(expert == best, NEVER, scores)
    return tl.where(is_open, liking, NEVER)


@triton.jit(
    do_not_specialize=["part_stride", "salt", "first", "num_here"],
    do_not_specialize_on_alignment=["end_ptr", "token_ids_ptr", "positions_ptr"],
)
def route_kernel(
    logits_ptr,
    added_ptr,  # [E], a bias of the logits, or None
    bias_ptr,  # [E] or None
    end_ptr,  # one integer, or None
    token_ids_ptr,  # [T], or None: choose by logits
    positions_ptr,  # [T]
    ids_ptr,
    weights_ptr,
    stride,
    part_stride,
    salt,
    first,
    num_here,
    scale,
    floor,
    E: tl.constexpr,
    E_PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    DTYPE: tl.constexpr,  # that sums of parts are rounded to
    TOP_K: tl.constexpr,
    K_PADDED: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALISE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a token."""
    let_next_start(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, E_PADDED)
    place = tl.arange(0, K_PADDED)
    inside = expert < E
    bias = tl.load(bias_ptr + expert, mask=inside, other=0.0) if bias_ptr is not None else 0.0
    added = tl.load(added_ptr + expert, mask=inside, other=0.0) if added_ptr is not None else 0.0
    wait(DEPENDENT)
    if token_ids_ptr is None:
        at = logits_ptr + token * stride + expert
        logits = tl.load(at, mask=inside, other=NEVER).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            logits += tl.load(at + part * part_stride, mask=inside, other=0.0)
        logits = (logits + added).to(DTYPE).to(tl.float32)
    else:
        seed = tl.load(token_ids_ptr + token).to(tl.int64) + salt.to(tl.int64) * SALT
        chance = uniform(seed, tl.load(positions_ptr + token), expert.to(tl.int64))
        logits = tl.where(inside, chance, NEVER)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        powers = tl.exp(logits - tl.max(logits, 0))
        scores = powers / tl.sum(powers, 0)
    liking = tl.where(inside, scores + bias, NEVER)
    if GROUPS > 1:
        liking = in_best_groups(liking, expert, E, GROUPS, TOP_GROUPS, TOP2)
    # A number and its place in one integer, so that to find both is one reduction; at a tie the first one.
    bits = liking.to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32
    ranks = ordered | (E_PADDED - 1 - expert).to(tl.int64)
    ids = tl.zeros((K_PADDED,), tl.int32)
    for j in tl.static_range(TOP_K):
        best = E_PADDED - 1 - (tl.max(ranks, 0) & 0xFFFFFFFF).to(tl.int32)
        ids = tl.where(place == j, best, ids)
        ranks = tl.where(expert == best, LAST, ranks)
    is_its = (ids[:, None] == expert[None, :]) & (place < TOP_K)[:, None]
    weights = tl.sum(tl.where(is_its, scores[None, :], 0.0), 1)
    if RENORMALISE:
        weights = weights / (tl.sum(weights, 0) + floor)
    here = ids - first
    here = tl.where((here >= 0) & (here < num_here), here, num_here)
    if end_ptr is not None:
        here = tl.where(token < tl.load(end_ptr), here, num_here)
    tl.store(ids_ptr + token * TOP_K + place, here, mask=place < TOP_K)
    tl.store(weights_ptr + token * TOP_K + place, weights * scale, mask=place < TOP_K)


@triton.jit(do_not_specialize=["num_tokens"])
def logit_parts_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,  # [S, T, E]
    num_tokens,
    x_stride,
    NUM_IN: tl.constexpr,
    E: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    STEP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a tile of tokens, a block of experts and a range of inputs."""
    let_next_start(DEPENDENT)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    part, parts = tl.program_id(2), tl.num_programs(2)
    k = tl.arange(0, STEP)
    steps: tl.constexpr = (NUM_IN + STEP - 1) // STEP
    first, last = steps * part // parts, steps * (part + 1) // parts
    if DEPENDENT:
        LINE: tl.constexpr = 1024 // weight_ptr.dtype.element_ty.primitive_bitwidth  # numbers of a line
        line = first * STEP + tl.arange(0, AHEAD * STEP // LINE) * LINE
        known = (expert < E)[:, None] & (line < NUM_IN)[None, :]
        ask_for(tl.where(known, weight_ptr + expert[:, None] * NUM_IN + line[None, :], weight_ptr))
    wait(DEPENDENT)
    y = tl.zeros((OUTS, ROWS), tl.float32)
    for step in range(first, last):
        inside = step * STEP + k < NUM_IN
        w_at = weight_ptr + expert[:, None] * NUM_IN + (step * STEP + k)[None, :]
        w = tl.load(w_at, mask=(expert < E)[:, None] & inside[None, :], other=0.0)
        x_at = x_ptr + token.to(tl.int64)[None, :] * x_stride + (step * STEP + k)[:, None]
        x = tl.load(x_at, mask=(token < num_tokens)[None, :] & inside[:, None], other=0.0)
        y = tl.dot(w, x.to(w.dtype), y, input_precision="tf32x3")
    at = out_ptr + (part.to(tl.int64) * num_tokens + token[None, :]) * E + expert[:, None]
    tl.store(at, y, mask=(token < num_tokens)[None, :] & (expert < E)[:, None])


@triton.jit(do_not_specialize=["num_tokens"])
def few_logits_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,  # [1, T, E]
    num_tokens,
    x_stride,
    num_experts,
    NUM_IN: tl.constexpr,
    PADDED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program an expert."""
    let_next_start(DEPENDENT)
    expert, k = tl.program_id(0), tl.arange(0, PADDED)
    w = tl.load(weight_ptr + expert * NUM_IN + k, mask=k < NUM_IN, other=0.0).to(tl.float32)
    wait(DEPENDENT)
    for token in range(num_tokens):
        x = tl.load(x_ptr + token * x_stride + k, mask=k < NUM_IN, other=0.0).to(tl.float32)
        tl.store(out_ptr + token * num_experts + expert, tl.sum(w * x, 0))


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def sort_kernel(
    ids_ptr,
    order_ptr,
    places_ptr,  # or None
    starts_ptr,
    tiles_ptr,
    num_pairs,
    num_tiles,
    E: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program an expert, and the last one for the tiles that are nobody's."""
    let_next_start(DEPENDENT)
    mine, lane = tl.program_id(0), tl.arange(0, BLOCK)
    wait(DEPENDENT)
    fewer, equal = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, num_pairs, BLOCK):
        ids = tl.load(ids_ptr + begin + lane, mask=begin + lane < num_pairs, other=E + 1)
        fewer += (ids < mine).to(tl.int32)
        equal += (ids == mine).to(tl.int32)
    start, count = tl.sum(fewer, 0), tl.sum(equal, 0)
    tl.store(starts_ptr + mine, start)
    # Every expert has room for tiles up to where the next one's begins, whatever the counts.
    first, last = start // TILE + mine, (start + count) // TILE + mine + 1
    if mine == E:
        count, last = 0, num_tiles
    for begin in range(first, last, BLOCK):
        at = begin + lane
        offset = (at - first) * TILE
        tl.store(tiles_ptr + 2 * at, tl.where(offset < count, mine, E), mask=at < last)
        tl.store(tiles_ptr + 2 * at + 1, start + offset, mask=at < last)
    if count > 0:
        for begin in range(0, num_pairs, BLOCK):
            ids = tl.load(ids_ptr + begin + lane, mask=begin + lane < num_pairs, other=E + 1)
            is_mine = (ids == mine).to(tl.int32)
            place = start + tl.cumsum(is_mine, 0) - 1
            tl.store(order_ptr + place, begin + lane, mask=is_mine != 0)
            if places_ptr is not None:
                tl.store(places_ptr + begin + lane, place, mask=is_mine != 0)
            start += tl.sum(is_mine, 0)
