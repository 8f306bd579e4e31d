"""What checkpoints call scales of the KV cache and of inputs, and which one serves; layers own numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from pellucid.quant.base import Coords

SPELLINGS = {  # endings of other tools' names -> ours, such as the attention layer's path and its scale
    ".activation_scale": ".input_scale",
    ".self_attn.k_scale": ".self_attn.attn.k_scale",
    ".self_attn.v_scale": ".self_attn.attn.v_scale",
    ".k_proj.k_scale": ".attn.k_scale",
    ".v_proj.v_scale": ".attn.v_scale",
    ".k_proj.output_scale": ".attn.k_scale",
    ".v_proj.output_scale": ".attn.v_scale",
}

# Queries and probabilities stay in the model's dtype.
UNUSED = ("*.q_scale", "*.q_proj.output_scale", "*.prob_scale", "*.prob_output_scale")


def scale_name(name: str) -> str:
    """The name of a checkpoint's tensor, brought to our spelling if it is a scale of the cache or inputs."""
    for theirs, ours in SPELLINGS.items():
        if name.endswith(theirs):
            return name.removesuffix(theirs) + ours
    return name


class Largest:
    """The one scale of a layer [1]: of scales of heads the largest, with which no head's numbers saturate."""

    def __call__(self, param: Tensor, part: int, tensor: Tensor, coords: Coords) -> None:
        if [size for size in tensor.shape if size != 1][1:]:
            raise ValueError(f"has shape {tuple(tensor.shape)}, must be a number, or one for each head")
        param.copy_(tensor.amax())
