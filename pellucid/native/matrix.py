"""Weights as `cpu.cpp` multiplies them: 16 outputs side by side, a few inputs of each in 32 bits.

Integers are multiplied by activations that are rounded to 16 bits of their row's largest, and floats by them
as they are; scales of groups are halves, around a power of two that all share.  Sums have one order, so that
a row's result does not depend on its company.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from pellucid.native.library import GATES, TYPES, Code, Library, MatrixFields, address, pointer

PANEL = 16  # outputs that lie side by side
STEP = 32  # inputs, of which a row has whole ones
LONGEST_GROUP = 256  # inputs: sums of so many integers fit 32 bits
TABLE_LARGEST = 32767
INPUTS = {Code.BF16: 2, Code.NIBBLES: 8, Code.MAPPED: 8, Code.TABLE: 8}  # in 32 bits; of bytes 4
FLOATS = (Code.BF16, Code.E4M3, Code.E5M2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """W = rows * (scale * (value(q) - middle) - offset), [N, K]."""

    q: Tensor  # of BF16 the numbers, else uint8: a code each
    code: Code
    group: int = 0  # inputs that share a scale; 0: there are none
    scale: Tensor | None = None  # float32 [N, G], as is offset
    offset: Tensor | None = None
    middle: int = 0
    rows: Tensor | None = None  # float32 [N]
    table: Tensor | None = None  # MAPPED: uint8 [16], TABLE: float32 [16]


class NativeMatrix:
    """y = x W^T + bias, with memory of its own."""

    def __init__(
        self, library: Library, numbers: Numbers, dtype: torch.dtype,
        *, bias: Tensor | None = None, gated: bool = False,
    ) -> None:  # fmt: skip
        """dtype: of activations, and of the bias.  gated: W is [gate; up], which may be gated at once."""
        self.num_out, self.num_used = numbers.q.shape
        self.dtype = dtype
        self.gated = gated and self.num_out % (2 * PANEL) == 0
        group = group_of(numbers, self.num_used)
        table, unit = table_of(numbers)
        scale, scale_unit = self._halves(regrouped(numbers.scale, numbers, group, self.num_used))
        offset, offset_unit = self._halves(regrouped(numbers.offset, numbers, group, self.num_used))
        num_in = -(-self.num_used // group) * group
        rows = None if numbers.rows is None else F.pad(numbers.rows, (0, -self.num_out % PANEL))
        words = self._panels(library, in_words(numbers, num_in))
        self.kept = (words, scale, offset, rows, bias, table)
        self.fields = MatrixFields(
            *(address(tensor) for tensor in self.kept),
            num_out=words.shape[0] * PANEL,
            num_in=num_in,
            num_used=self.num_used,
            stored=self.num_out,
            group=group,
            scale_unit=scale_unit * unit,
            offset_unit=offset_unit,
            code=numbers.code,
            middle=numbers.middle,
            type=TYPES[dtype],
            gated=self.gated,
        )
        self._multiply, self._fields = library.product, pointer(self.fields)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.kept if tensor is not None)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        return self._product(x, self.num_out, 0)

    def of_gate(self, x: Tensor, act: str) -> Tensor:
        """act(gate) * up, [..., N / 2]."""
        assert self.gated, self.num_out
        return self._product(x, self.num_out // 2, GATES[act])

    def _product(self, x: Tensor, num_out: int, gate: int) -> Tensor:
        *rows, num_in = x.shape
        assert x.dtype is self.dtype and num_in == self.num_used, (x.dtype, x.shape, self.dtype)
        if not x.is_contiguous():
            x = x.contiguous()
        y = x.new_empty(*rows, num_out)
        num_rows = rows[0] if len(rows) == 1 else math.prod(rows)
        self._multiply(self._fields, x.data_ptr(), y.data_ptr(), num_rows, gate)
        return y

    def _by_turns(self, panels: Tensor) -> Tensor:
        """Panels [P, ...]: of gates and of what they open by turns, if they are to be gated."""
        if not self.gated:
            return panels
        return panels.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1).contiguous()

    def _panels(self, library: Library, words: Tensor) -> Tensor:
        """Rows of words, int32 [N, W] -> [N / 16, W, 16]."""
        words = filled(words, (0, 0, 0, -len(words) % PANEL))
        rows = self._by_turns(words.unflatten(0, (-1, PANEL))).contiguous()
        out = torch.empty(rows.shape[0], rows.shape[2], PANEL, dtype=torch.int32)
        library.panels(rows.data_ptr(), out.data_ptr(), rows.shape[0], rows.shape[2])
        return out

    def _halves(self, values: Tensor | None) -> tuple[Tensor | None, float]:
        """[N, G] as halves [N / 16, G, 16] of a unit."""
        if values is None:
            return None, 1.0
        largest = float(values.abs().max())
        unit = 2.0 ** math.ceil(math.log2(largest)) if 0 < largest < math.inf else 1.0
        halves = F.pad((values / unit).half(), (0, 0, 0, -len(values) % PANEL))
        return self._by_turns(halves.unflatten(0, (-1, PANEL)).transpose(1, 2)).contiguous(), unit


def in_bfloat16(weight: Tensor) -> Numbers:
    """A plain matrix [N, K]."""
    return Numbers(q=weight, code=Code.BF16)


def in_int8(weight: Tensor, rows: Tensor) -> Numbers:
    """int8 [N, K] with a scale for each output [N]."""
    return Numbers(q=weight.view(torch.uint8) ^ 128, code=Code.BYTES, middle=128, rows=rows.float())


def group_of(numbers: Numbers, num_in: int) -> int:
    """The inputs whose sum is scaled at once: a group, or a part of one that is long or that is all."""
    whole = -(-num_in // STEP) * STEP
    if numbers.code in FLOATS:
        return whole if numbers.group in (0, num_in) else numbers.group
    if numbers.group in (0, num_in):
        return math.gcd(whole, LONGEST_GROUP)
    return numbers.group if numbers.group <= LONGEST_GROUP else math.gcd(numbers.group, LONGEST_GROUP)


def regrouped(values: Tensor | None, numbers: Numbers, group: int, num_in: int) -> Tensor | None:
    """[N, G] of groups of `group` inputs, over all of `num_in`."""
    if values is None:
        return None
    num = -(-num_in // group)
    if values.shape[1] == 1:
        return values.float().expand(-1, num)
    return values.float().repeat_interleave(max(1, numbers.group // group), 1)[:, :num]


def in_words(numbers: Numbers, num_in: int) -> Tensor:
    """int32 [N, W]: of each output the codes of a few inputs, in the order of inputs."""
    q = filled(numbers.q, (0, num_in - numbers.q.shape[1]))
    if INPUTS.get(numbers.code, 4) == 8:
        low, high = q.view(len(q), -1, 2, 4).unbind(2)
        q = (low | high << 4).flatten(1)
    return q.contiguous().view(torch.int32)


def filled(matrix: Tensor, more: tuple[int, ...]) -> Tensor:
    """With zeros behind, and no copy of it where there are none."""
    return F.pad(matrix, more) if any(more) else matrix


def table_of(numbers: Numbers) -> tuple[Tensor | None, float]:
    """What four bits stand for, as bytes, and the unit of it."""
    if numbers.table is None or numbers.code is Code.MAPPED:
        return numbers.table, 1.0
    unit = float(numbers.table.abs().max()) / TABLE_LARGEST
    values = (numbers.table / unit).round().int()
    return torch.cat(((values & 255), (values >> 8) + 128)).to(torch.uint8), unit
