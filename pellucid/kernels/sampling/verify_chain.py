# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
"""Which drafts of a chain stand, and what each row yields: a dozen of torch's small launches in one.

And before it, where chance is to decide instead of the tokens chosen, what the walk is to see then: four
dozen in one.

Legend: B rows, S logits, K tokens a row can yield, R rates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pellucid.kernels.lang.dependent import dependent, let_next_start, wait
from pellucid.kernels.lang.language import tl, triton
from pellucid.kernels.sampling.noise import uniform, uniforms_ref
from pellucid.kernels.slots.gather_rows import owners

NO_TOKEN = tl.constexpr(-1)
NODES = 32  # of a row that a program looks at together


def verify_chain_ref(
    chosen: Tensor, inputs: Tensor, cu_logits: Tensor, room: Tensor, samples: Tensor, *, max_new: int
) -> Tensor:
    """[B * K + B] int32: K tokens of each row, then how many of them count.  The other tokens are any.

    chosen: [S] int32, the token at each logit.  inputs: [S] int32, the token that was fed there.  cu_logits:
    [B + 1] integers.  room: [B] integers, most tokens that a row may yield.  samples: [B] bool, whether it
    yields any.  max_new: K, at least any row's logits.
    """
    start, count = cu_logits[:-1].long(), cu_logits.diff()
    places = node_places(cu_logits, torch.arange(max_new, device=start.device), len(chosen))
    tokens = chosen[places] if len(chosen) else chosen.new_zeros(places.shape)
    num_new = torch.ones_like(start)
    if max_new > 1 and len(chosen):
        # The draft at node j + 1 stands if the token at node j is the same and all before it stand.
        is_draft = torch.arange(1, max_new, device=start.device) < count[:, None]
        stands = (tokens[:, :-1] == inputs[places[:, 1:]]) & is_draft
        num_new = 1 + stands.int().cumprod(-1).sum(-1)
    num_new = torch.minimum(num_new, room.clamp(min=0)) * (samples & (count > 0))
    return torch.cat([tokens.flatten(), num_new.int()])


def node_places(cu_logits: Tensor, nodes: Tensor, num_logits: int) -> Tensor:
    """[B, n] int64, the logits of `nodes` [B, n] or [n]; any valid one for nodes that a row does not have."""
    return (cu_logits[:-1, None].long() + nodes).clamp_(max=num_logits - 1).clamp_(min=0)


def verify_chain(
    chosen: Tensor, inputs: Tensor, cu_logits: Tensor, room: Tensor, samples: Tensor, *, max_new: int
) -> Tensor:
    """As `verify_chain_ref`, in one launch."""
    assert chosen.shape == inputs.shape and chosen.is_contiguous() and inputs.is_contiguous()
    num_rows = len(room)
    out = chosen.new_empty(num_rows * (max_new + 1))
    verify_chain_kernel[(num_rows,)](
        chosen,
        inputs,
        cu_logits,
        room,
        samples,
        out,
        K=max_new,
        K_PADDED=triton.next_power_of_2(max_new),
        num_warps=1,
        **dependent(),
    )
    return out


@triton.jit(do_not_specialize_on_alignment=["inputs_ptr", "cu_logits_ptr"])
def verify_chain_kernel(
    chosen_ptr,  # [S]
    inputs_ptr,  # [S]
    cu_logits_ptr,  # [B + 1]
    room_ptr,  # [B]
    samples_ptr,  # [B]
    flat_ptr,  # [B * K + B]
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a row."""
    let_next_start(DEPENDENT)
    row, num_rows = tl.program_id(0), tl.num_programs(0)
    node = tl.arange(0, K_PADDED)
    wait(DEPENDENT)
    first = tl.load(cu_logits_ptr + row)
    count = tl.load(cu_logits_ptr + row + 1) - first
    token = tl.load(chosen_ptr + first + node, mask=node < count, other=0)
    draft = tl.load(inputs_ptr + first + node + 1, mask=node + 1 < count, other=0)
    falls = (token != draft) | (node + 1 >= count)
    num_new = 1 + tl.min(tl.where(falls, node, K_PADDED), 0)
    yields = (tl.load(samples_ptr + row) != 0) & (count > 0)
    room = tl.maximum(tl.load(room_ptr + row), 0).to(tl.int32)
    tl.store(flat_ptr + row * K + node, token, mask=node < K)
    tl.store(flat_ptr + num_rows * K + row, tl.where(yields, tl.minimum(num_new, room), 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Chance:
    """How likely each draft is to stand, and whose noise decides."""

    rates: Tensor  # [R] float32, of the drafts behind a row's nodes 0, 1, ..; the last one of all that follow
    seeds: Tensor  # [slots] int64, may be the column of a table
    slots: Tensor  # [S] int64
    positions: Tensor  # [S] int64, of the tokens to be chosen
    purpose: int  # of sample/noise.py


def take_by_chance_ref(
    chosen: Tensor, inputs: Tensor, cu_logits: Tensor, chance: Chance
) -> tuple[Tensor, Tensor]:
    """Let each draft stand or fall by itself: [S] tokens chosen and [S] tokens fed for `verify_chain`, int32.

    Where a draft stands it is what was chosen before it; where it falls NO_TOKEN was fed, also if it happens
    to be what was chosen.  What a row's node 0 was fed may be anything, as in `verify_chain`.
    """
    start, count = cu_logits[:-1].long(), cu_logits.diff()
    logit, row = owners(cu_logits, len(chosen))
    node = logit - start[row]
    rates = chance.rates[node.clamp(max=len(chance.rates) - 1)]
    number = uniforms_ref(chance.seeds[chance.slots], chance.positions, chance.purpose)
    stands = (node + 1 < count[row]) & (number < rates)
    return inputs.roll(-1).where(stands, chosen), inputs.masked_fill(~stands.roll(1), NO_TOKEN.value)


def take_by_chance(
    chosen: Tensor, inputs: Tensor, cu_logits: Tensor, chance: Chance
) -> tuple[Tensor, Tensor]:
    """As `take_by_chance_ref`, in one launch."""
    assert chosen.shape == inputs.shape == chance.slots.shape == chance.positions.shape, chosen.shape
    assert all(x.is_contiguous() for x in (chosen, inputs, chance.slots, chance.positions, chance.rates))
    taken, fed = torch.empty_like(chosen), torch.empty_like(inputs)
    take_by_chance_kernel[(len(cu_logits) - 1,)](
        chosen,
        inputs,
        cu_logits,
        chance.rates,
        chance.seeds,
        chance.slots,
        chance.positions,
        taken,
        fed,
        chance.seeds.stride(0),
        len(chance.rates),
        PURPOSE=chance.purpose,
        NODES=NODES,
        num_warps=1,
        **dependent(),
    )
    return taken, fed


@triton.jit(
    do_not_specialize=["num_rates"],
    do_not_specialize_on_alignment=["inputs_ptr", "cu_logits_ptr", "slots_ptr", "positions_ptr"],
)
def take_by_chance_kernel(
    chosen_ptr,  # [S]
    inputs_ptr,  # [S]
    cu_logits_ptr,  # [B + 1]
    rates_ptr,  # [R]
    seeds_ptr,
    slots_ptr,  # [S]
    positions_ptr,  # [S]
    taken_ptr,  # [S]
    fed_ptr,  # [S]
    seed_stride,
    num_rates,
    PURPOSE: tl.constexpr,
    NODES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a row, of any number of logits."""
    let_next_start(DEPENDENT)
    row = tl.program_id(0)
    lane = tl.arange(0, NODES)
    wait(DEPENDENT)
    first, end = tl.load(cu_logits_ptr + row), tl.load(cu_logits_ptr + row + 1)
    for start in range(first, end, NODES):
        logit = start + lane
        is_own, has_draft = logit < end, logit + 1 < end
        slot = tl.load(slots_ptr + logit, mask=is_own, other=0)
        seed = tl.load(seeds_ptr + slot * seed_stride, mask=is_own, other=0)
        position = tl.load(positions_ptr + logit, mask=is_own, other=0)
        rate = tl.load(rates_ptr + tl.minimum(logit - first, num_rates - 1), mask=is_own, other=0.0)
        draft = tl.load(inputs_ptr + logit + 1, mask=has_draft, other=NO_TOKEN)
        own = tl.load(chosen_ptr + logit, mask=is_own, other=NO_TOKEN)
        stands = has_draft & (uniform(seed, position, PURPOSE) < rate)
        tl.store(taken_ptr + logit, tl.where(stands, draft, own), mask=is_own)
        tl.store(fed_ptr + logit + 1, tl.where(stands, draft, NO_TOKEN), mask=has_draft)
