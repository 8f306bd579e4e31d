"""compressed-tensors' "pack-quantized": 2 to 8 bits, weights packed along inputs, zeros along outputs.

Options: "asym" (there are zeros), "act_order" (each input names its group), "7_bits" (of the code s8), and
"padded": words of older versions hold whole codes only, which differs for 3, 5, 6 and 7 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pellucid.quant.codes import S8, WHOLE_MATRIX, Codes, Scales
from pellucid.quant.layouts.base import (
    FLOATS,
    LayerFormat,
    Layout,
    MatrixShape,
    Raw,
    TensorSpec,
    checked,
    groups_by_input,
)
from pellucid.quant.layouts.bits import packed, unpacked, unpacked_words, words_for


class CtPack(Layout):
    """weight_packed [N, K bits / 32], weight_scale [N, G]; zeros [N bits / 32, G] and g_idx [K] if asked for.

    Codes and zeros are stored as unsigned numbers: W = (q - zero) scale, and zero is 2^(bits - 1) without
    zeros.  A whole matrix' own zero is not packed, and stored less 2^(bits - 1).
    """

    def params(self, format: LayerFormat, shape: MatrixShape) -> dict[str, TensorSpec]:
        bits, act_order = bits_of(format), "act_order" in format.options
        padded = "padded" in format.options
        rows, groups = format.group.counts(shape.out, shape.inn)
        specs = {
            "weight_packed": TensorSpec(
                shape=(shape.out, words(shape.inn, bits, padded=padded)), dtypes=(torch.int32,)
            ),
            "weight_scale": TensorSpec(shape=(rows, groups), dtypes=FLOATS),
            "weight_shape": TensorSpec(shape=(2,), dtypes=(torch.int64, torch.int32), required=False),
        }
        if "asym" in format.options and format.group == WHOLE_MATRIX:
            specs["weight_zero_point"] = TensorSpec(shape=(1, 1), dtypes=(torch.int8,))
        elif "asym" in format.options:
            specs["weight_zero_point"] = TensorSpec(
                shape=(words(shape.out, bits, padded=padded), groups), dtypes=(torch.int32,)
            )
        if act_order:
            specs["weight_g_idx"] = TensorSpec(shape=(shape.inn,), dtypes=(torch.int32, torch.int64))
        return specs

    def decode(self, raw: Raw, format: LayerFormat, shape: MatrixShape) -> Codes:
        bits, act_order = bits_of(format), "act_order" in format.options
        found = checked(raw, self.params(format, shape))
        unpack = unpacked_words if "padded" in format.options else unpacked
        middle = 1 << bits - 1
        q = unpack(found["weight_packed"], bits, shape.inn, axis=1)
        zero = torch.tensor([[middle]], dtype=torch.uint8)
        if "asym" in format.options and format.group == WHOLE_MATRIX:
            zero = (found["weight_zero_point"].to(torch.int16) + middle).to(torch.uint8)
        elif "asym" in format.options:
            zero = unpack(found["weight_zero_point"], bits, shape.out, axis=0)
        if format.code == S8:
            q, zero = ((x.to(torch.int16) - middle).to(torch.int8) for x in (q, zero))
        groups = found["weight_scale"].shape[1]
        return Codes(
            q=q,
            code=format.code,
            group=format.group,
            scale=Scales(found["weight_scale"]),
            zero=None if format.code == S8 and "asym" not in format.options else Scales(zero),
            index=groups_by_input(found["weight_g_idx"], groups) if act_order else None,
        )

    def encode(self, codes: Codes, format: LayerFormat) -> dict[str, Tensor]:
        """Packs densely, as newer versions do."""
        assert codes.code == format.code and codes.scale is not None, codes.code
        bits = bits_of(format)
        shift = 1 << bits - 1 if codes.code == S8 else 0
        raw = {
            "weight_packed": packed(codes.q.int() + shift, bits, axis=1),
            "weight_scale": codes.scale.values,
            "weight_shape": torch.tensor(codes.q.shape),
        }
        if "asym" in format.options:
            assert codes.zero is not None
            zeros = codes.zero.values.int().expand(codes.scale.values.shape) + shift
            raw["weight_zero_point"] = (
                (zeros - (1 << bits - 1)).to(torch.int8)
                if format.group == WHOLE_MATRIX
                else packed(zeros, bits, axis=0)
            )
        if codes.index is not None:
            raw["weight_g_idx"] = codes.index.int()
        return raw


def bits_of(format: LayerFormat) -> int:
    return 7 if "7_bits" in format.options else format.code.bits


def words(count: int, bits: int, *, padded: bool) -> int:
    """How many words hold `count` codes."""
    return -(-count // (32 // bits)) if padded else words_for(count, bits)


CT_PACK = CtPack()
