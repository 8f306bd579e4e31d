# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false
"""Tokens with their experts as one message to other engines, and back: a row of words for each token.

A row is the token's features, then the ids of its experts, then their weights.  Legend: T tokens of this
engine, C with padding, N of all engines together, k experts of a token, W words of 32 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pellucid.kernels.experts.routing import Chosen, Share
from pellucid.kernels.lang.dependent import dependent, let_next_start, wait
from pellucid.kernels.lang.language import tl, triton

ALIGNMENT = 4  # words, of a row: as kernels that read features want it
WORD = 4  # bytes


def words_of(num_bytes: int, top_k: int) -> int:
    """W, of so many bytes of features."""
    return -(-(num_bytes // WORD + 2 * top_k) // ALIGNMENT) * ALIGNMENT


def pack_ref(x: Tensor, chosen: Chosen, num_common: int, words: int, nobody: int) -> Tensor:
    """x [T, D], and each token's experts -> [C, W] int32.  Padding goes to `nobody`."""
    message = torch.full((num_common, words), nobody, dtype=torch.int32, device=x.device)
    num, top_k = x.shape[1] * x.itemsize // WORD, chosen.ids.shape[1]
    message[: len(x), :num] = x.contiguous().view(torch.int32)
    message[: len(x), num : num + top_k] = chosen.ids
    message[: len(x), num + top_k : num + 2 * top_k] = chosen.weights.view(torch.int32)
    return message


def unpack_ref(
    message: Tensor, dtype: torch.dtype, dim: int, top_k: int, share: Share
) -> tuple[Tensor, Chosen]:
    """message [N, W] -> x [N, D], and of each token the experts that are here: numbers among these."""
    num = dim * dtype.itemsize // WORD
    here = message[:, num : num + top_k] - share.first
    is_elsewhere = (here < 0) | (here >= share.num)
    weights = message[:, num + top_k : num + 2 * top_k].contiguous().view(torch.float32)
    return features(message, dtype, num), Chosen(here.masked_fill(is_elsewhere, share.num), weights)


def features(message: Tensor, dtype: torch.dtype, num: int) -> Tensor:
    """[N, D], where they lie."""
    return message[:, :num].view(dtype)


def pack(x: Tensor, chosen: Chosen, num_common: int, words: int, nobody: int) -> Tensor:
    """See `pack_ref`; of padding only the ids are written."""
    x = x.contiguous().view(torch.int32)
    message = torch.empty((num_common, words), dtype=torch.int32, device=x.device)
    top_k = chosen.ids.shape[1]
    pack_kernel[(num_common,)](
        x,
        chosen.ids,
        chosen.weights.view(torch.int32),
        message,
        len(x),
        nobody,
        NUM=x.shape[1],
        PADDED=triton.next_power_of_2(x.shape[1]),
        TOP_K=top_k,
        K_PADDED=triton.next_power_of_2(top_k),
        WORDS=words,
        num_warps=4,
        **dependent(),
    )
    return message


def unpack(message: Tensor, dtype: torch.dtype, dim: int, top_k: int, share: Share) -> tuple[Tensor, Chosen]:
    """See `unpack_ref`."""
    num, num_tokens = dim * dtype.itemsize // WORD, len(message)
    ids = torch.empty((num_tokens, top_k), dtype=torch.int32, device=message.device)
    weights = torch.empty((num_tokens, top_k), dtype=torch.int32, device=message.device)
    unpack_kernel[(triton.cdiv(num_tokens, ROWS),)](
        message,
        ids,
        weights,
        num_tokens,
        share.first,
        share.num,
        NUM=num,
        TOP_K=top_k,
        K_PADDED=triton.next_power_of_2(top_k),
        WORDS=words_of(dim * dtype.itemsize, top_k),
        BLOCK=ROWS,
        num_warps=4,
        **dependent(),
    )
    return features(message, dtype, num), Chosen(ids, weights.view(torch.float32))


ROWS = 32  # tokens that a program unpacks


@triton.jit(
    do_not_specialize=["num_tokens", "nobody"],
    do_not_specialize_on_alignment=["x_ptr", "ids_ptr", "weights_ptr"],
)
def pack_kernel(
    x_ptr,
    ids_ptr,
    weights_ptr,
    message_ptr,
    num_tokens,
    nobody,
    NUM: tl.constexpr,
    PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    K_PADDED: tl.constexpr,
    WORDS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a token."""
    let_next_start(DEPENDENT)
    token, word, place = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED), tl.arange(0, K_PADDED)
    here = tl.where(token < num_tokens, 1, 0)  # padding has nothing
    inside, is_place = word < NUM * here, place < TOP_K
    is_read = place < TOP_K * here
    wait(DEPENDENT)
    x = tl.load(x_ptr + token * NUM + word, mask=inside, other=0)
    ids = tl.load(ids_ptr + token * TOP_K + place, mask=is_read, other=0)
    weights = tl.load(weights_ptr + token * TOP_K + place, mask=is_read, other=0)
    row = message_ptr + token * WORDS
    tl.store(row + word, x, mask=inside)
    tl.store(row + NUM + place, tl.where(is_read, ids, nobody), mask=is_place)
    tl.store(row + NUM + TOP_K + place, weights, mask=is_place)


@triton.jit(do_not_specialize=["num_tokens", "first", "num_here"])
def unpack_kernel(
    message_ptr,
    ids_ptr,
    weights_ptr,
    num_tokens,
    first,
    num_here,
    NUM: tl.constexpr,
    TOP_K: tl.constexpr,
    K_PADDED: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a block of tokens."""
    let_next_start(DEPENDENT)
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = tl.arange(0, K_PADDED)
    inside = (token < num_tokens)[:, None] & (place < TOP_K)[None, :]
    wait(DEPENDENT)
    row = message_ptr + token[:, None] * WORDS + NUM + place[None, :]
    here = tl.load(row, mask=inside, other=0) - first
    at = token[:, None] * TOP_K + place[None, :]
    tl.store(ids_ptr + at, tl.where((here >= 0) & (here < num_here), here, num_here), mask=inside)
    tl.store(weights_ptr + at, tl.load(row + TOP_K, mask=inside, other=0), mask=inside)
