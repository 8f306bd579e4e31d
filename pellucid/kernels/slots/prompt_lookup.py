# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
"""What followed a text's last few tokens when they occurred before: one launch for five dozen of torch's.

Reads each known token once for every length of n-gram, from the second time on out of the L1 cache; torch's
way reads and writes whole rows of the token table, known or not, for each of its operations.

Legend: B rows, L columns of the token table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pellucid.kernels.lang.dependent import dependent, let_next_start, wait
from pellucid.kernels.lang.language import tl, triton

BLOCK = 2048  # tokens of a text that a program looks at together


def prompt_lookup_ref(
    token_ids: Tensor, slots: Tensor, newest: Tensor, *, num: int, shortest: int, longest: int
) -> Tensor:
    """[B, num] int32: what followed the most recent occurrence of the longest n-gram that ends each text.

    token_ids: [slots, L] int32, the texts; slots: [B] int64, whose.  newest: [B] int64, the place of each
    one's last known token.  Where what followed ends with the text it goes round, as one that repeats itself
    would.  N-grams have `shortest` to `longest` tokens; where none occurred before, it is the last one again.
    """
    known = token_ids.shape[1] if newest.is_cuda else int(newest.max()) + 1
    texts = token_ids[slots, :known]
    ends = torch.arange(texts.shape[1], device=texts.device)  # e: an n-gram texts[:, e - n : e]
    length = newest[:, None] + 1
    matched = torch.zeros_like(texts)  # tokens that agree, going back from the end
    agrees = (ends > 0) & (ends < length)
    for back in range(1, min(longest, texts.shape[1]) + 1):
        last = texts.gather(1, (length - back).clamp(min=0))
        here = torch.zeros_like(agrees)
        here[:, back:] = texts[:, : texts.shape[1] - back] == last
        agrees = agrees & here
        matched += agrees
    # The longest first, then the most recent.
    score = torch.where(matched >= shortest, matched.long() * len(ends) + ends, -1)
    best, at = score.max(1, keepdim=True)
    start = torch.where(best >= 0, at, length - 1)
    follows = start + torch.arange(num, device=texts.device) % (length - start)
    return texts.gather(1, follows)


def prompt_lookup(
    token_ids: Tensor, slots: Tensor, newest: Tensor, *, num: int, shortest: int, longest: int
) -> Tensor:
    """As `prompt_lookup_ref`, in one launch."""
    assert token_ids.stride(1) == 1 and slots.is_contiguous() and newest.is_contiguous()
    num_rows = len(slots)
    out = token_ids.new_empty((num_rows, num))
    prompt_lookup_kernel[(num_rows,)](
        token_ids,
        slots,
        newest,
        out,
        token_ids.stride(0),
        SHORTEST=shortest,
        LONGEST=longest,
        NUM=num,
        NUM_PADDED=triton.next_power_of_2(num),
        BLOCK=BLOCK,
        num_warps=8,
        **dependent(),
    )
    return out


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def prompt_lookup_kernel(
    token_ids_ptr,
    slots_ptr,  # [B]
    newest_ptr,  # [B]
    out_ptr,  # [B, NUM]
    token_stride,  # L
    SHORTEST: tl.constexpr,
    LONGEST: tl.constexpr,
    NUM: tl.constexpr,
    NUM_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a row."""
    let_next_start(DEPENDENT)
    row = tl.program_id(0)
    lane, number = tl.arange(0, BLOCK), tl.arange(0, NUM_PADDED)
    wait(DEPENDENT)
    text_ptr = token_ids_ptr + tl.load(slots_ptr + row) * token_stride
    length = tl.load(newest_ptr + row).to(tl.int32) + 1
    # By how many tokens agree, then by place; an n-gram that is long enough scores at least SHORTEST * 2**32.
    best = tl.zeros((BLOCK,), tl.int64)
    for first in range(0, length, BLOCK):
        end = first + lane  # of an n-gram
        agrees = (end > 0) & (end < length)
        matched = tl.zeros((BLOCK,), tl.int64)
        for back in range(1, LONGEST + 1):
            last = tl.load(text_ptr + tl.maximum(length - back, 0))
            inside = (end >= back) & (end < length)
            token = tl.load(text_ptr + end - back, mask=inside, other=0)
            agrees = agrees & inside & (token == last)
            matched += agrees.to(tl.int64)
        best = tl.maximum(best, matched * 2**32 + end)
    score = tl.max(best, 0)
    found = (score & 0xFFFFFFFF).to(tl.int32)
    start = tl.where(score >= SHORTEST * 2**32, found, length - 1)
    follows = start + number % (length - start)
    drafts = tl.load(text_ptr + follows, mask=number < NUM, other=0)
    tl.store(out_ptr + row * NUM + number, drafts, mask=number < NUM)
