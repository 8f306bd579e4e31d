"""What one of ggml's types says of a matrix."""

from __future__ import annotations

from pellucid.quant.codes import CODES, Group
from pellucid.quant.layouts.base import LayerFormat
from pellucid.quant.layouts.ggml.types import SIZES


def format_of(type: str) -> LayerFormat:
    """type: its name, of one that is decoded here."""
    size = SIZES[type]
    assert size.file is not None, type
    return LayerFormat(layout=f"ggml/{type}", code=CODES[size.code], group=Group(1, size.group))
