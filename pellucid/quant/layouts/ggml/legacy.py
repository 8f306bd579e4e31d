"""Blocks with one scale of their own: Q4_0 to Q8_1 of 32 inputs, and the ternary TQ1_0 and TQ2_0 of 256."""

from __future__ import annotations

import torch
from torch import Tensor

from pellucid.quant.codes import S8, U2, U4, U5, Code, Codes, Group, Scales
from pellucid.quant.layouts.ggml.blocks import Blocks, bits_of, by_block, cut, fields, half, in_fields, row

THREES = (1, 3, 9, 27, 81)


def codes_of(
    q: Tensor, code: Code, scale: Tensor, *, zero: int | None = None, minimum: Tensor | None = None
) -> Codes:
    """q [N, B, n] with a scale and perhaps a minimum of each block, [N, B]: W = q scale + minimum."""
    return Codes(
        q=row(q),
        code=code,
        group=Group(1, q.shape[-1]),
        scale=Scales(scale),
        zero=None if zero is None else Scales(torch.tensor([[zero]], dtype=torch.uint8)),
        offset=None if minimum is None else Scales(-minimum),
    )


def read_q4_0(blocks: Tensor) -> Codes:
    d, q = cut(blocks, 2, 16)
    return codes_of(fields(q, 4, 16), U4, half(d), zero=8)


def read_q4_1(blocks: Tensor) -> Codes:
    d, m, q = cut(blocks, 2, 2, 16)
    return codes_of(fields(q, 4, 16), U4, half(d), minimum=half(m))


def with_fifth(q: Tensor, fifth: Tensor) -> Tensor:
    """5 bits: low ones in halves of 16 bytes, the fifth in 32 bits."""
    return fields(q, 4, 16) | bits_of(fifth, range(8), 1) << 4


def read_q5_0(blocks: Tensor) -> Codes:
    d, fifth, q = cut(blocks, 2, 4, 16)
    return codes_of(with_fifth(q, fifth), U5, half(d), zero=16)


def read_q5_1(blocks: Tensor) -> Codes:
    d, m, fifth, q = cut(blocks, 2, 2, 4, 16)
    return codes_of(with_fifth(q, fifth), U5, half(d), minimum=half(m))


def read_q8_0(blocks: Tensor) -> Codes:
    d, q = cut(blocks, 2, 32)
    return codes_of(q.view(torch.int8), S8, half(d))


def read_q8_1(blocks: Tensor) -> Codes:
    d, _sum, q = cut(blocks, 2, 2, 32)
    return codes_of(q.view(torch.int8), S8, half(d))


def read_tq1_0(blocks: Tensor) -> Codes:
    """Five ternary digits a byte, as a fraction of 256: the digit asked for is carried out on top."""
    q, last, d = cut(blocks, 48, 4, 2)
    runs = ((q[..., :32], THREES), (q[..., 32:], THREES), (last, THREES[:4]))
    shifted = torch.cat([torch.cat([run * three for three in threes], -1) for run, threes in runs], -1)
    return codes_of((shifted.to(torch.int16) * 3 >> 8).to(torch.uint8), U2, half(d), zero=1)


def read_tq2_0(blocks: Tensor) -> Codes:
    q, d = cut(blocks, 64, 2)
    return codes_of(fields(q, 2, 32), U2, half(d), zero=1)


def write_q4_0(codes: Codes) -> list[Tensor]:
    return [scale_of(codes), in_fields(by_block(codes, 32, codes.q), 4, 16)]


def write_q8_0(codes: Codes) -> list[Tensor]:
    return [scale_of(codes), by_block(codes, 32, codes.q)]


def scale_of(codes: Codes) -> Tensor:
    """float16 [N, B, 1]."""
    assert codes.scale is not None
    return codes.scale.numbers().half()[..., None]


Q4_0 = Blocks("Q4_0", read_q4_0, write_q4_0)
Q4_1 = Blocks("Q4_1", read_q4_1)
Q5_0 = Blocks("Q5_0", read_q5_0)
Q5_1 = Blocks("Q5_1", read_q5_1)
Q8_0 = Blocks("Q8_0", read_q8_0, write_q8_0)
Q8_1 = Blocks("Q8_1", read_q8_1)
TQ1_0 = Blocks("TQ1_0", read_tq1_0)
TQ2_0 = Blocks("TQ2_0", read_tq2_0)
