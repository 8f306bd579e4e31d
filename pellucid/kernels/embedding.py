# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
"""Embeddings of the tokens that are in this rank's share of the table, and zeros for all others.

Legend: T tokens, L this rank's share of the vocabulary, D model dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from pellucid.kernels.dependent import dependent, let_next_start, wait
from pellucid.kernels.language import tl, triton

BLOCK = 1024  # features of a program


def embed_share(input_ids: Tensor, table: Tensor, first: int) -> Tensor:
    """input_ids [T] of any integer type -> [T, D].  table: [L, D], of which row 0 is token `first`."""
    (num_tokens,), (share, dim) = input_ids.shape, table.shape
    assert input_ids.is_contiguous() and table.is_contiguous(), (input_ids.stride(), table.stride())
    out = torch.empty((num_tokens, dim), dtype=table.dtype, device=table.device)
    if num_tokens == 0:
        return out
    block = min(BLOCK, triton.next_power_of_2(dim))
    embed_share_kernel[(num_tokens, triton.cdiv(dim, block))](
        input_ids, table, out, first, share, dim, BLOCK=block, **dependent()
    )
    return out


def embed_share_ref(input_ids: Tensor, table: Tensor, first: int) -> Tensor:
    """The same in plain torch: what CPUs run."""
    index = input_ids - first
    is_elsewhere = (index < 0) | (index >= len(table))
    rows = F.embedding(index.masked_fill_(is_elsewhere, 0), table)
    return rows.masked_fill_(is_elsewhere[:, None], 0)


@triton.jit(do_not_specialize=["first"])
def embed_share_kernel(
    ids_ptr,
    table_ptr,
    out_ptr,
    first,
    share,  # L
    dim,  # D
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a token and block of features."""
    let_next_start(DEPENDENT)
    wait(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = feature < dim
    index = tl.zeros((BLOCK,), tl.int64) + tl.load(ids_ptr + token) - first
    is_own = inside & (index >= 0) & (index < share)
    row = tl.load(table_ptr + index * dim + feature, mask=is_own, other=0.0)
    tl.store(out_ptr + token * dim + feature, row, mask=inside)
