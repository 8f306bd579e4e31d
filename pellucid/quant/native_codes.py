"""Codes of any kind as native code multiplies them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pellucid.kernels.packed.packed_weight import LEAST_GROUP, GroupCodes, Numbers, differ, group_for
from pellucid.native.library import Code
from pellucid.native.matrix import Numbers as NativeNumbers
from pellucid.quant.codes import E2M1_NUMBERS

CODES = {
    Numbers.E4M3: Code.E4M3,
    Numbers.E5M2: Code.E5M2,
    Numbers.TABLE: Code.TABLE,
    Numbers.E2M1: Code.MAPPED,
}
HALVES = tuple(int(2 * number) for number in E2M1_NUMBERS)  # whole numbers, from -12 to 12
MOST = 12


def native_numbers(parts: Sequence[GroupCodes]) -> NativeNumbers:
    """Matrices of like codes, one below the other.  Raises ValueError where these are not served, and why."""
    first, num_in = parts[0], parts[0].q.shape[1]
    if any(part.numbers is not first.numbers or part.bits != first.bits for part in parts):
        raise ValueError("matrices of one layer have codes of different kinds")
    if any(differ(part.table, first.table) for part in parts):
        raise ValueError("matrices of one layer have tables of their own")
    groups = {
        part.group if part.group % LEAST_GROUP == 0 else group_for(part.group, num_in) for part in parts
    }
    if None in groups:
        raise ValueError(f"groups of {first.group} inputs are no multiples of {LEAST_GROUP}")
    group = math.gcd(*(group for group in groups if group is not None))
    if group < num_in:
        parts = [part.regrouped(group) for part in parts]
    middle = first.middle if all(part.middle == first.middle for part in parts) else 0
    offsets = [offset_of(part, part.middle - middle) for part in parts]
    return NativeNumbers(
        q=torch.cat([part.q for part in parts]),
        code=code_of(first),
        group=0 if group >= num_in else group,
        scale=torch.cat([part.scale for part in parts]) * (0.5 if first.numbers is Numbers.E2M1 else 1.0),
        offset=None if all(offset is None for offset in offsets) else torch.cat(filled(parts, offsets)),
        middle=MOST if first.numbers is Numbers.E2M1 else middle,
        table=table_of(first),
    )


def code_of(part: GroupCodes) -> Code:
    if part.numbers is Numbers.INTEGER:
        return Code.NIBBLES if part.bits == 4 else Code.BYTES
    return CODES[part.numbers]


def table_of(part: GroupCodes) -> Tensor | None:
    """What a code stands for: of small floats twice that, and all that is no less than 0."""
    if part.numbers is Numbers.E2M1:
        return torch.tensor([number + MOST for number in HALVES], dtype=torch.uint8)
    return part.table


def offset_of(part: GroupCodes, middle: int) -> Tensor | None:
    """All that is subtracted from scaled codes, float32 [N, G]; None: nothing."""
    offset = part.offset
    if part.zero is not None:
        offset = part.zero * part.scale + (0.0 if offset is None else offset)
    if middle:
        offset = middle * part.scale + (0.0 if offset is None else offset)
    return offset


def filled(parts: Sequence[GroupCodes], offsets: Sequence[Tensor | None]) -> list[Tensor]:
    """Zeros where a matrix has no offsets and another one has."""
    pairs = zip(parts, offsets, strict=True)
    return [torch.zeros_like(part.scale) if offset is None else offset for part, offset in pairs]
