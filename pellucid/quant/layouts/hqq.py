"""HQQ, as transformers saves it: 2 to 8 bits around zeros that are no whole numbers, groups along inputs.

Groups are rows of their own, [N K / g, g], and codes of rows far apart share a word: of 4 bits those of the
first half of all groups are high, those of the second half low.  Option: "asym", which it always is.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pellucid.quant.codes import S8, U2, U3, U4, U5, U6, Code, Codes, Group, Scales
from pellucid.quant.layouts.base import (
    FLOATS,
    LayerFormat,
    Layout,
    MatrixShape,
    Raw,
    TensorSpec,
    checked,
    divided,
)
from pellucid.quant.layouts.gptq import signed

PER_WORD = {U2: 4, U3: 10, U4: 2, U5: 1, U6: 1, S8: 1}  # codes in an element of W_q


class Hqq(Layout):
    """W_q [rows, g], scale [N K / g, 1], zero [N K / g, 1]: W = (q - zero) scale.

    The tool itself computes in 16 bits what is exact here.
    """

    def params(self, format: LayerFormat, shape: MatrixShape) -> dict[str, TensorSpec]:
        inputs, per = format.group.inputs or shape.inn, PER_WORD[format.code]
        groups = divided(shape.out * shape.inn, inputs, "weights")
        is_padded = format.code == U3
        rows = -(-groups // per) if is_padded else divided(groups, per, "groups")
        word = torch.int32 if is_padded else torch.uint8
        scales = TensorSpec(shape=(groups, 1), dtypes=FLOATS)
        return {
            "W_q": TensorSpec(shape=(rows, inputs), dtypes=(word,)),
            "scale": scales,
            "zero": scales,
        }

    def decode(self, raw: Raw, format: LayerFormat, shape: MatrixShape) -> Codes:
        found = checked(raw, self.params(format, shape))
        q = codes_of(found["W_q"], format.code)[: len(found["scale"])].reshape(shape.out, shape.inn)
        zero = found["zero"].float()
        if format.code == S8:
            q, zero = signed(q), zero - 128
        # A row need not begin with a group: groups are what rows and stored ones have in common.
        inputs = format.group.inputs or shape.inn
        group = math.gcd(inputs, shape.inn)

        def by_row(numbers: Tensor) -> Scales:
            return Scales(numbers.repeat_interleave(inputs // group).reshape(shape.out, -1))

        return Codes(
            q=q, code=format.code, group=Group(1, group), scale=by_row(found["scale"]), zero=by_row(zero)
        )


def codes_of(words: Tensor, code: Code) -> Tensor:
    """uint8 [groups, g], and what the last words are filled up with."""
    per = PER_WORD[code]
    bits = 8 if per == 1 else code.bits
    shifts = reversed(range(0, per * bits, bits))
    return torch.cat([words >> shift & (1 << bits) - 1 for shift in shifts]).to(torch.uint8)


HQQ = Hqq()
