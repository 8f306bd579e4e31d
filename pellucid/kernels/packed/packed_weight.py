"""A matrix of codes as a device holds it: 4 or 8 bits a weight, in the order in which tensor cores take them.

Tiles of 64 outputs by 64 inputs are contiguous.  Of a tile each of 128 threads has 32 codes, those that it
multiplies when the tile is the left operand of Nvidia's `mma` and `wgmma` with 16-bit numbers (PTX ISA,
"Matrix Fragments for mma.m16n8k16"), so that they are unpacked in registers and go nowhere else.  Scales lie
beside each other as a thread wants them, too.  This file is torch alone; `packed_matmul.py` multiplies.

Legend: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

E2M1_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
TILE = 64  # outputs and inputs
NUM_WORDS = {4: 512, 8: 1024}  # int32 of a tile, by bits
LEAST_GROUP = 16  # inputs that share a scale: fewer are no step of the tensor cores


class Numbers(IntEnum):
    """What a code stands for.  Kernels get it as a constant."""

    INTEGER = 0  # itself, less `middle` and `zero`
    E2M1 = 1
    TABLE = 2  # a number of `table`
    E4M3 = 3
    E5M2 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCodes:
    """Codes [N, K] with groups along the inputs alone: W = scale (number(q) - middle - zero) - offset.

    q: uint8.  scale, zero, offset: float32 [N, G], of `group` inputs each; the last group may be cut short.
    """

    q: Tensor
    numbers: Numbers
    bits: int  # 4 or 8
    group: int
    scale: Tensor
    middle: int = 0
    zero: Tensor | None = None
    offset: Tensor | None = None
    table: Tensor | None = None  # float32 [16]
    index: Tensor | None = None  # the group of each input, int64 [K], if they are not in order

    def cut(self, rows: slice, inputs: slice) -> GroupCodes:
        """Some outputs and inputs.  Groups that are cut become smaller ones that divide them."""
        if self.index is None and inputs.start % self.group:
            return self.regrouped(math.gcd(self.group, inputs.start)).cut(rows, inputs)
        groups = slice(None)
        if self.index is None:
            groups = slice(inputs.start // self.group, -(-inputs.stop // self.group))

        def some(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[rows, groups]

        return replace(
            self,
            q=self.q[rows, inputs],
            scale=self.scale[rows, groups],
            zero=some(self.zero),
            offset=some(self.offset),
            index=None if self.index is None else self.index[inputs],
        )

    def padded(self, num_rows: int, num_in: int | None = None) -> GroupCodes:
        """The same filled up with outputs of zeros, and with inputs that are to be zeros themselves."""
        rows, inputs = num_rows - len(self.q), (num_in or self.q.shape[1]) - self.q.shape[1]
        if not rows and not inputs:
            return self
        groups, index = 0, self.index
        if index is not None:
            last = index[-1:] if len(index) else index.new_zeros(1)
            index = torch.cat((index, last.expand(inputs)))
        elif inputs:
            groups = -(-(self.q.shape[1] + inputs) // self.group) - self.scale.shape[1]

        def fill(values: Tensor, more: int) -> Tensor:
            return torch.nn.functional.pad(values, (0, more, 0, rows))

        zero, offset = (None if each is None else fill(each, groups) for each in (self.zero, self.offset))
        q, scale = fill(self.q, inputs), fill(self.scale, groups)
        return replace(self, q=q, scale=scale, zero=zero, offset=offset, index=index)

    def in_order(self) -> tuple[GroupCodes, Tensor | None]:
        """The same with inputs in the order of their groups, and which input is where; None: all stay.

        Raises ValueError where then groups are of different sizes.
        """
        if self.index is None:
            return self, None
        order = self.index.argsort(stable=True)
        num_in, groups = len(order), self.index[order]
        if not torch.equal(groups, torch.arange(num_in, device=groups.device) // self.group):
            raise ValueError(f"its {num_in} inputs are not divided evenly among groups of {self.group}")
        stay = torch.equal(order, torch.arange(num_in, device=order.device))
        return replace(self, q=self.q[:, order], index=None), None if stay else order

    def dequantized(self) -> Tensor:
        """W, float32 [N, K], of inputs in order."""
        assert self.index is None, "inputs come in the order of their groups"
        numbers, num_in = values_of(self), self.q.shape[1]

        def spread(values: Tensor) -> Tensor:
            return values if values.shape[1] == 1 else values.repeat_interleave(self.group, 1)[:, :num_in]

        if self.zero is not None:
            numbers = numbers - spread(self.zero)
        numbers = numbers * spread(self.scale)
        return numbers if self.offset is None else numbers - spread(self.offset)

    def regrouped(self, group: int) -> GroupCodes:
        """The same with smaller groups, which divide those that there are, if these are several."""
        if group == self.group:
            return self
        assert self.group % group == 0 or self.scale.shape[1] == 1, (self.group, group)
        repeats, num = -(-self.group // group), -(-self.q.shape[1] // group)

        def spread(values: Tensor | None) -> Tensor | None:
            return None if values is None else values.repeat_interleave(repeats, 1)[:, :num]

        scale = spread(self.scale)
        assert scale is not None
        return replace(self, group=group, scale=scale, zero=spread(self.zero), offset=spread(self.offset))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """W [N, K] as `packed` leaves it.  N and K are filled up to whole tiles, with whatever."""

    words: Tensor  # int32 [N / 64, K / 64, NUM_WORDS]
    scale: Tensor  # [N / 64, G, 64] of the activations' dtype, as are the others
    zero: Tensor | None
    offset: Tensor | None
    table: Tensor | None  # [16]
    table_bits: tuple[int, ...] = ()  # of each of its numbers
    numbers: Numbers
    middle: int
    bits: int
    group: int  # inputs: a multiple of 64 or 16 or 32
    num_out: int
    num_in: int
    # Powers of two that scales have as a factor, and that kernels need not multiply by; words are `spread`.
    raised: int = 0
    gated: bool = False  # of each tile's outputs eight are gates, and eight what they open, by turns

    @property
    def dtype(self) -> torch.dtype:
        return self.scale.dtype

    @property
    def device(self) -> torch.device:
        return self.words.device

    @property
    def nbytes(self) -> int:
        parts = (self.words, self.scale, self.zero, self.offset, self.table)
        return sum(part.nbytes for part in parts if part is not None)


def group_for(group: int, num_in: int) -> int | None:
    """The groups that kernels take in the stead of such ones; None: these are too small or too odd."""
    if group >= num_in:
        return -(-num_in // TILE) * TILE
    if group % TILE == 0:
        return group
    common = math.gcd(group, TILE)
    return common if common >= LEAST_GROUP else None


def packed(parts: Sequence[GroupCodes], dtype: torch.dtype, *, gated: bool = False) -> PackedWeight:
    """Matrices of like codes, one below the other, for activations of `dtype`.

    gated: they are gates and as many that these open, in whole tiles, to be multiplied in one pass.
    Raises ValueError where groups of so many inputs are not served.
    """
    num_in = parts[0].q.shape[1]
    assert all(part.index is None for part in parts), "inputs come in the order of their groups"
    groups = {group_for(part.group, num_in) for part in parts}
    if None in groups:
        raise ValueError(f"groups of {parts[0].group} inputs share no multiple of {LEAST_GROUP} with {TILE}")
    for name in ("numbers", "bits", "middle"):
        if any(getattr(part, name) != getattr(parts[0], name) for part in parts):
            raise ValueError("matrices of one layer have codes of different kinds")
    if any(differ(part.table, parts[0].table) for part in parts):
        raise ValueError("matrices of one layer have tables of their own")
    group = math.gcd(*(group for group in groups if group is not None))
    if group < num_in:
        parts = [part.regrouped(group) for part in parts]
    num_groups = -(-(-(-num_in // TILE) * TILE) // group)
    first, num_out = parts[0], sum(len(part.q) for part in parts)
    order = by_turns(num_out).to(first.q.device) if gated else None

    def below(values: list[Tensor]) -> Tensor:
        joined = torch.cat(values) if len(values) > 1 else values[0]
        return joined if order is None else joined[order]

    def beside(name: str) -> Tensor | None:
        values = [getattr(part, name) for part in parts]
        return None if values[0] is None else in_lanes(below(values), num_groups).to(dtype)

    scale = beside("scale")
    assert scale is not None
    return PackedWeight(
        words=in_words(below([part.q for part in parts]), first.bits),
        scale=scale,
        zero=beside("zero"),
        offset=beside("offset"),
        table=None if first.table is None else first.table.to(dtype),
        table_bits=bits_of(first.table, dtype),
        numbers=first.numbers,
        middle=first.middle,
        bits=first.bits,
        group=group,
        num_out=num_out,
        num_in=num_in,
        gated=gated,
    )


def by_turns(num_out: int) -> Tensor:
    """Which output of [gate; up] is each of those that lie eight by eight, int64 [num_out]."""
    assert num_out % TILE == 0, num_out
    return torch.arange(num_out).view(2, -1, 8).transpose(0, 1).flatten()


def bits_of(table: Tensor | None, dtype: torch.dtype) -> tuple[int, ...]:
    """Of each number of a table, if its type has 16."""
    if table is None or dtype.itemsize != 2:
        return ()
    return tuple(bits & 0xFFFF for bits in table.to(dtype).view(torch.int16).tolist())


def differ(table: Tensor | None, other: Tensor | None) -> bool:
    """Whether there are two tables that are not alike."""
    return table is not None and other is not None and not torch.equal(table, other)


def padded(values: Tensor, rows: int, columns: int) -> Tensor:
    """values [R, C] with zeros up to whole `rows` and `columns`."""
    more = [-values.shape[1] % columns, -values.shape[0] % rows]
    return torch.nn.functional.pad(values, (0, more[0], 0, more[1])) if any(more) else values


def in_lanes(values: Tensor, num_groups: int) -> Tensor:
    """[N, G] -> [N / 64, num_groups, 64]: of each tile rows r and r + 8 side by side."""
    values = padded(values, TILE, 1)
    values = torch.nn.functional.pad(values, (0, num_groups - values.shape[1]))
    warps = values.view(-1, 4, 2, 8, num_groups)  # tile, warp, half, row, group
    return warps.permute(0, 4, 1, 3, 2).reshape(-1, num_groups, TILE).contiguous()


def out_of_lanes(lanes: Tensor) -> Tensor:
    """`in_lanes` backwards: [N, G] of whole tiles."""
    num_groups = lanes.shape[1]
    return lanes.view(-1, num_groups, 4, 8, 2).permute(0, 2, 4, 3, 1).reshape(-1, num_groups)


def in_words(q: Tensor, bits: int) -> Tensor:
    """Codes uint8 [N, K] -> int32 [N / 64, K / 64, NUM_WORDS].

    A thread's word has, of 4 bits, the codes (c, b, a) of a step of 16 inputs in bits 8c + 4b + 16a: inputs
    8c + 2 thread + a of row 8b + lane.  Of 8 bits, a byte each, it has c of one half alone.
    """
    q = padded(q, TILE, TILE)
    num_tiles = q.shape[0] // TILE, q.shape[1] // TILE
    if bits == 4:
        # row: warp, b, lane; column: step, c, thread, a
        view = q.view(num_tiles[0], 4, 2, 8, num_tiles[1], 4, 2, 4, 2)
        codes = view.permute(0, 4, 1, 3, 7, 5, 8, 6, 2)  # .. warp, lane, thread, step; a, c, b
        nibbles = codes.reshape(*num_tiles, -1, 2)
        return (nibbles[..., 0] | nibbles[..., 1] << 4).view(torch.int32).contiguous()
    view = q.view(num_tiles[0], 4, 2, 8, num_tiles[1], 2, 2, 2, 4, 2)  # column: half, step, c, thread, a
    codes = view.permute(0, 4, 5, 1, 3, 8, 6, 7, 2, 9)  # half, warp, lane, thread, step, c; b, a
    return codes.reshape(*num_tiles, -1).contiguous().view(torch.int32)


def out_of_words(words: Tensor, bits: int) -> Tensor:
    """`in_words` backwards: codes uint8 [N, K] of whole tiles."""
    rows, columns = words.shape[0], words.shape[1]
    flat = words.contiguous().view(torch.uint8)
    if bits == 4:
        nibbles = torch.stack((flat & 15, flat >> 4), -1)
        codes = nibbles.view(rows, columns, 4, 8, 4, 4, 2, 2, 2)  # warp, lane, thread, step, a, c, b
        return codes.permute(0, 2, 8, 3, 1, 5, 7, 4, 6).reshape(rows * TILE, columns * TILE)
    codes = flat.view(rows, columns, 2, 4, 8, 4, 2, 2, 2, 2)  # half, warp, lane, thread, step, c, b, a
    return codes.permute(0, 3, 8, 4, 1, 2, 6, 7, 5, 9).reshape(rows * TILE, columns * TILE)


# Of the four codes of each half of a word, how far to the left its bits are turned to be those of a bfloat16:
# sign, upper and lower bit of the exponent, mantissa.  No bit of a word is needed twice.
TURNS = ((0, 0, 0, 0), (4, 4, 4, 4), (10, 10, 10, 10), (6, 30, 6, 6))
BFLOAT16_BITS = (15, 8, 7, 6)


def moves() -> dict[int, int]:
    """How far to the left bits are turned from `in_words` to `spread`, and which bits of a word are."""
    masks: dict[int, int] = {}
    for half in range(2):
        for code, turns in enumerate(TURNS):
            for i, (turn, bit) in enumerate(zip(turns, BFLOAT16_BITS, strict=True)):
                begin, end = 16 * half + 4 * code + 3 - i, (16 * half + bit - turn) % 32
                masks[(end - begin) % 32] = masks.get((end - begin) % 32, 0) | 1 << begin
    return masks


def turned(words: Tensor, left: int) -> Tensor:
    """int32 words whose bits are turned to the left."""
    if left % 32 == 0:
        return words
    low = (1 << left % 32) - 1  # what comes from above; int32's own shift repeats the sign
    return words << left % 32 | words >> 32 - left % 32 & low


def signed(bits: int) -> int:
    """32 bits as int32 has them."""
    return bits - (bits >> 31 << 32)


def spread(words: Tensor) -> Tensor:
    """Words of E2M1 [..] with bits where `packed_hopper.small_floats` turns them to bfloat16's from."""
    out = torch.zeros_like(words)
    for left, mask in moves().items():
        out |= turned(words & signed(mask), left)
    return out


