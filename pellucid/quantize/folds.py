"""Where a layer's inputs may be scaled for nothing: what makes them is scaled the other way.

W x = (W s) (x / s): the product is the same, and the codes of W s are others.  A norm's weight, the rows of
`up` before `down`, and those of values before `o` take the 1 / s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pellucid.layers.attention import Attention
from pellucid.layers.linear import Linear, Unmerged
from pellucid.layers.mlp import GatedMLP
from pellucid.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class Fold:
    """readers: linear layers of the same inputs [K].

    divide: what makes the inputs, by s [K]; returns by what, exactly.  tie: of numbers [K] what inputs that
    share a maker get.
    """

    readers: tuple[Linear, ...]
    divide: Callable[
        [Tensor], Tensor
    ]  # what makes the inputs, by s [K]; returns what it was divided by in truth
    tie: Callable[[Tensor], Tensor]

    @torch.no_grad()
    def apply(self, scale: Tensor) -> Tensor:
        """Scale the readers' weights by scale [K], or what is nearest to it; returns that."""
        scale = self.divide(scale)
        for reader in self.readers:
            reader.param("weight").mul_(scale)
        return scale


def untied(numbers: Tensor) -> Tensor:
    return numbers


def folds_of(module: nn.Module, dtype: torch.dtype) -> list[Fold]:
    """All of one decoder layer.  dtype: in which norms' weights are stored."""
    found: list[Fold] = []
    for part in module.modules():
        if isinstance(part, RMSNorm):
            found += norm_folds(part, dtype)
        elif isinstance(part, GatedMLP):
            found += gate_folds(part)
        else:
            found += value_folds(part)
    return found


def norm_folds(norm: RMSNorm, dtype: torch.dtype) -> Iterator[Fold]:
    def divide(scale: Tensor) -> Tensor:
        old, offset = norm.weight.clone(), norm.spec.offset
        norm.weight.copy_((old / scale - offset).to(dtype).float() + offset)
        return torch.where(norm.weight != 0, old / norm.weight, 1)

    for layer in norm.served:
        parts = layer.parts if isinstance(layer, Unmerged) else (layer,)
        yield Fold(tuple(part for part in parts if isinstance(part, Linear)), divide, untied)


def gate_folds(mlp: GatedMLP) -> Iterator[Fold]:
    """act(gate x) * (up x): what the rows of up are divided by, the inputs of down are."""
    up, down = mlp.gate_up, mlp.down
    if not isinstance(up, Linear) or not isinstance(down, Linear):
        return
    first = up.shape.out_partitions[0]

    def divide(scale: Tensor) -> Tensor:
        divide_rows(up, slice(first, None), scale)
        return scale

    yield Fold((down,), divide, untied)


def value_folds(block: nn.Module) -> Iterator[Fold]:
    """Attention gives weighted means of values; query heads of a group read the same ones.

    block: what has a mixer, which has the attention, and the projection behind it.
    """
    mixer = next((child for child in block.children() if child_of(child, Attention)), None)
    attention, qkv = (child_of(mixer, kind) for kind in (Attention, Linear)) if mixer else (None, None)
    if not isinstance(attention, Attention) or not isinstance(qkv, Linear):
        return
    spec, values = attention.spec, qkv.shape.out_partitions[-1]
    size = spec.num_heads * spec.head_dim
    out = child_of(block, Linear)
    if not isinstance(out, Linear) or out.shape.in_features != size:
        return
    if len(qkv.shape.out_partitions) != 3 or values != spec.num_kv_heads * spec.head_dim:
        return
    by_head = (spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.head_dim)

    def tie(numbers: Tensor) -> Tensor:
        return numbers.view(by_head).amax(1, keepdim=True).expand(by_head).reshape(-1)

    def divide(scale: Tensor) -> Tensor:
        divide_rows(qkv, slice(qkv.shape.out_features - values, None), scale.view(by_head)[:, 0].reshape(-1))
        return scale

    yield Fold((out,), divide, tie)


def child_of(module: nn.Module, kind: type[nn.Module]) -> nn.Module | None:
    """The first such part, if there is one."""
    return next((child for child in module.children() if isinstance(child, kind)), None)


def divide_rows(layer: Linear, rows: slice, scale: Tensor) -> None:
    layer.param("weight")[rows].div_(scale[:, None])
    if layer.bias is not None:
        layer.bias[rows].div_(scale)
