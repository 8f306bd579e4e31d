# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
"""Draw tokens in two stages, so that noise is made for one number in BLOCK_TOKENS and not for every logit.

The vocabulary is cut into blocks of consecutive token ids.  A block's score is T * logsumexp(logits / T) plus
T times noise of its own, and the block with the highest one wins; in it the token with the highest
logit + T * noise wins.  P(block) * P(token | block) is softmax(logits / T): the Gumbel-max trick, once over
blocks and once within (Maddison, Tarlow, Minka, "A* Sampling", 2014, on maxima of Gumbel noise over regions).
At T = 0 a block's score is its highest logit, and the token is argmax.  In a tie the lower id wins.

The noise is that of sample/noise.py, from the same 64 bits of (seed, position, purpose, token); only the
logarithms are the GPU's own, so it is the same up to about 1e-5.  What is drawn depends neither on the other
rows nor on how the blocks are shared out: a block's sum is one of integers, which no order of adding changes.

Legend: S logits, V vocab (or a rank's share of it), P parts of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from pellucid.kernels.lang.dependent import dependent, let_next_start, wait
from pellucid.kernels.lang.language import tl, triton
from pellucid.kernels.sampling.noise import MOST, PRIME, code, codes_ref, key, keys_ref

BLOCK_TOKENS = 64  # of the definition: other blocks draw other tokens
TOKENS = tl.constexpr(BLOCK_TOKENS)
TOKEN_NOISE = tl.constexpr(0)  # the purposes, sample/noise.py's DRAW and BLOCK
BLOCK_NOISE = tl.constexpr(4)

LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)
LEAST = tl.constexpr(2.0**-64)  # of the uniform numbers, which are at most MOST
UNITS = tl.constexpr(2**22)  # of a block's sum, to its highest logit

FEW_ROWS = 4  # whose programs are made smaller, to fill a GPU
BLOCKS = 128  # of a program: one for each thread, when it comes to noise
BLOCKS_OF_FEW = 16


def draw(
    logits: Tensor,
    block_codes: Tensor,
    seeds: Tensor,
    temperatures: Tensor,
    slots: Tensor,
    positions: Tensor,
    *,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """The highest score of a block [S] float32 and the place of the token drawn in it [S] int32.

    logits: [S, V], of any float type; V is at least 1.  first: the token at place 0, a multiple of
    BLOCK_TOKENS.  block_codes: int64, sample/noise.py's code of the first token of each block, from token 0.
    seeds [num_slots] int64 and temperatures [num_slots] float64 may be columns of a table; slots, positions:
    [S] int64.  Reads no device value on the host.
    """
    num_logits, num_tokens = logits.shape
    assert logits.stride(1) == 1, logits.stride()
    assert slots.shape == positions.shape == (num_logits,), (slots.shape, positions.shape)
    assert slots.is_contiguous() and positions.is_contiguous()
    assert num_tokens > 0, "no tokens to draw from"
    assert first % BLOCK_TOKENS == 0 and block_codes.is_contiguous(), first
    own_codes = block_codes[first // BLOCK_TOKENS :]
    assert len(own_codes) * BLOCK_TOKENS >= num_tokens, (len(block_codes), first, num_tokens)
    values = torch.empty(num_logits, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(num_logits, dtype=torch.int32, device=logits.device)
    if num_logits == 0:
        return values, tokens
    blocks = BLOCKS_OF_FEW if num_logits <= FEW_ROWS else BLOCKS
    num_parts = triton.cdiv(num_tokens, blocks * BLOCK_TOKENS)
    part_values = values.new_empty((num_logits, num_parts))
    part_blocks = tokens.new_empty((num_logits, num_parts))
    requests = (seeds, temperatures, slots, positions)
    strides = (logits.stride(0), seeds.stride(0), temperatures.stride(0))
    is_nvidia = logits.is_cuda and torch.version.hip is None
    block_kernel[(num_parts * num_logits,)](
        logits, own_codes, *requests, part_values, part_blocks, num_tokens, *strides,
        BLOCKS=blocks, IS_NVIDIA=is_nvidia, num_warps=4, **dependent(),
    )  # fmt: skip
    token_kernel[(num_logits,)](
        logits, *requests, part_values, part_blocks, values, tokens, first, num_tokens, num_parts, *strides,
        PARTS_PADDED=triton.next_power_of_2(num_parts), IS_NVIDIA=is_nvidia, num_warps=1, **dependent(),
    )  # fmt: skip
    return values, tokens


def draw_ref(
    logits: Tensor,
    block_codes: Tensor,
    seeds: Tensor,
    temperatures: Tensor,
    slots: Tensor,
    positions: Tensor,
    *,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """The same, all noise at once, in float64."""
    num_tokens = logits.shape[1]
    padded = F.pad(logits.double(), (0, -num_tokens % BLOCK_TOKENS), value=-float("inf"))
    codes = codes_ref(first + torch.arange(padded.shape[1], device=logits.device))
    seeds, temperature = seeds[slots], temperatures[slots][:, None]

    blocks = padded.unflatten(1, (-1, BLOCK_TOKENS))
    highest = blocks.amax(-1)
    mass = ((blocks - highest[:, :, None]) / temperature[:, :, None]).exp().sum(-1)
    own_codes = block_codes[first // BLOCK_TOKENS :][: blocks.shape[1]]
    noise = gumbel_ref(own_codes ^ keys_ref(seeds, positions, BLOCK_NOISE.value)[:, None])
    is_random = (temperature > 0) & highest.isfinite()
    scores = (highest + temperature * (mass.log() + noise)).where(is_random, highest).float()
    values, block = scores.max(-1)

    places = block[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=logits.device)
    noise = gumbel_ref(codes[places] ^ keys_ref(seeds, positions, TOKEN_NOISE.value)[:, None])
    scores = (padded.gather(1, places) + temperature * noise).float()
    return values, places.gather(1, scores.argmax(-1, keepdim=True))[:, 0].int()


def gumbel_ref(x: Tensor) -> Tensor:
    """As `gumbel`, its logarithms in float64: [...] int64 -> [...] float64."""
    hashed = x * PRIME.value
    hashed = (hashed ^ (hashed >> 32)) * PRIME.value
    uniform = (hashed.double().abs() * 2.0**-63).clamp(LEAST.value, MOST.value)
    return -(-(-uniform).log1p()).log()


@triton.jit
def log2(x, IS_NVIDIA: tl.constexpr):
    """Of a float32 that is not subnormal; on NVIDIA GPUs with one instruction, exact to 2**-22."""
    if IS_NVIDIA:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def exp2(x, IS_NVIDIA: tl.constexpr):
    """Of a float32, 0 where that would be subnormal; on NVIDIA GPUs with one instruction, exact to 2**-22."""
    if IS_NVIDIA:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@triton.jit
def gumbel(x, IS_NVIDIA: tl.constexpr):
    """Standard Gumbel noise of a token's code, exclusive-or'd with a row's key: int64 -> float32."""
    x = x * PRIME
    x = (x ^ (x >> 32)) * PRIME
    uniform = tl.minimum(tl.maximum(tl.abs(x.to(tl.float32)) * 2.0**-63, LEAST), MOST)
    # -log(1 - uniform); the series where 1 - uniform would lose the digits that make the largest noise.
    series = tl.fma(tl.fma(uniform, 1 / 5, 1 / 4), uniform, 1 / 3)
    series = tl.fma(tl.fma(series, uniform, 1 / 2), uniform * uniform, uniform)
    exponential = tl.where(uniform < 1 / 16, series, -LN_2 * log2(1 - uniform, IS_NVIDIA))
    return -LN_2 * log2(exponential, IS_NVIDIA)


