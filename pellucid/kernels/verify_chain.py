# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
"""Which drafts of a chain stand, and what each row yields: a dozen of torch's small launches in one.

Legend: B rows, S logits, K tokens a row can yield.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pellucid.kernels.dependent import dependent, let_next_start, wait
from pellucid.kernels.language import tl, triton


def verify_chain_ref(
    chosen: Tensor, inputs: Tensor, cu_logits: Tensor, room: Tensor, samples: Tensor, *, max_new: int
) -> Tensor:
    """[B * K + B] int32: K tokens of each row, then how many of them count.  The other tokens are any.

    chosen: [S] int32, the token at each logit.  inputs: [S] int32, the token that was fed there.  cu_logits:
    [B + 1] integers.  room: [B] integers, most tokens that a row may yield.  samples: [B] bool, whether it
    yields any.  max_new: K, at least any row's logits.
    """
    start, count = cu_logits[:-1].long(), cu_logits.diff()
    places = chain_places(cu_logits, len(chosen), max_new)
    tokens = chosen[places] if len(chosen) else chosen.new_zeros(places.shape)
    num_new = torch.ones_like(start)
    if max_new > 1 and len(chosen):
        # The draft at node j + 1 stands if the token at node j is the same and all before it stand.
        is_draft = torch.arange(1, max_new, device=start.device) < count[:, None]
        stands = (tokens[:, :-1] == inputs[places[:, 1:]]) & is_draft
        num_new = 1 + stands.int().cumprod(-1).sum(-1)
    num_new = torch.minimum(num_new, room.clamp(min=0)) * (samples & (count > 0))
    return torch.cat([tokens.flatten(), num_new.int()])


def chain_places(cu_logits: Tensor, num_logits: int, max_new: int) -> Tensor:
    """[B, K] int64, the logits of each row's nodes; any valid one for nodes that it does not have."""
    node = torch.arange(max_new, device=cu_logits.device)
    return (cu_logits[:-1, None].long() + node).clamp_(max=num_logits - 1).clamp_(min=0)


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
