# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# pyright: reportArgumentType=false, reportCallIssue=false
"""Rule out tokens by a bit mask: what a grammar does not let pass becomes -inf.

Reads a bit a logit and writes only what is ruled out, so it takes less time than any pass over the logits.

Legend: S logits, L tokens whose logits these are, W words of 32 tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pellucid.kernels.lang.dependent import dependent, let_next_start, wait
from pellucid.kernels.lang.language import has_triton, tl, triton

BLOCK = 2048  # tokens a program looks at


def mask_logits(logits: Tensor, bits: Tensor, first: int) -> None:
    """Set to -inf, in place, the logits [S, L] of tokens first .. first + L whose bit is 0.

    bits: [S, W] int32; token t is bit t % 32 of word t // 32.  Tokens that have no bit stay.
    """
    (num_rows, num_tokens), num_words = logits.shape, bits.shape[1]
    assert bits.shape[0] == num_rows and bits.dtype == torch.int32, (logits.shape, bits.shape, bits.dtype)
    assert logits.stride(1) == bits.stride(1) == 1, (logits.stride(), bits.stride())
    if not (logits.is_cuda and has_triton()):
        return mask_logits_ref(logits, bits, first)
    launch(logits, bits, first, min(num_tokens, 32 * num_words - first))


def launch(logits: Tensor, bits: Tensor, first: int, num_tokens: int) -> None:
    """`num_tokens` of each row of logits have a bit."""
    if len(logits) and num_tokens > 0:
        mask_logits_kernel[(len(logits), triton.cdiv(num_tokens, BLOCK))](
            logits, bits, first, num_tokens, logits.stride(0), bits.stride(0),
            BLOCK=BLOCK, num_warps=4, **dependent(),
        )  # fmt: skip


def mask_logits_ref(logits: Tensor, bits: Tensor, first: int) -> None:
    """The same, with a bool a token in between."""
    places = torch.arange(32, dtype=torch.int32, device=bits.device)
    may_come = ((bits[:, :, None] >> places) & 1).flatten(1)[:, first : first + logits.shape[1]].bool()
    logits[:, : may_come.shape[1]].masked_fill_(~may_come, -float("inf"))


@triton.jit
def mask_logits_kernel(
    logits_ptr,  # [S, L]
    bits_ptr,  # [S, W]
    first,
    num_tokens,
    logits_stride,
    bits_stride,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a row and BLOCK of its tokens."""
    let_next_start(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = first + at
    inside = at < num_tokens
    wait(DEPENDENT)
    word = tl.load(bits_ptr + row * bits_stride + token // 32, mask=inside, other=-1)
    may_come = (word >> (token % 32)) & 1
    tl.store(logits_ptr + row * logits_stride + at, float("-inf"), mask=inside & (may_come == 0))
