"""To the nearest codes of ggml's blocks: of each group the scale, and minimum, that loses least.

The scales of a k-quant's groups are small integers themselves, times a float16 of their 256 inputs.
Legend: N outputs, G groups of g inputs, B blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pellucid.quant.codes import S8, U4, U5, U6, Code, Codes, Group, Scales
from pellucid.quant.rounding import squares

CLIPS = tuple(1 - i / 30 for i in range(12))  # shares of a group's range that are tried
BLOCK = 256
LARGEST_SCALE = {U4: 63, U5: 63, U6: 127}  # of groups, in a block


def ggml_codes(weight: Tensor, type: str) -> Codes:
    """weight [N, K].  Raises ValueError for a type that is not written, or rows of no whole blocks."""
    if type not in WRITTEN:
        raise ValueError(f"ggml's {type} is read here, and not written; there are {', '.join(WRITTEN)}")
    inputs, make = WRITTEN[type]
    if weight.shape[1] % inputs:
        raise ValueError(
            f"{weight.shape[1]} inputs are not whole blocks of {inputs} of {type}; use gguf:Q8_0"
        )
    return make(weight.float())


def q8_0(weight: Tensor) -> Codes:
    groups = weight.unflatten(1, (-1, 32))
    scale = (groups.abs().amax(-1) / 127).half().float()
    q = divided(groups, scale).clamp_(-127, 127)
    return Codes(q=q.to(torch.int8).flatten(1), code=S8, group=Group(1, 32), scale=Scales(scale))


def q4_0(weight: Tensor) -> Codes:
    groups = weight.unflatten(1, (-1, 32))
    scale = best(groups, lambda clip: (signed_largest(groups) * clip / -8).half().float(), 8)
    q = (divided(groups, scale) + 8).clamp_(0, 15)
    return Codes(
        q=q.to(torch.uint8).flatten(1),
        code=U4,
        group=Group(1, 32),
        scale=Scales(scale),
        zero=zero_of(weight, 8),
    )


def q6_k(weight: Tensor) -> Codes:
    groups = weight.unflatten(1, (-1, 16))
    scale = best(groups, lambda clip: signed_largest(groups) * clip / -32, 32)
    scales = in_blocks(scale, U6, 16)
    q = (divided(groups, scales.numbers()) + 32).clamp_(0, 63)
    return Codes(
        q=q.to(torch.uint8).flatten(1), code=U6, group=Group(1, 16), scale=scales, zero=zero_of(weight, 32)
    )


def with_minima(weight: Tensor, code: Code) -> Codes:
    """Q4_K and Q5_K: W = scale q - minimum."""
    groups, most = weight.unflatten(1, (-1, 32)), (1 << code.bits) - 1
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    least = torch.full_like(low, float("inf"))
    scale, minimum = torch.zeros_like(low), torch.zeros_like(low)
    for clip in CLIPS:
        step, below = (high - low) * clip / most, -low * clip
        q = divided(groups + below[..., None], step).clamp_(0, most)
        loss = squares(q * step[..., None] - below[..., None] - groups)
        better = loss < least
        least, scale = torch.where(better, loss, least), torch.where(better, step, scale)
        minimum = torch.where(better, below, minimum)
    scales, minima = (in_blocks(each, code, 32) for each in (scale, minimum))
    q = divided(groups + minima.numbers()[..., None], scales.numbers()).clamp_(0, most)
    return Codes(q=q.to(torch.uint8).flatten(1), code=code, group=Group(1, 32), scale=scales, offset=minima)


def in_blocks(numbers: Tensor, code: Code, inputs: int) -> Scales:
    """Groups' numbers [N, G] as small integers, times a float16 of each block."""
    largest = LARGEST_SCALE[code]
    blocks = numbers.unflatten(1, (-1, BLOCK // inputs))
    outer = (blocks.abs().amax(-1) / largest).half().float()
    whole = divided(blocks, outer).clamp_(-128 if code == U6 else 0, largest)
    return Scales(whole.to(torch.int8 if code == U6 else torch.uint8).flatten(1), outer)


def best(groups: Tensor, scale_of: Callable[[float], Tensor], middle: int) -> Tensor:
    """Of scales [N, G] by clip the one under which codes of -middle .. middle - 1 lose least."""
    found = scale_of(1.0)
    least = torch.full_like(found, float("inf"))
    for clip in CLIPS:
        scale = scale_of(clip)
        q = divided(groups, scale).clamp_(-middle, middle - 1)
        loss = squares(q * scale[..., None] - groups)
        found, least = torch.where(loss < least, scale, found), torch.minimum(loss, least)
    return found


def divided(groups: Tensor, scale: Tensor) -> Tensor:
    """To whole numbers; 0 where the scale is."""
    safe = torch.where(scale == 0, 1, scale)
    return (groups / safe[..., None]).round_().mul_((scale != 0)[..., None])


def signed_largest(groups: Tensor) -> Tensor:
    """[N, G]: of each group the number that is furthest from 0."""
    return groups.gather(-1, groups.abs().argmax(-1, keepdim=True))[..., 0]


def zero_of(weight: Tensor, zero: int) -> Scales:
    return Scales(torch.tensor([[zero]], dtype=torch.uint8, device=weight.device))


WRITTEN: dict[str, tuple[int, Callable[[Tensor], Codes]]] = {
    "Q4_0": (32, q4_0),
    "Q8_0": (32, q8_0),
    "Q4_K": (BLOCK, lambda weight: with_minima(weight, U4)),
    "Q5_K": (BLOCK, lambda weight: with_minima(weight, U5)),
    "Q6_K": (BLOCK, q6_k),
}
