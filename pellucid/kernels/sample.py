# A kernel has an argument for each pointer, stride and constant, and its checker is Triton's compiler.
# ruff: noqa: PLR0913, PLR0917
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
"""Draw tokens in one pass over the logits: argmax(logits + T * gumbel), noise made on the way.

The noise is that of sample/noise.py, from the same 64 bits of (seed, position, token); only the logarithms
are the GPU's own, so it is the same up to about 1e-5.  What is drawn depends neither on the other rows nor on
how the vocabulary is cut up: the highest score wins, the lower id in a tie.  A program whose rows are all at
temperature 0 makes no noise.

Legend: S logits, V vocab (or a rank's share of it), P parts of the vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pellucid.kernels.dependent import dependent, let_next_start, wait
from pellucid.kernels.noise import MOST, PRIME, key, keys_ref

LN_2 = tl.constexpr(0.6931471805599453)
LEAST = tl.constexpr(2.0**-64)  # of the uniform numbers, which are at most MOST

TILE = 2048  # logits a program looks at together
MAX_ROWS = 8  # of a program, which share their tokens' codes
MIN_BLOCK = 256  # tokens of a tile
PROGRAMS = 2048  # enough to fill a GPU


def draw(
    logits: Tensor,
    codes: Tensor,
    seeds: Tensor,
    temperatures: Tensor,
    slots: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """The highest score [S] float32 and its place [S] int32 in each row of logits [S, V], of any float type.

    codes: [V] int64, of sample/noise.py.  seeds [num_slots] int64 and temperatures [num_slots] float64 may be
    columns of a table; slots, positions: [S] int64.  Reads no device value on the host.  V is at least 1.
    """
    num_logits, num_tokens = logits.shape
    assert logits.stride(1) == 1 and codes.is_contiguous() and codes.shape == (num_tokens,), logits.shape
    assert slots.shape == positions.shape == (num_logits,), (slots.shape, positions.shape)
    assert slots.is_contiguous() and positions.is_contiguous()
    assert num_tokens > 0, "no tokens to draw from"
    values = torch.empty(num_logits, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(num_logits, dtype=torch.int32, device=logits.device)
    if num_logits == 0:
        return values, tokens
    rows = min(MAX_ROWS, triton.next_power_of_2(num_logits))
    block = max(MIN_BLOCK, TILE // (2 * rows))
    num_tiles, num_groups = triton.cdiv(num_tokens, block), triton.cdiv(num_logits, rows)
    tiles = triton.cdiv(num_tiles, max(1, PROGRAMS // num_groups))
    num_parts = triton.cdiv(num_tiles, tiles)
    part_values = values.new_empty((num_logits, num_parts))
    part_tokens = tokens.new_empty((num_logits, num_parts))
    draw_kernel[(num_parts, num_groups)](
        logits,
        codes,
        seeds,
        temperatures,
        slots,
        positions,
        part_values,
        part_tokens,
        num_logits,
        num_tokens,
        tiles,
        logits.stride(0),
        seeds.stride(0),
        temperatures.stride(0),
        ROWS=rows,
        BLOCK=block,
        IS_NVIDIA=logits.is_cuda and torch.version.hip is None,
        num_warps=4,
        **dependent(),
    )
    best_kernel[(num_logits,)](
        part_values,
        part_tokens,
        values,
        tokens,
        num_parts,
        PARTS_PADDED=triton.next_power_of_2(num_parts),
        num_warps=4,
        **dependent(),
    )
    return values, tokens


def draw_ref(
    logits: Tensor,
    codes: Tensor,
    seeds: Tensor,
    temperatures: Tensor,
    slots: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """The same, all noise at once and its logarithms in float64."""
    prime = PRIME.value
    hashed = (codes ^ keys_ref(seeds[slots], positions, 0)[:, None]) * prime
    hashed = (hashed ^ (hashed >> 32)) * prime
    uniform = (hashed.double().abs() * 2.0**-63).clamp(LEAST.value, MOST.value)
    noise = -(-(-uniform).log1p()).log()
    scores = (logits + temperatures[slots].float()[:, None] * noise.float()).float()
    tokens = scores.argmax(-1)
    return scores.gather(1, tokens[:, None])[:, 0], tokens.int()


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


# Numbers that change with the rows are not specialized on: one variant serves all.
@triton.jit(do_not_specialize=["num_logits", "tiles"])
def draw_kernel(
    logits_ptr,  # [S, V]
    codes_ptr,  # [V]
    seeds_ptr,
    temperatures_ptr,
    slots_ptr,  # [S]
    positions_ptr,  # [S]
    values_ptr,  # [S, P]
    tokens_ptr,  # [S, P]
    num_logits,
    num_tokens,
    tiles,
    logits_stride,
    seed_stride,
    temperature_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_NVIDIA: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a group of rows and a part of the vocabulary, `tiles` tiles long."""
    let_next_start(DEPENDENT)
    part, num_parts = tl.program_id(0), tl.num_programs(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_logits
    wait(DEPENDENT)
    slot = tl.load(slots_ptr + row, mask=is_row, other=0)
    seed = tl.load(seeds_ptr + slot * seed_stride, mask=is_row, other=0)
    temperature = tl.load(temperatures_ptr + slot * temperature_stride, mask=is_row, other=0.0).to(tl.float32)
    position = tl.load(positions_ptr + row, mask=is_row, other=0)
    row_key = key(seed, position, 0)
    is_hot = tl.max(temperature, 0) > 0

    line = logits_ptr + row.to(tl.int64)[:, None] * logits_stride
    lane = tl.arange(0, BLOCK)
    first = part * tiles * BLOCK
    best = tl.full((ROWS, BLOCK), float("-inf"), tl.float32)
    best_token = tl.zeros((ROWS, BLOCK), tl.int32) + (first + lane)[None, :]
    for tile in range(tiles):
        token = first + tile * BLOCK + lane
        inside = token < num_tokens
        score = tl.load(line + token[None, :], mask=is_row[:, None] & inside[None, :], other=float("-inf"))
        score = score.to(tl.float32)
        if is_hot:
            code = tl.load(codes_ptr + token, mask=inside, other=0)
            noise = gumbel(code[None, :] ^ row_key[:, None], IS_NVIDIA)
            score = tl.fma(tl.broadcast_to(temperature[:, None], (ROWS, BLOCK)), noise, score)
        is_better = score > best
        best = tl.where(is_better, score, best)
        best_token = tl.where(is_better, token[None, :], best_token)
    value = tl.max(best, 1)
    # The tokens of a lane are not in the order of lanes, so a tie is settled by number.
    winner = tl.min(tl.where(best == value[:, None], best_token, num_tokens - 1), 1)
    tl.store(values_ptr + row * num_parts + part, value, mask=is_row)
    tl.store(tokens_ptr + row * num_parts + part, winner, mask=is_row)


@triton.jit(do_not_specialize=["num_parts"])
def best_kernel(
    part_values_ptr,  # [S, P]
    part_tokens_ptr,  # [S, P]
    values_ptr,
    tokens_ptr,
    num_parts,
    PARTS_PADDED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a row: the best of its parts, the first in a tie."""
    let_next_start(DEPENDENT)
    row = tl.program_id(0)
    part = tl.arange(0, PARTS_PADDED)
    inside = part < num_parts
    wait(DEPENDENT)
    value = tl.load(part_values_ptr + row * num_parts + part, mask=inside, other=float("-inf"))
    token = tl.load(part_tokens_ptr + row * num_parts + part, mask=inside, other=2**31 - 1)
    best = tl.max(value, 0)
    tl.store(values_ptr + row, best)
    tl.store(tokens_ptr + row, tl.min(tl.where(value == best, token, 2**31 - 1), 0))
