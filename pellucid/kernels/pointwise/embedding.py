# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
"""Embeddings of the tokens that are in this rank's share of the table, and zeros for all others.

A table may be of codes, of 4 or 8 bits, whose numbers are made of the rows that are looked up.

Legend: T tokens, L this rank's share of the vocabulary, D model dim, G groups of features with a scale.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from pellucid.kernels.lang.dependent import dependent, let_next_start, wait
from pellucid.kernels.lang.language import tl, triton

BLOCK = 1024  # features of a program


class CodedTable(NamedTuple):
    """A table of embeddings: a code's number times its group's scale."""

    codes: Tensor  # INT8 or FP8 (E4M3) [L, D]; of 4 bits uint8 [L, D / 2], the even feature low
    scales: Tensor  # [L, G], any float
    numbers: Tensor | None = None  # float32 [16], of codes of 4 bits

    @property
    def dim(self) -> int:
        return self.codes.shape[1] * (1 if self.numbers is None else 2)


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


def embed_codes(input_ids: Tensor, table: CodedTable, first: int, dtype: torch.dtype) -> Tensor:
    """input_ids [T] of any integer type -> [T, D] of `dtype`.  table: of which row 0 is token `first`."""
    codes, scales, numbers = table
    (num_tokens,), (share, num_groups), dim = input_ids.shape, scales.shape, table.dim
    assert input_ids.is_contiguous() and codes.is_contiguous() and scales.is_contiguous()
    assert dim % num_groups == 0, (dim, num_groups)
    out = torch.empty((num_tokens, dim), dtype=dtype, device=codes.device)
    if num_tokens == 0:
        return out
    block = min(BLOCK, triton.next_power_of_2(dim))
    embed_codes_kernel[(num_tokens, triton.cdiv(dim, block))](
        input_ids,
        codes if codes.dtype == torch.int8 else codes.view(torch.uint8),
        scales,
        numbers,
        out,
        first,
        share,
        dim,
        GROUP=dim // num_groups,
        BLOCK=block,
        **dependent(),
    )
    return out


def embed_codes_ref(input_ids: Tensor, table: CodedTable, first: int, dtype: torch.dtype) -> Tensor:
    """The same in plain torch: what CPUs run."""
    index = input_ids.long() - first
    is_elsewhere = (index < 0) | (index >= len(table.codes))
    index = index.masked_fill_(is_elsewhere, 0)
    rows = table.codes.view(torch.uint8).index_select(0, index)
    if table.numbers is None:
        values = rows.view(table.codes.dtype).float()
    else:
        values = table.numbers[torch.stack((rows & 15, rows >> 4), dim=-1).flatten(1).int()]
    scales = table.scales.index_select(0, index).float()
    numbers = values.unflatten(1, (scales.shape[1], -1)) * scales[:, :, None]
    return numbers.flatten(1).to(dtype).masked_fill_(is_elsewhere[:, None], 0)


@triton.jit
def place_of(ids_ptr, first, share, dim, BLOCK: tl.constexpr):
    """This program's token and features, which are there, the row that they have here, and which have one."""
    token = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = feature < dim
    index = tl.zeros((BLOCK,), tl.int64) + tl.load(ids_ptr + token) - first
    return token, feature, inside, index, inside & (index >= 0) & (index < share)


@triton.jit(do_not_specialize=["first"])
def embed_codes_kernel(
    ids_ptr,
    codes_ptr,  # int8, or uint8: of 4 bits two a byte, else E4M3
    scales_ptr,
    numbers_ptr,  # of codes of 4 bits, or None
    out_ptr,
    first,
    share,  # L
    dim,  # D
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a token and block of features."""
    let_next_start(DEPENDENT)
    wait(DEPENDENT)
    token, feature, inside, index, is_own = place_of(ids_ptr, first, share, dim, BLOCK)
    if numbers_ptr is not None:
        pair = tl.load(codes_ptr + index * (dim // 2) + feature // 2, mask=is_own, other=0)
        value = tl.load(numbers_ptr + ((pair >> (feature % 2 * 4).to(tl.uint8)) & 15))
    else:
        code = tl.load(codes_ptr + index * dim + feature, mask=is_own, other=0)
        if codes_ptr.dtype.element_ty == tl.uint8:
            # E4M3 has float16's form with an exponent that is 8 less: no GPU is too old for that.
            bits = ((code & 0x80).to(tl.uint16) << 8) | ((code & 0x7F).to(tl.uint16) << 7)
            value = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256
        else:
            value = code.to(tl.float32)
    at = scales_ptr + index * (dim // GROUP) + feature // GROUP
    scale = tl.load(at, mask=is_own, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * dim + feature, (value * scale).to(out_ptr.dtype.element_ty), mask=inside)


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
    token, feature, inside, index, is_own = place_of(ids_ptr, first, share, dim, BLOCK)
    row = tl.load(table_ptr + index * dim + feature, mask=is_own, other=0.0)
    tl.store(out_ptr + token * dim + feature, row, mask=inside)