def gathered(words: Tensor) -> Tensor:
    """`spread` backwards."""
    out = torch.zeros_like(words)
    for left, mask in moves().items():
        out |= turned(words, -left) & signed(mask)
    return out


def numbers_of(weight: PackedWeight, first: int = 0, last: int | None = None) -> Tensor:
    """Outputs first .. last of W in the activations' dtype, rounded once: the reference of all kernels.

    first: a multiple of 64.
    """
    last = weight.num_out if last is None else last
    tiles = slice(first // TILE, -(-last // TILE))

    def of_groups(lanes: Tensor | None) -> Tensor | None:
        return None if lanes is None else out_of_lanes(lanes[tiles]).float()

    scale, words = of_groups(weight.scale), weight.words[tiles]
    assert scale is not None
    codes = GroupCodes(
        q=out_of_words(gathered(words) if weight.raised else words, weight.bits),
        numbers=weight.numbers,
        bits=weight.bits,
        group=weight.group,
        scale=scale / 2.0**weight.raised,
        middle=weight.middle,
        zero=of_groups(weight.zero),
        offset=of_groups(weight.offset),
        table=weight.table,
    )
    numbers = codes.dequantized()[: last - first, : weight.num_in].to(weight.dtype)
    if not weight.gated:
        return numbers
    assert last - first == weight.num_out, "gates and what they open lie apart"
    return torch.empty_like(numbers).index_copy_(0, by_turns(weight.num_out).to(numbers.device), numbers)


def values_of(codes: GroupCodes) -> Tensor:
    """What codes stand for, float32."""
    match codes.numbers:
        case Numbers.INTEGER:
            return codes.q.float() - codes.middle
        case Numbers.E2M1:
            return torch.tensor(E2M1_NUMBERS, device=codes.q.device)[codes.q.int()]
        case Numbers.TABLE:
            assert codes.table is not None
            return codes.table.float()[codes.q.int()]
        case Numbers.E4M3:
            return codes.q.view(torch.float8_e4m3fn).float()
        case Numbers.E5M2:
            return codes.q.view(torch.float8_e5m2).float()
