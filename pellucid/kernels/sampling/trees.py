# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
"""Trees of drafts, each row's its own: where a step's tokens are in their texts, and which path stands.

A row's node 0 is its last committed token, node i its i-th draft; `parents` names the node before each draft,
which comes before it, so the first few drafts of a tree are a tree, too.  One launch each for a few dozen.

Legend: T tokens, B rows, S logits, N drafts of a slot, D depth of the trees, K tokens a row can yield.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pellucid.kernels.lang.dependent import dependent, let_next_start, wait
from pellucid.kernels.lang.language import tl, triton
from pellucid.kernels.sampling.verify_chain import node_places
from pellucid.kernels.slots.gather_rows import owners
from pellucid.rows import SlotRows, StepRows, Trees

BLOCK = 128  # tokens of a row that a program looks at together
NOWHERE = tl.constexpr(1 << 30)  # no node


@dataclass(frozen=True, slots=True, kw_only=True)
class TreePlaces:
    """Where a step's tokens and logits are in their texts; zeros, and position 1, behind all rows."""

    positions: Tensor  # [T] int64
    ancestors: Tensor  # [T] int64: bit i is the row's draft i + 1; a draft has its own bit, too
    logit_positions: Tensor  # [S] int64, of the tokens to be chosen
    logit_roots: Tensor  # [S] int64, the places of the rows' nodes 0
    paths: Tensor  # [S, D] int64: the drafts at depth 1, 2, .. on the way to the logit's node; then zeros


def tree_places_ref(step: StepRows, held: SlotRows, trees: Trees) -> TreePlaces:
    """From places to positions."""
    nodes = _Nodes.of(trees)
    token, row = owners(held.cu_seqlens_q, step.num_tokens)
    is_token = token < held.cu_seqlens_q[-1]
    node = (held.places - held.roots[row]).clamp(min=0).where(is_token, 0)
    positions = held.places - node + nodes.depths[row, node]
    logit, row_of_logit = owners(step.cu_logits, step.num_logits)
    is_logit = logit < step.cu_logits[-1]
    at = step.logits_index.where(is_logit, 0)
    return TreePlaces(
        positions=positions,
        ancestors=nodes.ancestors[row, node],
        logit_positions=positions[at].where(is_logit, 0) + 1,
        logit_roots=held.roots[row_of_logit].where(is_logit, 0),
        paths=nodes.paths[row_of_logit, node[at]].where(is_logit[:, None], 0),
    )


@dataclass(frozen=True, slots=True)
class _Nodes:
    """Of every row's nodes 0 .. N; int64."""

    depths: Tensor  # [B, 1 + N]
    ancestors: Tensor  # [B, 1 + N]
    paths: Tensor  # [B, 1 + N, D]

    @classmethod
    def of(cls, trees: Trees) -> _Nodes:
        before = torch.nn.functional.pad(trees.parents[trees.slots].long(), (1, 0))
        node = torch.arange(before.shape[1], device=before.device).expand_as(before)
        chain = [node]  # of each node itself, the node before it, ..
        for _ in range(trees.depth - 1):
            chain.append(before.gather(1, chain[-1]))
        upwards = torch.stack(chain, dim=-1)
        depths = (upwards > 0).sum(-1)
        bits = torch.where(upwards > 0, 1 << (upwards - 1).clamp(min=0), 0)
        back = depths[..., None] - 1 - torch.arange(trees.depth, device=before.device)
        paths = upwards.gather(-1, back.clamp(min=0)).where(back >= 0, 0)
        return cls(depths, bits.sum(-1), paths)


def tree_places(step: StepRows, held: SlotRows, trees: Trees) -> TreePlaces:
    """As `tree_places_ref`, in one launch."""
    places, parents = held.places, trees.parents
    num_tokens, num_logits = step.num_tokens, step.num_logits
    out = TreePlaces(
        positions=torch.empty_like(places),
        ancestors=torch.empty_like(places),
        logit_positions=places.new_empty(num_logits),
        logit_roots=places.new_empty(num_logits),
        paths=places.new_empty((num_logits, trees.depth)),
    )
    tree_places_kernel[(len(held.slots) + 1,)](
        held.slots,
        held.cu_seqlens_q,
        step.cu_logits,
        held.roots,
        places,
        parents,
        out.positions,
        out.ancestors,
        out.logit_positions,
        out.logit_roots,
        out.paths,
        parents.stride(0),
        num_tokens,
        num_logits,
        DEPTH=trees.depth,
        BLOCK=BLOCK,
        **dependent(),
    )
    return out


