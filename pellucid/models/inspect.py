"""What there is to know of a model's weights before they are loaded: headers, formats, and who multiplies."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pellucid.models.build import BuildOptions, design
from pellucid.models.checkpoint import Checkpoint
from pellucid.models.kinds import Kind, kinds_of
from pellucid.models.loader import torch_module
from pellucid.platform import Platform

BLOCK_SIZE = 64  # of a KV cache that nobody makes


def inspect(
    checkpoint: Checkpoint,
    platform: Platform,
    *,
    dtype: torch.dtype,
    quantization: str | Mapping[str, object] | None = None,
) -> list[Kind]:
    """Each kind of matrix of a checkpoint, in the order of the model.

    dtype: of activations.  Raises ValueError for what is not served.
    """
    options = BuildOptions(
        dtype=dtype,
        device=torch.device(platform.device),
        block_size=BLOCK_SIZE,
        max_model_len=BLOCK_SIZE,
        quantization=quantization,
        show_progress=False,
    )
    model, builder, source = design(checkpoint, platform, options)
    return kinds_of(torch_module(model), builder.context.formats, source.infos, dtype)
