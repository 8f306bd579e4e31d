"""k-quants: 256 inputs in 8 or 16 groups, whose scales are small integers times a float16 of the block."""

from __future__ import annotations

import torch
from torch import Tensor

from pellucid.quant.codes import S8, U2, U3, U4, U5, U6, Code, Codes, Group, Scales
from pellucid.quant.layouts.ggml.blocks import Blocks, by_block, cut, fields, half, in_fields, row


def codes_of(q: Tensor, code: Code, scales: Tensor, d: Tensor, zero: int | None = None) -> Codes:
    """q [N, B, 256], scales [N, B, groups], d [N, B]."""
    return Codes(
        q=row(q),
        code=code,
        group=Group(1, 256 // scales.shape[-1]),
        scale=Scales(row(scales), d),
        zero=None if zero is None else Scales(torch.tensor([[zero]], dtype=torch.uint8)),
    )


def with_minima(q: Tensor, code: Code, scales: Scales, minima: Scales) -> Codes:
    """As `codes_of`, with minima that are subtracted."""
    group = Group(1, q.shape[-2] * 256 // scales.values.shape[-1])
    return Codes(q=row(q), code=code, group=group, scale=scales, offset=minima)


def read_q2_k(blocks: Tensor) -> Codes:
    scales, q, d, dmin = cut(blocks, 16, 64, 2, 2)
    scale, minimum = Scales(row(scales & 15), half(d)), Scales(row(scales >> 4), half(dmin))
    return with_minima(fields(q, 2, 32), U2, scale, minimum)


def read_q3_k(blocks: Tensor) -> Codes:
    third, q, scales, d = cut(blocks, 32, 64, 12, 2)
    scale = (fields(scales[..., :8], 4, 8) | fields(scales[..., 8:], 2, 4) << 4).view(torch.int8) - 32
    return codes_of(fields(q, 2, 32) | fields(third, 1, 32) << 2, U3, scale, half(d), zero=4)


def scales_and_minima(packed: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes as 8 scales and 8 minima of 6 bits; upper bits of the last four stand with the first four."""
    a, b, low = packed.split(4, -1)
    scales = torch.cat((a & 63, low & 15 | a >> 6 << 4), -1)
    minima = torch.cat((b & 63, low >> 4 | b >> 6 << 4), -1)
    return scales, minima


def in_12_bytes(scales: Tensor, minima: Tensor) -> Tensor:
    """`scales_and_minima` backwards."""
    first, last, first_min, last_min = *scales.split(4, -1), *minima.split(4, -1)
    low = last & 15 | (last_min & 15) << 4
    return torch.cat((first | last >> 4 << 6, first_min | last_min >> 4 << 6, low), -1)


def read_q4_k(blocks: Tensor) -> Codes:
    d, dmin, packed, q = cut(blocks, 2, 2, 12, 128)
    scales, minima = scales_and_minima(packed)
    return with_minima(fields(q, 4, 32), U4, Scales(row(scales), half(d)), Scales(row(minima), half(dmin)))


def read_q5_k(blocks: Tensor) -> Codes:
    d, dmin, packed, fifth, q = cut(blocks, 2, 2, 12, 32, 128)
    scales, minima = scales_and_minima(packed)
    q = fields(q, 4, 32) | fields(fifth, 1, 32) << 4
    return with_minima(q, U5, Scales(row(scales), half(d)), Scales(row(minima), half(dmin)))


def read_q6_k(blocks: Tensor) -> Codes:
    q, upper, scales, d = cut(blocks, 128, 64, 16, 2)
    return codes_of(
        fields(q, 4, 64) | fields(upper, 2, 32) << 4, U6, scales.view(torch.int8), half(d), zero=32
    )


def read_q8_k(blocks: Tensor) -> Codes:
    d, q, _sums = cut(blocks, 4, 256, 32)
    scale = d.contiguous().view(torch.float32)[..., 0]
    return Codes(q=row(q.view(torch.int8)), code=S8, group=Group(1, 256), scale=Scales(scale))


def write_q4_k(codes: Codes) -> list[Tensor]:
    assert codes.scale is not None and codes.offset is not None
    scales, minima = (by_block(codes, 256, part.values) for part in (codes.scale, codes.offset))
    return [
        outer_of(codes.scale),
        outer_of(codes.offset),
        in_12_bytes(scales, minima),
        in_fields(by_block(codes, 256, codes.q), 4, 32),
    ]


def write_q5_k(codes: Codes) -> list[Tensor]:
    d, dmin, packed, _ = write_q4_k(codes)
    q = by_block(codes, 256, codes.q)
    return [d, dmin, packed, in_fields(q >> 4, 1, 32), in_fields(q & 15, 4, 32)]


def write_q6_k(codes: Codes) -> list[Tensor]:
    assert codes.scale is not None
    q = by_block(codes, 256, codes.q)
    scales = by_block(codes, 256, codes.scale.values)
    return [in_fields(q & 15, 4, 64), in_fields(q >> 4, 2, 32), scales, outer_of(codes.scale)]


def outer_of(scales: Scales) -> Tensor:
    """float16 [N, B, 1]."""
    assert scales.outer is not None
    return scales.outer.half()[..., None]


Q2_K = Blocks("Q2_K", read_q2_k)
Q3_K = Blocks("Q3_K", read_q3_k)
Q4_K = Blocks("Q4_K", read_q4_k, write_q4_k)
Q5_K = Blocks("Q5_K", read_q5_k, write_q5_k)
Q6_K = Blocks("Q6_K", read_q6_k, write_q6_k)
Q8_K = Blocks("Q8_K", read_q8_k)
