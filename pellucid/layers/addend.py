"""What a layer adds to the residual stream, deferred: a norm does in one pass what is left to do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor, nn

from pellucid.dist.collectives import ALONE, Group
from pellucid.forward import ForwardInput
from pellucid.kernels.experts.experts import Pairs, added_up
from pellucid.kernels.pointwise.rms_norm import NO_POST, Post
from pellucid.kernels.products.round_rows import Rounded
from pellucid.layers.linear import Linear

if TYPE_CHECKING:
    from pellucid.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class Addend:
    """Summed over the ranks of `group`, of which each has a part [T, D], then as `post` says, then added.

    Where there is one rank, the part may be what experts give, and is then added as it is.
    """

    part: Tensor | Pairs
    group: Group = ALONE
    post: Post = NO_POST

    def __add__(self, other: Addend) -> Addend:
        """The sum of both, to be summed over ranks once."""
        assert self.group is other.group, "parts on other ranks"
        assert self.post.is_nothing and other.post.is_nothing, "what is normalized alone is added alone"
        return replace(self, part=added_up(self.part) + added_up(other.part))

    def sum(self) -> Tensor:
        """[T, D] over all ranks, the same on each, in the place of `part`."""
        return self.group.all_reduce(added_up(self.part))


class Adding(nn.Module):
    """A layer whose output is not yet what is added.

    Ranks may divide its input features among them, each with a part of the sum; a norm or factor may follow.
    """

    def __init__(
        self, part: nn.Module, group: Group, *, post: RMSNorm | None = None, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.part = part
        self.group = group
        self.post, self.scale = post, scale
        self.rounding = part.rounding if isinstance(part, Linear) else None

    def forward(self, x: Tensor | Rounded, fwd: ForwardInput | None = None) -> Addend:
        """x [T, this rank's in_features] -> [T, out_features]."""
        part = self.part(x, fwd)
        part = part.part if isinstance(part, Addend) else part  # of the same group
        return Addend(part, self.group, post_of(self.post, self.scale))


def post_of(norm: RMSNorm | None, scale: float) -> Post:
    """What follows the sum over ranks.  Asked when weights are loaded."""
    return Post(scale=scale) if norm is None else Post(norm.weight, norm.spec.eps, scale)
