"""AWQ, version "gemm": 4 bits with zeros, packed along the outputs in an order of AWQ's own."""

from __future__ import annotations

import torch
from torch import Tensor

from pellucid.quant.codes import U4, Codes, Scales
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
from pellucid.quant.layouts.bits import packed, unpacked

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # column c of eight is nibble PLACES[c]
COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i holds column COLUMNS[i]


class Awq(Layout):
    """qweight [K, N / 8], qzeros [G, N / 8], scales [G, N]: W = (q - zero) scale."""

    def params(self, format: LayerFormat, shape: MatrixShape) -> dict[str, TensorSpec]:
        words = divided(shape.out, 8, "outputs")
        _, groups = format.group.counts(shape.out, shape.inn)
        return {
            "qweight": TensorSpec(shape=(shape.inn, words), dtypes=(torch.int32,)),
            "qzeros": TensorSpec(shape=(groups, words), dtypes=(torch.int32,)),
            "scales": TensorSpec(shape=(groups, shape.out), dtypes=FLOATS),
        }

    def decode(self, raw: Raw, format: LayerFormat, shape: MatrixShape) -> Codes:
        found = checked(raw, self.params(format, shape))
        return Codes(
            q=in_columns(found["qweight"]).T,
            code=U4,
            group=format.group,
            scale=Scales(found["scales"].T),
            zero=Scales(in_columns(found["qzeros"]).T),
        )

    def encode(self, codes: Codes, format: LayerFormat) -> dict[str, Tensor]:
        assert codes.code == U4 and codes.scale is not None and codes.zero is not None, codes.code
        scales = codes.scale.values.T.contiguous()
        zeros = codes.zero.values.T.expand(scales.shape)
        return {"qweight": in_words(codes.q.T), "qzeros": in_words(zeros), "scales": scales}


def in_columns(words: Tensor) -> Tensor:
    """int32 [R, N / 8] -> uint8 [R, N]."""
    nibbles = unpacked(words, 4, words.shape[1] * 8)
    return nibbles.unflatten(-1, (-1, 8))[..., PLACES].flatten(-2)


def in_words(columns: Tensor) -> Tensor:
    """uint8 [R, N] -> int32 [R, N / 8]."""
    return packed(columns.unflatten(-1, (-1, 8))[..., COLUMNS].flatten(-2), 4)


AWQ = Awq()
