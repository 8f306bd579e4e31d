"""A quantized matrix, whatever its checkpoint calls it: small integers, scales, perhaps zeros and an index.

Layouts (`quant/layouts/`) read files into `Codes` and write them.  Knows nothing of files, layers, kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Code(NamedTuple):
    """What one element of `Codes.q` means.

    planes: bits of it that kernels keep apart, the low ones first; together they are `bits`.
    """

    name: str
    bits: int
    planes: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """How `Codes.q` holds it, a byte an element; of PLAIN any float will do."""
        return {"s8": torch.int8, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}.get(
            self.name, torch.uint8
        )


U2, U3, U4 = Code("u2", 2, (2,)), Code("u3", 3, (2, 1)), Code("u4", 4, (4,))
U5, U6 = Code("u5", 5, (4, 1)), Code("u6", 6, (4, 2))
S8 = Code("s8", 8, (8,))
E4M3, E5M2, E2M1 = Code("e4m3", 8, (8,)), Code("e5m2", 8, (8,)), Code("e2m1", 4, (4,))
LUT4 = Code("lut4", 4, (4,))  # places in a table of 16 numbers
PLAIN = Code("plain", 16, (16,))  # the numbers themselves, as floats
CODES = {code.name: code for code in (U2, U3, U4, U5, U6, S8, E4M3, E5M2, E2M1, LUT4, PLAIN)}
E2M1_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class Group(NamedTuple):
    """The weights that share a scale: `rows` outputs by `inputs` inputs; 0 is all that there are."""

    rows: int = 1
    inputs: int = 0

    def counts(self, out: int, inn: int) -> tuple[int, int]:
        """How many groups there are along the outputs and the inputs of such a matrix."""
        return -(-out // (self.rows or out)), -(-inn // (self.inputs or inn))


ROW = Group()
WHOLE_MATRIX = Group(0, 0)


class Scales(NamedTuple):
    """A number for each group: values [..., R, G], times outer [..., R or 1, G / m] of m groups in a row.

    Either may have any dtype.  R or G is 1 where all rows or groups share a number.
    """

    values: Tensor
    outer: Tensor | None = None

    def numbers(self) -> Tensor:
        """float32 [..., R, G], rounded once."""
        if self.outer is None:
            return self.values.float()
        run = self.values.shape[-1] // self.outer.shape[-1]
        return (self.values.double() * self.outer.double().repeat_interleave(run, -1)).float()


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """W[n, k] = scale[n, g] * (value(q[n, k]) - zero[n, g]) - offset[n, g].

    q: [..., N, K] in the code's dtype; leading axes are experts.  A row's number of scale, zero and offset is
    n // group.rows; g is index[k] if there is an index, else k // group.inputs.
    """

    q: Tensor
    code: Code
    group: Group = ROW
    scale: Scales | None = None  # None: 1
    zero: Scales | None = None
    offset: Scales | None = None
    index: Tensor | None = None  # int64 [K]
    table: Tensor | None = None  # float32 [16], of LUT4

    def dequantized(self) -> Tensor:
        """float32 [..., N, K]."""
        numbers = self._values()
        if self.zero is not None:
            numbers = numbers - self._spread(self.zero)
        if self.scale is not None:
            numbers = numbers * self._spread(self.scale)
        if self.offset is not None:
            numbers = numbers - self._spread(self.offset)
        return numbers

    def _values(self) -> Tensor:
        """What the elements of q mean, float32 [..., N, K]."""
        if self.code == E2M1:
            return torch.tensor(E2M1_NUMBERS, device=self.q.device)[self.q.int()]
        if self.code == LUT4:
            assert self.table is not None
            return self.table[self.q.int()]
        return self.q.float()

    def _spread(self, scales: Scales) -> Tensor:
        """A number for each group as one for each weight, or as what broadcasts to that."""
        numbers = scales.numbers()
        out, inn = self.q.shape[-2:]
        if numbers.shape[-2] > 1 and self.group.rows != 1:
            numbers = numbers.repeat_interleave(self.group.rows, -2)[..., :out, :]
        if numbers.shape[-1] == 1:
            return numbers
        if self.index is not None:
            return numbers[..., self.index]
        return numbers.repeat_interleave(self.group.inputs or inn, -1)[..., :inn]
