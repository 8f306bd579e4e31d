"""ggml's types of tensors: their numbers in files, and how many bytes hold how many elements.  No torch."""

from __future__ import annotations

from typing import NamedTuple


class BlockType(NamedTuple):
    """A block of `elements` inputs in `nbytes` bytes.

    file: who decodes it; None: nobody here.  code, group: what it becomes, and how many inputs share a scale.
    """

    name: str
    elements: int
    nbytes: int
    file: str | None
    code: str = "plain"
    group: int = 0


TYPES = {
    0: BlockType("F32", 1, 4, "floats", "plain", 0),
    1: BlockType("F16", 1, 2, "floats", "plain", 0),
    2: BlockType("Q4_0", 32, 18, "legacy", "u4", 32),
    3: BlockType("Q4_1", 32, 20, "legacy", "u4", 32),
    6: BlockType("Q5_0", 32, 22, "legacy", "u5", 32),
    7: BlockType("Q5_1", 32, 24, "legacy", "u5", 32),
    8: BlockType("Q8_0", 32, 34, "legacy", "s8", 32),
    9: BlockType("Q8_1", 32, 36, "legacy", "s8", 32),
    10: BlockType("Q2_K", 256, 84, "k_quants", "u2", 16),
    11: BlockType("Q3_K", 256, 110, "k_quants", "u3", 16),
    12: BlockType("Q4_K", 256, 144, "k_quants", "u4", 32),
    13: BlockType("Q5_K", 256, 176, "k_quants", "u5", 32),
    14: BlockType("Q6_K", 256, 210, "k_quants", "u6", 16),
    15: BlockType("Q8_K", 256, 292, "k_quants", "s8", 256),
    16: BlockType("IQ2_XXS", 256, 66, "i_quants", "s8", 32),
    17: BlockType("IQ2_XS", 256, 74, "i_quants", "s8", 16),
    18: BlockType("IQ3_XXS", 256, 98, "i_quants", "s8", 32),
    19: BlockType("IQ1_S", 256, 50, "i_quants", "s8", 32),
    20: BlockType("IQ4_NL", 32, 18, "i_quants", "lut4", 32),
    21: BlockType("IQ3_S", 256, 110, "i_quants", "s8", 32),
    22: BlockType("IQ2_S", 256, 82, "i_quants", "s8", 16),
    23: BlockType("IQ4_XS", 256, 136, "i_quants", "lut4", 32),
    24: BlockType("I8", 1, 1, None),
    25: BlockType("I16", 1, 2, None),
    26: BlockType("I32", 1, 4, None),
    27: BlockType("I64", 1, 8, None),
    28: BlockType("F64", 1, 8, "floats", "plain", 0),
    29: BlockType("IQ1_M", 256, 56, "i_quants", "s8", 16),
    30: BlockType("BF16", 1, 2, "floats", "plain", 0),
    34: BlockType("TQ1_0", 256, 54, "legacy", "u2", 256),
    35: BlockType("TQ2_0", 256, 66, "legacy", "u2", 256),
    39: BlockType("MXFP4", 32, 17, "floats", "e2m1", 32),
    40: BlockType("NVFP4", 64, 36, "floats", "e2m1", 16),
}
SIZES = {type.name: type for type in TYPES.values()}