@triton.jit(
    do_not_specialize=["num_tokens", "num_logits", "parents_stride"],
    do_not_specialize_on_alignment=["slots_ptr", "cu_logits_ptr"],
)
def tree_places_kernel(
    slots_ptr,  # [B]
    cu_query_ptr,  # [B + 1]
    cu_logits_ptr,  # [B + 1]
    roots_ptr,  # [B]
    places_ptr,  # [T]
    parents_ptr,  # [slots, N]
    positions_ptr,  # [T]
    ancestors_ptr,  # [T]
    logit_positions_ptr,  # [S]
    logit_roots_ptr,  # [S]
    paths_ptr,  # [S, D]
    parents_stride,
    num_tokens,  # T
    num_logits,  # S
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a row; the last one is for padding."""
    let_next_start(DEPENDENT)
    row, num_rows = tl.program_id(0).to(tl.int64), tl.num_programs(0) - 1
    lane = tl.arange(0, BLOCK)
    zeros = tl.zeros([BLOCK], tl.int64)
    wait(DEPENDENT)
    if row == num_rows:
        for start in range(tl.load(cu_query_ptr + num_rows), num_tokens, BLOCK):
            is_token = start + lane < num_tokens
            tl.store(positions_ptr + start + lane, zeros, mask=is_token)
            tl.store(ancestors_ptr + start + lane, zeros, mask=is_token)
        for start in range(tl.load(cu_logits_ptr + num_rows), num_logits, BLOCK):
            logit = start + lane
            is_logit = logit < num_logits
            tl.store(logit_positions_ptr + logit, zeros + 1, mask=is_logit)
            tl.store(logit_roots_ptr + logit, zeros, mask=is_logit)
            for i in range(DEPTH):
                tl.store(paths_ptr + logit * DEPTH + i, zeros, mask=is_logit)
        return
    slot, root = tl.load(slots_ptr + row), tl.load(roots_ptr + row)
    first, end = tl.load(cu_query_ptr + row), tl.load(cu_query_ptr + row + 1)
    first_logit, end_logit = tl.load(cu_logits_ptr + row), tl.load(cu_logits_ptr + row + 1)
    parents_ptr += slot * parents_stride
    for start in range(first, end, BLOCK):
        token = start + lane
        is_token = token < end
        place = tl.load(places_ptr + token, mask=is_token, other=0)
        node = tl.where(is_token, tl.maximum(place - root, 0), 0)
        up, ancestors, depth = node, zeros, zeros
        for _ in range(DEPTH):
            is_draft = up > 0
            ancestors |= tl.where(is_draft, (zeros + 1) << tl.maximum(up - 1, 0), 0)
            depth += tl.where(is_draft, 1, 0)
            up = tl.load(parents_ptr + up - 1, mask=is_draft, other=0).to(tl.int64)
        position = place - node + depth
        tl.store(positions_ptr + token, position, mask=is_token)
        tl.store(ancestors_ptr + token, ancestors, mask=is_token)
        logit = end_logit - (end - token)  # a row's logits are those of its last tokens
        is_logit = is_token & (logit >= first_logit)
        tl.store(logit_positions_ptr + logit, position + 1, mask=is_logit)
        tl.store(logit_roots_ptr + logit, zeros + root, mask=is_logit)
        up = node
        for i in range(DEPTH):
            at = tl.where(i < depth, depth - 1 - i, i)  # from the node upwards; behind its path zeros
            tl.store(paths_ptr + logit * DEPTH + at, tl.where(i < depth, up, 0), mask=is_logit)
            up = tl.load(parents_ptr + up - 1, mask=up > 0, other=0).to(tl.int64)


def verify_tree_ref(
    chosen: Tensor, inputs: Tensor, cu_logits: Tensor, room: Tensor, samples: Tensor, *, trees: Trees,
    max_drafts: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """From node 0 on to the first child that was fed the token chosen, as long as there is one.

    Returns [B * K + B] int32: K tokens of each row, then how many of them count, the others are any; and
    [B, K] int32, the node behind each.

    chosen: [S] int32, the token at each logit.  inputs: [S] int32, the token that was fed there.  cu_logits:
    [B + 1] integers.  room: [B] integers, most tokens that a row may yield.  samples: [B] bool, whether it
    yields any.  max_drafts: of any row.
    """
    if not len(chosen):
        path = chosen.new_zeros((len(room), 1 + min(trees.depth, max_drafts)))
        return chosen.new_zeros(path.numel() + len(room)), path
    count = cu_logits.diff()
    child = torch.arange(1, 1 + max_drafts, device=count.device)
    parents = trees.parents[trees.slots, :max_drafts]
    is_there = child < count[:, None]
    fed = inputs[node_places(cu_logits, child, len(inputs))]
    node = torch.zeros_like(count, dtype=torch.int64)
    stands, num_new = count > 0, torch.zeros_like(node)
    path = []
    for _ in range(1 + min(trees.depth, max_drafts)):
        path.append(node)
        num_new = num_new + stands
        target = chosen[node_places(cu_logits, node[:, None], len(chosen))]
        agrees = (parents == node[:, None]) & (fed == target) & is_there & stands[:, None]
        stands = agrees.any(-1)
        node = torch.where(stands, 1 + agrees.int().argmax(-1), node)
    nodes = torch.stack(path, dim=1)
    tokens = chosen[node_places(cu_logits, nodes, len(chosen))]
    num_new = torch.minimum(num_new, room.clamp(min=0)) * samples
    return torch.cat([tokens.flatten(), num_new.int()]), nodes.int()


def verify_tree(
    chosen: Tensor, inputs: Tensor, cu_logits: Tensor, room: Tensor, samples: Tensor, *, trees: Trees,
    max_drafts: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `verify_tree_ref`, in one launch."""
    assert chosen.shape == inputs.shape and chosen.is_contiguous() and inputs.is_contiguous()
    num_rows, max_new = len(room), 1 + min(trees.depth, max_drafts)
    flat, path = chosen.new_empty(num_rows * (max_new + 1)), chosen.new_empty((num_rows, max_new))
    verify_tree_kernel[(num_rows,)](
        chosen,
        inputs,
        cu_logits,
        room,
        samples,
        trees.slots,
        trees.parents,
        flat,
        path,
        trees.parents.stride(0),
        K=max_new,
        DRAFTS=triton.next_power_of_2(max_drafts),
        num_warps=1,
        **dependent(),
    )
    return flat, path


@triton.jit(
    do_not_specialize=["parents_stride"],
    do_not_specialize_on_alignment=["inputs_ptr", "cu_logits_ptr", "slots_ptr"],
)
def verify_tree_kernel(
    chosen_ptr,  # [S]
    inputs_ptr,  # [S]
    cu_logits_ptr,  # [B + 1]
    room_ptr,  # [B]
    samples_ptr,  # [B]
    slots_ptr,  # [B]
    parents_ptr,  # [slots, N]
    flat_ptr,  # [B * K + B]
    path_ptr,  # [B, K]
    parents_stride,
    K: tl.constexpr,
    DRAFTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a row."""
    let_next_start(DEPENDENT)
    row, num_rows = tl.program_id(0), tl.num_programs(0)
    child = 1 + tl.arange(0, DRAFTS)
    wait(DEPENDENT)
    first = tl.load(cu_logits_ptr + row)
    count = (tl.load(cu_logits_ptr + row + 1) - first).to(tl.int32)
    is_there = child < count
    slot = tl.load(slots_ptr + row)
    parent = tl.load(parents_ptr + slot * parents_stride + child - 1, mask=is_there, other=-1).to(tl.int32)
    fed = tl.load(inputs_ptr + first + child, mask=is_there, other=0)
    node = first.to(tl.int32) * 0
    stands, num_new = count > 0, node
    for i in range(K):
        target = tl.load(chosen_ptr + first + node, mask=count > 0, other=0)
        tl.store(flat_ptr + row * K + i, target)
        tl.store(path_ptr + row * K + i, node)
        num_new += tl.where(stands, 1, 0)
        agrees = is_there & (parent == node) & (fed == target) & stands
        lowest = tl.min(tl.where(agrees, child, NOWHERE), 0)
        stands = lowest < NOWHERE
        node = tl.where(stands, lowest, node)
    yields = (tl.load(samples_ptr + row) != 0) & (count > 0)
    room = tl.maximum(tl.load(room_ptr + row), 0).to(tl.int32)
    tl.store(flat_ptr + num_rows * K + row, tl.where(yields, tl.minimum(num_new, room), 0))
