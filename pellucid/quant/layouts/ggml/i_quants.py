"""i-quants: runs of 4 or 8 inputs are places in a grid of small numbers, with signs or a shift besides.

The grids are in `assets/ggml_grids.safetensors`, as the gguf package (0.19, MIT licence) has them in
`gguf.quants`: of its classes `IQ2_XXS` to `IQ1_S`, `init_grid()` makes `grid`, which is stored as bytes
[places, run] under the class' name.  IQ4_NL and IQ4_XS have a table of 16 numbers instead.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from pellucid.quant.codes import LUT4, S8, Codes, Group, Scales
from pellucid.quant.layouts.ggml.blocks import Blocks, bits_of, cut, fields, half, row, words16, words32

GRIDS = Path(__file__).parents[3] / "assets" / "ggml_grids.safetensors"
IQ4_NUMBERS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def grid(name: str) -> Tensor:
    """int8 [places, run], where tensors are made now."""
    return grids(torch.get_default_device())[name]


@cache
def grids(device: torch.device) -> dict[str, Tensor]:
    return load_file(GRIDS, device=str(device))


def even_signs() -> Tensor:
    """uint8 [128]: 7 bits of signs with the eighth, which makes their number even."""
    seven = torch.arange(128)
    return (seven | bits_of(seven[:, None], range(7), 1).sum(-1) % 2 << 7).to(torch.uint8)


def codes_of(q: Tensor, scales: Tensor, d: Tensor) -> Codes:
    """q int8 [N, B, 256]; odd scales [N, B, groups], which stand for what is in files: 2 s + 1."""
    group = Group(1, 256 // scales.shape[-1])
    return Codes(q=row(q), code=S8, group=group, scale=Scales(row(scales * 2 + 1), d))


def with_signs(places: Tensor, name: str, signs: Tensor) -> Tensor:
    """int8 [N, B, 256]: the grid's numbers at places [N, B, n], with a bit of signs [N, B, 32] for each."""
    numbers = grid(name)[places.int()].flatten(-2)
    return torch.where(bits_of(signs, range(8), 1).bool(), -numbers, numbers)


def read_iq2_xxs(blocks: Tensor) -> Codes:
    d, q = cut(blocks, 2, 64)
    runs = q.unflatten(-1, (8, 8))
    word = words32(runs[..., 4:])[..., 0]
    signs = even_signs()[bits_of(word, (0, 7, 14, 21), 127)]
    return codes_of(with_signs(runs[..., :4].flatten(-2), "IQ2_XXS", signs), word >> 28, half(d) / 8)


def read_iq2_xs(blocks: Tensor) -> Codes:
    d, q, scales = cut(blocks, 2, 64, 8)
    words = words16(q)
    numbers = with_signs(words & 511, "IQ2_XS", even_signs()[words >> 9])
    return codes_of(numbers, bits_of(scales, (0, 4), 15), half(d) / 8)


def read_iq2_s(blocks: Tensor) -> Codes:
    d, q, signs, upper, scales = cut(blocks, 2, 32, 32, 8, 8)
    places = q.int() | bits_of(upper, (0, 2, 4, 6), 3).int() << 8
    return codes_of(with_signs(places, "IQ2_S", signs), bits_of(scales, (0, 4), 15), half(d) / 8)


def read_iq3_xxs(blocks: Tensor) -> Codes:
    d, q, rest = cut(blocks, 2, 64, 32)
    words = words32(rest)
    signs = even_signs()[bits_of(words, (0, 7, 14, 21), 127)]
    return codes_of(with_signs(q, "IQ3_XXS", signs), words >> 28, half(d) / 4)


def read_iq3_s(blocks: Tensor) -> Codes:
    d, q, upper, signs, scales = cut(blocks, 2, 64, 8, 32, 4)
    places = q.int() | bits_of(upper, range(8), 1).int() << 8
    return codes_of(with_signs(places, "IQ3_S", signs), bits_of(scales, (0, 4), 15), half(d))


def shifted(places: Tensor, down: Tensor) -> Tensor:
    """The grid's -1, 0 and 1 at places [N, B, 32] in eighths, an eighth up or down, int8 [N, B, 256]."""
    numbers = grid("IQ1_S")[places.int()] * 8
    shift = torch.where(down.bool(), -1, 1).to(torch.int8)
    return (numbers + shift[..., None]).flatten(-2)


def read_iq1_s(blocks: Tensor) -> Codes:
    d, q, rest = cut(blocks, 2, 32, 16)
    words = words16(rest)
    places = q.int() | bits_of(words, (0, 3, 6, 9), 7) << 8
    down = (words >> 15).repeat_interleave(4, -1)
    return codes_of(shifted(places, down), words >> 12 & 7, half(d) / 8)


def read_iq1_m(blocks: Tensor) -> Codes:
    """The block's float16 is spread over the upper four bits of its four words of scales."""
    q, rest, scales = cut(blocks, 32, 16, 8)
    words = words16(scales)
    quarters = torch.stack([words[..., i] >> 12 << 4 * i for i in range(4)])
    d = quarters.sum(0).to(torch.int16).view(torch.float16).float()
    nibbles = bits_of(rest, (0, 4), 15)
    numbers = shifted(q.int() | (nibbles & 7).int() << 8, nibbles >> 3)
    return codes_of(numbers, bits_of(words, (0, 3, 6, 9), 7), d / 8)


def read_iq4_nl(blocks: Tensor) -> Codes:
    d, q = cut(blocks, 2, 16)
    return in_table(fields(q, 4, 16), Group(1, 32), Scales(half(d)))


def read_iq4_xs(blocks: Tensor) -> Codes:
    d, upper, lower, q = cut(blocks, 2, 2, 4, 128)
    scales = bits_of(lower, (0, 4), 15).int() | bits_of(words16(upper), range(0, 16, 2), 3) << 4
    return in_table(fields(q, 4, 16), Group(1, 32), Scales(row((scales - 32).to(torch.int8)), half(d)))


def in_table(q: Tensor, group: Group, scale: Scales) -> Codes:
    table = torch.tensor(IQ4_NUMBERS, dtype=torch.float32)
    return Codes(q=row(q), code=LUT4, group=group, scale=scale, table=table)


IQ2_XXS = Blocks("IQ2_XXS", read_iq2_xxs)
IQ2_XS = Blocks("IQ2_XS", read_iq2_xs)
IQ2_S = Blocks("IQ2_S", read_iq2_s)
IQ3_XXS = Blocks("IQ3_XXS", read_iq3_xxs)
IQ3_S = Blocks("IQ3_S", read_iq3_s)
IQ1_S = Blocks("IQ1_S", read_iq1_s)
IQ1_M = Blocks("IQ1_M", read_iq1_m)
IQ4_NL = Blocks("IQ4_NL", read_iq4_nl)
IQ4_XS = Blocks("IQ4_XS", read_iq4_xs)
