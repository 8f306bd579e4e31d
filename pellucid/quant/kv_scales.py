"""What checkpoints call the scales of an FP8 KV cache.  Knows names only; layers own the numbers."""

from __future__ import annotations

SPELLINGS = {  # endings of other tools' names -> ours, which is the attention layer's path and its scale
    ".self_attn.k_scale": ".self_attn.attn.k_scale",
    ".self_attn.v_scale": ".self_attn.attn.v_scale",
    ".k_proj.k_scale": ".attn.k_scale",
    ".v_proj.v_scale": ".attn.v_scale",
    ".k_proj.output_scale": ".attn.k_scale",
    ".v_proj.output_scale": ".attn.v_scale",
}

# Queries and probabilities stay in the model's dtype.
UNUSED = ("*.q_scale", "*.q_proj.output_scale", "*.prob_scale", "*.prob_output_scale")


def kv_scale_name(name: str) -> str:
    """The name of a checkpoint's tensor, brought to our spelling if it is a scale of the KV cache."""
    for theirs, ours in SPELLINGS.items():
        if name.endswith(theirs):
            return name.removesuffix(theirs) + ours
    return name
