"""What the KV cache of a model looks like, in numbers.  No torch.

A *KV group* is a set of attention layers that share one block table: their cache has the same shape.
A plain model has one group, a draft model or a hybrid model adds more.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroupSpec:
    """One group's cache: `num_layers` tensors `[num_blocks, 2, num_kv_heads, block_size, head_dim]`."""

    block_size: int  # tokens
    num_layers: int  # on this rank: 0 where another pipeline stage has them
    num_kv_heads: int
    head_dim: int
    dtype: str  # torch's name, such as "bfloat16"
    itemsize: int  # bytes of one element

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of the group."""
        return 2 * self.num_layers * self.num_kv_heads * self.block_size * self.head_dim * self.itemsize
