"""GPTQ: 2, 3, 4 or 8 bits, packed along the inputs; version 1 stores each zero less one.

Options: "act_order" (each input names its group), "v2" (zeros are stored as they are).
"""

from __future__ import annotations

import torch
from torch import Tensor

from pellucid.quant.codes import S8, Codes, Scales
from pellucid.quant.layouts.base import (
    FLOATS,
    LayerFormat,
    Layout,
    MatrixShape,
    Raw,
    TensorSpec,
    checked,
    divided,
    groups_by_input,
)
from pellucid.quant.layouts.bits import packed, per_words, unpacked, words_for


class Gptq(Layout):
    """qweight [K bits / 32, N], qzeros [G, N bits / 32], scales [G, N], g_idx [K]: W = (q - zero) scale."""

    def params(self, format: LayerFormat, shape: MatrixShape) -> dict[str, TensorSpec]:
        bits = format.code.bits
        divided(shape.inn, per_words(bits), "inputs")
        act_order = "act_order" in format.options
        _, groups = format.group.counts(shape.out, shape.inn)
        return {
            "qweight": TensorSpec(shape=(words_for(shape.inn, bits), shape.out), dtypes=(torch.int32,)),
            "qzeros": TensorSpec(shape=(groups, words_for(shape.out, bits)), dtypes=(torch.int32,)),
            "scales": TensorSpec(shape=(groups, shape.out), dtypes=FLOATS),
            "g_idx": TensorSpec(shape=(shape.inn,), dtypes=(torch.int32,), required=act_order),
        }

    def decode(self, raw: Raw, format: LayerFormat, shape: MatrixShape) -> Codes:
        bits = format.code.bits
        act_order = "act_order" in format.options
        found = checked(raw, self.params(format, shape))
        q = unpacked(found["qweight"], bits, shape.inn, axis=0).T
        words = found["qzeros"] if "v2" in format.options else added(found["qzeros"], bits, 1)
        zeros = unpacked(words, bits, shape.out, axis=1).T
        if not act_order and "g_idx" in found:
            check_order(found["g_idx"], format.group.inputs)
        return Codes(
            q=signed(q) if format.code == S8 else q,
            code=format.code,
            group=format.group,
            scale=Scales(found["scales"].T),
            zero=Scales(signed(zeros) if format.code == S8 else zeros),
            index=groups_by_input(found["g_idx"], len(found["scales"])) if act_order else None,
        )

    def encode(self, codes: Codes, format: LayerFormat) -> dict[str, Tensor]:
        assert codes.code == format.code and codes.scale is not None and codes.zero is not None, codes.code
        bits, inn = format.code.bits, codes.q.shape[1]
        scales = codes.scale.values.T.contiguous()
        zeros = codes.zero.values.T.expand(scales.shape)
        q = codes.q.T
        if codes.code == S8:
            q, zeros = unsigned(q), unsigned(zeros)
        words = packed(zeros, bits, axis=1)
        index = codes.index
        if index is None:
            index = torch.arange(inn) // (format.group.inputs or inn)
        return {
            "qweight": packed(q, bits, axis=0),
            "qzeros": words if "v2" in format.options else added(words, bits, -1),
            "scales": scales,
            "g_idx": index.int(),
        }


def added(words: Tensor, bits: int, step: int) -> Tensor:
    """Packed zeros [G, N bits / 32] of version 1: as they are meant (step 1), or as they are stored (-1).

    GPTQModel adds to whole words, so that a zero of 0, stored as -1, has borrowed from the one behind it; but
    of 3 bits, which cross words, to each for itself.
    """
    if bits == 3:
        zeros = unpacked(words, bits, words.shape[1] * 32 // bits, axis=1)
        return packed(zeros.int() + step & 7, bits, axis=1)
    ones = sum(1 << shift for shift in range(0, 32, bits))
    return (words.long() + step * ones).to(torch.int32)


def check_order(index: Tensor, inputs: int) -> None:
    """Raise ValueError if inputs are not in the order of their groups, though the config says so."""
    in_order = torch.arange(len(index)) // (inputs or len(index))
    if bool((index != index[0]).any()) and not torch.equal(index.long(), in_order):
        raise ValueError(
            "g_idx has the inputs in an order of its own, but the config says desc_act false; set it to true"
        )


def signed(q: Tensor) -> Tensor:
    """uint8 codes of 0..255 as int8 of -128..127."""
    return (q.to(torch.int16) - 128).to(torch.int8)


def unsigned(q: Tensor) -> Tensor:
    """`signed` backwards."""
    return (q.to(torch.int16) + 128).to(torch.uint8)


GPTQ = Gptq()
