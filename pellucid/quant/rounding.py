"""Plain matrices as codes, rounded to the nearest: while weights load, and when a checkpoint is made.

What is learned of a model's inputs is not here (`pellucid/quantize/`); it comes as `lost`, what errors cost.
Legend: N outputs, K inputs, G groups of g inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from pellucid.quant.codes import E2M1, E2M1_NUMBERS, E4M3, LUT4, S8, Codes, Group, Scales
from pellucid.quant.layouts.base import LayerFormat

FP8_MAX, FP4_MAX = 448.0, 6.0
# Where 16 codes tell a normal distribution's values from -1 to 1 apart best (Dettmers et al. 2023).
NF4_NUMBERS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
MOST_AT_ONCE = 1 << 24  # numbers of a matrix that are rounded at once: float32 copies are theirs alone
IN_CACHE = 1 << 20  # on a CPU, whose cache has them and some of their copies
NUM_CLIPS, LEAST_CLIP = 16, 0.5  # shares of a group's range that are tried
Lost = Callable[[Tensor], Tensor]  # of errors [N, G, g], what they cost, [N, G]


def slices_of(weight: Tensor) -> tuple[Tensor, ...]:
    """Rows of weight [N, K], as many as are rounded at once."""
    most = MOST_AT_ONCE if weight.is_cuda else min(MOST_AT_ONCE, IN_CACHE)
    return weight.split(max(1, most // weight.shape[1]))


def in_slices(weight: Tensor, round_rows: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The codes [N, K] and scales [N, ...] that `round_rows` makes of weight [N, K], some rows at a time.

    Room for all comes first: in what the slices' float32 copies leave free it would keep some of that from
    whoever is next (on a GPU, 2.5 GB of Qwen3-32B).
    """
    slices = slices_of(weight)
    if len(slices) == 1:
        return round_rows(weight)
    codes, scales = (part.new_empty(len(weight), *part.shape[1:]) for part in round_rows(weight[:1]))
    start = 0
    for rows in slices:
        end = start + len(rows)
        codes[start:end], scales[start:end] = round_rows(rows)
        start = end
    return codes, scales


def squares(errors: Tensor) -> Tensor:
    """Every weight's error counts alike."""
    return errors.square().sum(-1)


def rounded(weight: Tensor, format: LayerFormat, lost: Lost = squares) -> Codes:
    """The codes of a format that are nearest to weight [N, K]; of integers those whose clip loses least.

    Raises ValueError for a matrix that the format cannot hold.
    """
    weight = weight.float()
    if format.code == E4M3:
        return fp8(weight, format.group)
    if format.code == LUT4:
        return nf4(weight, format.group.inputs)
    if format.code == E2M1:
        return mxfp4(weight) if format.group.inputs == 32 else nvfp4(weight)
    groups = in_groups(weight, format.group)
    grid = best_grid(groups, format, lost)
    return grid.codes(grid.round(groups).flatten(1)[:, : weight.shape[1]], format)


def in_groups(weight: Tensor, group: Group) -> Tensor:
    """[N, K] -> [N, G, g], the last group filled up with zeros."""
    inputs = group.inputs or weight.shape[1]
    return F.pad(weight, (0, -weight.shape[1] % inputs)).unflatten(1, (-1, inputs))


class Grid(NamedTuple):
    """The numbers that integer codes of a group can mean: (q - zero) scale, for q from `least` to `most`."""

    scale: Tensor  # [N, G], in the dtype in which it is stored
    zero: Tensor  # float32 [N, G]
    least: int
    most: int

    def round(self, groups: Tensor) -> Tensor:
        """[N, G, g] -> codes, as floats."""
        q = (groups / self.scale.float()[..., None]).round_().add_(self.zero[..., None])
        return q.clamp_(self.least, self.most)

    def numbers(self, q: Tensor) -> Tensor:
        """What codes [N, G, g] mean."""
        return (q - self.zero[..., None]) * self.scale.float()[..., None]

    def codes(self, q: Tensor, format: LayerFormat, index: Tensor | None = None) -> Codes:
        """q: [N, K].  index: the group of each input, if they do not follow one another."""
        code = format.code
        plain_zero = code == S8 and "asym" not in format.options and format.layout != "gptq"
        return Codes(
            q=q.to(code.dtype),
            code=code,
            group=format.group,
            scale=Scales(self.scale),
            zero=None if plain_zero else Scales(self.zero.to(code.dtype)),
            index=index,
        )


def span_of(format: LayerFormat) -> tuple[int, int]:
    """The least and the greatest code."""
    bits = 7 if "7_bits" in format.options else format.code.bits
    least = -(1 << bits - 1) if format.code == S8 else 0
    return least, least + (1 << bits) - 1