@triton.jit
def units(logits, scale, exponent, IS_NVIDIA: tl.constexpr):
    """2**(logits * scale - exponent) in units of 2**-22, for sums of TOKENS of them: [BLOCKS, N] -> int32.

    From 2.0 on the bits of a float32 count such units.  Those of 2.0 itself, which are in each number, are a
    multiple of 2**32 / TOKENS, so a sum in 32 bits is without them.
    """
    power = exp2(tl.fma(logits, scale, -exponent[:, None]), IS_NVIDIA)
    return (power + 2.0).to(tl.int32, bitcast=True)


@triton.jit
def block_kernel(
    logits_ptr,  # [S, V]
    codes_ptr,  # of blocks
    seeds_ptr,
    temperatures_ptr,
    slots_ptr,  # [S]
    positions_ptr,  # [S]
    values_ptr,  # [S, P]
    blocks_ptr,  # [S, P]
    num_tokens,
    logits_stride,
    seed_stride,
    temperature_stride,
    BLOCKS: tl.constexpr,
    IS_NVIDIA: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a row and part of the vocabulary: the highest score of its blocks, and that block."""
    let_next_start(DEPENDENT)
    num_parts = tl.cdiv(num_tokens, BLOCKS * TOKENS)
    part, row = tl.program_id(0) % num_parts, (tl.program_id(0) // num_parts).to(tl.int64)
    block = part * BLOCKS + tl.arange(0, BLOCKS)
    # A load spreads the blocks over all threads, and so their noise.
    code_of_block = tl.load(codes_ptr + block, mask=block * TOKENS < num_tokens, other=0)
    # In halves, so that fewer threads share a block, and have less to tell each other.
    token = block[:, None] * TOKENS + tl.arange(0, TOKENS // 2)[None, :]
    upper = token + TOKENS // 2
    wait(DEPENDENT)
    line = logits_ptr + row * logits_stride
    low = tl.load(line + token, mask=token < num_tokens, other=float("-inf")).to(tl.float32)
    high = tl.load(line + upper, mask=upper < num_tokens, other=float("-inf")).to(tl.float32)
    slot = tl.load(slots_ptr + row)
    temperature = tl.load(temperatures_ptr + slot * temperature_stride).to(tl.float32)
    row_key = key(tl.load(seeds_ptr + slot * seed_stride), tl.load(positions_ptr + row), BLOCK_NOISE)
    noise = gumbel(code_of_block ^ row_key, IS_NVIDIA)  # while the logits are on their way
    score = tl.max(tl.maximum(low, high), 1)
    if temperature > 0:
        scale = LOG2_E / temperature
        exponent = score * scale
        num_units = units(low, scale, exponent, IS_NVIDIA) + units(high, scale, exponent, IS_NVIDIA)
        # The highest has all its units, but for what rounding takes, or an exponent too large for float32.
        num_units = tl.maximum(tl.sum(num_units, 1), UNITS)
        noise = tl.fma(LN_2, log2(num_units.to(tl.float32), IS_NVIDIA) - 22, noise)
        noisy = tl.fma(temperature, noise, score)
        score = tl.where(tl.abs(score) < float("inf"), noisy, score)
    value, index = tl.max(score, 0, return_indices=True)
    tl.store(values_ptr + row * num_parts + part, value)
    tl.store(blocks_ptr + row * num_parts + part, part * BLOCKS + index)


@triton.jit(do_not_specialize=["first", "num_parts"])
def token_kernel(
    logits_ptr,  # [S, V]
    seeds_ptr,
    temperatures_ptr,
    slots_ptr,  # [S]
    positions_ptr,  # [S]
    part_values_ptr,  # [S, P]
    part_blocks_ptr,  # [S, P]
    values_ptr,  # [S]
    tokens_ptr,  # [S]
    first,
    num_tokens,
    num_parts,
    logits_stride,
    seed_stride,
    temperature_stride,
    PARTS_PADDED: tl.constexpr,
    IS_NVIDIA: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a row: the best block of its parts, and a token of that."""
    let_next_start(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    part, lane = tl.arange(0, PARTS_PADDED), tl.arange(0, TOKENS)
    last = (num_tokens - 1) // TOKENS
    wait(DEPENDENT)
    at = row * num_parts + part
    part_value = tl.load(part_values_ptr + at, mask=part < num_parts, other=float("-inf"))
    part_block = tl.load(part_blocks_ptr + at, mask=part < num_parts, other=last)
    slot, position = tl.load(slots_ptr + row), tl.load(positions_ptr + row)
    temperature = tl.load(temperatures_ptr + slot * temperature_stride).to(tl.float32)
    row_key = key(tl.load(seeds_ptr + slot * seed_stride), position, TOKEN_NOISE)
    value = tl.max(part_value, 0)
    block = tl.min(tl.where(part_value == value, part_block, last), 0)
    token = tl.minimum(block, last) * TOKENS + lane  # where all is NaN, any block may have been named
    line = logits_ptr + row * logits_stride
    score = tl.load(line + token, mask=token < num_tokens, other=float("-inf")).to(tl.float32)
    score = tl.fma(temperature, gumbel(code(first + token) ^ row_key, IS_NVIDIA), score)
    winner = tl.min(tl.where(score == tl.max(score, 0), token, num_tokens - 1), 0)
    tl.store(values_ptr + row, value)
    tl.store(tokens_ptr + row, winner)