def grid_of(groups: Tensor, format: LayerFormat, clip: float = 1.0) -> Grid:
    """The grid that spans a share of what weights [N, G, g] reach.

    With zeros ("asym", and AWQ always) it is spanned from the least to the greatest, else around 0.
    """
    least, most = span_of(format)
    dtype = torch.float32 if format.layout in ("scaled", "bnb-int8") else torch.float16
    if "asym" in format.options or format.layout == "awq":
        low, high = groups.amin(-1).clamp(max=0) * clip, groups.amax(-1).clamp(min=0) * clip
        scale = storable((high - low) / (most - least), dtype)
        zero = (least - low / scale.float()).round().clamp(least, most)
        return Grid(scale, zero, least, most)
    steps = (most - least) / 2 if most < 64 else (most - least - 1) / 2
    scale = storable(groups.abs().amax(-1) * clip / steps, dtype)
    return Grid(scale, torch.full_like(scale, (least + most + 1) // 2, dtype=torch.float32), least, most)


def best_grid(groups: Tensor, format: LayerFormat, lost: Lost = squares) -> Grid:
    """Of grids that clip outliers more and more the one that loses least, for each group of its own."""
    best = grid_of(groups, format)
    if best.most - best.least >= 127:  # so fine a grid loses nothing by spanning all
        return best
    least = lost(best.numbers(best.round(groups)) - groups)
    for i in range(1, NUM_CLIPS):
        grid = grid_of(groups, format, 1 - i * (1 - LEAST_CLIP) / (NUM_CLIPS - 1))
        loss = lost(grid.numbers(grid.round(groups)) - groups)
        better = loss < least
        least = torch.where(better, loss, least)
        scale, zero = (torch.where(better, new, old) for new, old in zip(grid[:2], best[:2], strict=True))
        best = Grid(scale, zero, best.least, best.most)
    return best


def storable(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """As it is stored, positive: what would vanish or overflow becomes the nearest that does not."""
    info = torch.finfo(dtype)
    return torch.where(scale > 0, scale.clamp(info.smallest_normal, info.max), 1).to(dtype)


def fp8(weight: Tensor, group: Group) -> Codes:
    """e4m3, a scale for each row, block or matrix."""
    rows, inputs = (size or all for size, all in zip(group, weight.shape, strict=True))
    out, inn = weight.shape
    blocks = (
        F.pad(weight, (0, -inn % inputs, 0, -out % rows)).unflatten(1, (-1, inputs)).unflatten(0, (-1, rows))
    )
    scale = storable(blocks.abs().amax((1, 3)) / FP8_MAX, torch.float32)
    q = (blocks / scale[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return Codes(q=q.flatten(2).flatten(0, 1)[:out, :inn], code=E4M3, group=group, scale=Scales(scale))


def nf4(weight: Tensor, block: int) -> Codes:
    """Places in NF4's table, a float32 for each block of a row.  Raises ValueError for parts of one."""
    if weight.shape[1] % block:
        raise ValueError(
            f"{weight.shape[1]} inputs are not whole blocks of {block}, which NF4 needs; ignore these layers"
        )
    blocks = weight.unflatten(1, (-1, block))
    scale = storable(blocks.abs().amax(-1), torch.float32)
    table = torch.tensor(NF4_NUMBERS, device=weight.device)
    q = nearest(blocks / scale[..., None], table)
    return Codes(q=q.flatten(1), code=LUT4, group=Group(1, block), scale=Scales(scale), table=table)


def nearest(numbers: Tensor, table: Tensor) -> Tensor:
    """Of each number the nearest one's place in an ascending table, uint8."""
    return torch.bucketize(numbers, (table[1:] + table[:-1]) / 2).to(torch.uint8)


def e2m1(numbers: Tensor) -> Tensor:
    """The codes of what is at most 6 away from 0, uint8; greater ones become 6."""
    table = torch.tensor(E2M1_NUMBERS[:8], device=numbers.device)
    return nearest(numbers.abs(), table) | (numbers < 0).to(torch.uint8) << 3


def mxfp4(weight: Tensor) -> Codes:
    """e2m1, a power of two for each 32 inputs: of the two that are near the one that loses less."""
    groups = in_whole_groups(weight, 32)
    largest = groups.abs().amax(-1).clamp_min(2.0**-120)
    exponent = largest.log2().floor() - 2  # the greatest number then lies between 4 and 8
    table = torch.tensor(E2M1_NUMBERS, device=weight.device)

    def loss(exponent: Tensor) -> Tensor:
        scaled = groups * (2.0**-exponent)[..., None]
        return squares((table[e2m1(scaled).int()] - scaled) * (2.0**exponent)[..., None])

    exponent = torch.where(loss(exponent + 1) < loss(exponent), exponent + 1, exponent)
    q = e2m1(groups * (2.0**-exponent)[..., None]).flatten(1)
    scale = (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    return Codes(q=q, code=E2M1, group=Group(1, 32), scale=Scales(scale))


def nvfp4(weight: Tensor) -> Codes:
    """e2m1, an e4m3 for each 16 inputs, times a number of the matrix that lets the largest of them be 448."""
    groups = in_whole_groups(weight, 16)
    largest = groups.abs().amax(-1)
    divisor = FP8_MAX * FP4_MAX / largest.max().clamp_min(1e-30)  # which is what files hold, in float32
    scale = (largest / FP4_MAX * divisor).clamp_(2.0**-9, FP8_MAX).to(torch.float8_e4m3fn)
    numbers = Scales(scale, (1 / divisor.double())[None, None])
    q = e2m1(groups / numbers.numbers()[..., None]).flatten(1)
    return Codes(q=q, code=E2M1, group=Group(1, 16), scale=numbers)


def in_whole_groups(weight: Tensor, inputs: int) -> Tensor:
    if weight.shape[1] % inputs:
        raise ValueError(
            f"{weight.shape[1]} inputs are not whole groups of {inputs}, which FP4 needs; ignore these layers"
        )
    return weight.unflatten(1, (-1, inputs))
