"""A mixture of experts: a router, gated MLPs of which each token takes a few, perhaps one that all take."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pellucid.dist.collectives import Group
from pellucid.forward import ForwardInput
from pellucid.kernels.experts.experts import ExpertWeights, Gating, More, Pairs, added_up, hidden_ref
from pellucid.kernels.experts.routing import Chosen, Parts, Routing, Share, Uniform
from pellucid.layers.activation import Act
from pellucid.layers.addend import Addend, post_of
from pellucid.layers.leaf import Leaf
from pellucid.layers.linear import Linear
from pellucid.layers.mlp import GatedMLP
from pellucid.layers.norm import RMSNorm
from pellucid.layers.spread import Spread
from pellucid.layers.weight import Weight
from pellucid.quant.base import ExpertMatrix, ExpertsMethod, MixesItself
from pellucid.quant.base import Experts as KeptExperts


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpert:
    """A gated MLP that every token takes, beside those that it is sent to.

    hidden: features, of all of them if they are several.  gate: the matrix [1, D] whose sigmoid weighs it.
    """

    hidden: int
    name: str = "shared_experts"
    gate: str | None = None
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparse:
    """A mixture of experts in numbers, with the checkpoint's names for its parts."""

    hidden: int  # features of one expert
    act: Act
    routing: Routing
    shared: SharedExpert | None = None
    bias: bool = False  # of every expert's matrices
    weighs_input: bool = False  # an expert's input is times its weight, not what it gives
    router: str = "gate"
    router_bias: bool = False
    router_is_wide: bool = False  # its product is in float32
    choice_bias: str | None = None  # what is added to scores to choose by, not to weigh with
    transposed: bool = False  # where all experts are one tensor, inputs come before outputs
    by_turns: bool = False  # and rows of gate and up come by turns


class Router(nn.Module):
    """Scores the experts for each token, and chooses.

    is_uniform: by chance, with dummy weights, whose scores would favour a few experts.
    """

    def __init__(
        self,
        linear: Linear,
        sparse: Sparse,
        share: Share,
        bias: Weight | None,
        leaf: Leaf,
        *,
        name: str,
        is_uniform: bool,
    ) -> None:
        super().__init__()
        self.linear, self.bias = linear, bias
        self.routing, self.share = sparse.routing, share
        self.is_wide, self.is_uniform = sparse.router_is_wide, is_uniform
        self.leaf, self.name = leaf, name

    def forward(self, x: Tensor, fwd: ForwardInput) -> Chosen:
        """x [T, D]"""
        logits = self._logits(x, fwd)
        is_whole = len(x) == fwd.num_tokens  # else those that are wanted, and padding is not told apart
        return self.leaf.route(
            logits,
            self.routing,
            self.share,
            bias=self.bias,
            end=fwd.cu_seqlens_q[-1:] if is_whole else None,
            uniform=self._chances(fwd, is_whole=is_whole) if self.is_uniform else None,
        )

    def has_few_rows(self, dtype: torch.dtype) -> bool:
        """Whether few rows of activations of `dtype` have a kernel of their own."""
        return self.leaf.logit_parts is not None and dtype.itemsize == 2

    def _logits(self, x: Tensor, fwd: ForwardInput) -> Tensor | Parts:
        """Of x [T, D], for `route`."""
        linear, logit_parts = self.linear, self.leaf.logit_parts
        is_adapted = linear.lora is not None and fwd.adapters_of(x) is not None
        parts = None
        if logit_parts is not None and not is_adapted:
            parts = logit_parts(x, linear.param("weight"), linear.bias)
        return linear(x.float() if self.is_wide else x, fwd) if parts is None else parts

    def _chances(self, fwd: ForwardInput, *, is_whole: bool) -> Uniform:
        ids, positions = fwd.input_ids, fwd.positions
        if not is_whole:
            ids, positions = fwd.wanted(ids), fwd.wanted(positions)
        return Uniform(ids, positions, zlib.crc32(self.name.encode()) >> 2)


class Shared(nn.Module):
    """What every token takes besides."""

    def __init__(self, mlp: GatedMLP, gate: Linear | None) -> None:
        super().__init__()
        self.mlp, self.gate = mlp, gate

    def forward(self, x: Tensor, fwd: ForwardInput) -> More:
        """This rank's part of it."""
        given = self.mlp(x, fwd)
        values = added_up(given.part) if isinstance(given, Addend) else given
        return More(values, None if self.gate is None else self.gate(x, fwd))


class Experts(nn.Module):
    """x [T, D] -> [T, D], for a norm.  Called as mlp(x, fwd)."""

    def __init__(  # noqa: PLR0913 what a mixture is made of
        self,
        router: Router,
        sparse: Sparse,
        weights: dict[str, Weight],
        shared: Shared | None,
        group: Group,
        leaf: Leaf,
        *,
        method: ExpertsMethod,
        dtype: torch.dtype,
        post: RMSNorm | None = None,
        scale: float = 1.0,
        spread: Spread | None = None,
    ) -> None:
        """method: how matrices are kept.  dtype: of activations.  spread: over engines.

        post, scale: what follows the sum over ranks.
        """
        super().__init__()
        self.method, self.dtype = method, dtype
        self._kept: KeptExperts | None = None
        self.post, self.scale = post, scale
        self.router, self.shared = router, shared
        for name, weight in weights.items():
            self.register_parameter(name, weight)
        self.gating = Gating(sparse.act.kernel, sparse.act.limit, sparse.act.alpha)
        self.weighs_input = sparse.weighs_input
        self.group, self.leaf, self.spread = group, leaf, spread

    def matrix(self, name: ExpertMatrix) -> Weight:
        """Before `finish`."""
        weight = self._parameters[name]
        assert isinstance(weight, Weight), name
        return weight

    @property
    def biases(self) -> tuple[Tensor | None, Tensor | None]:
        return self._parameters.get("gate_up_bias"), self._parameters.get("down_bias")

    @property
    def idle_bytes(self) -> int:
        """Before `finish`: of all experts' weights, those that a token does not go to, on average."""
        routing = self.router.routing
        whole = sum(param.nbytes for param in self.parameters(recurse=False))
        return int(whole * (1 - routing.top_k / routing.num_experts))

    def finish(self) -> None:
        params, matrices = self._parameters, (self.matrix("gate_up"), self.matrix("down"))
        self._kept = self.method.finish(*matrices, self.dtype, self.biases)
        if not isinstance(self._kept, ExpertWeights) or self._kept.down is not params["down"]:
            params["gate_up"] = params["down"] = None

    def fed(self, x: Tensor, chosen: Chosen) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Of each expert that is hit what it is fed, of x [T, D], and what its gates let through [.., I]."""
        assert isinstance(self._kept, ExpertWeights), "plain matrices"
        for expert in chosen.ids.unique().tolist():
            if expert < len(self._kept.down):
                token, place = (chosen.ids == expert).nonzero(as_tuple=True)
                inputs = x[token]
                if self.weighs_input:
                    inputs = inputs * chosen.weights[token, place, None]
                yield expert, inputs, hidden_ref(inputs, self._kept, expert, self.gating)

    def forward(self, x: Tensor, fwd: ForwardInput) -> Tensor | Addend:
        chosen = self.router(x, fwd)
        more = None if self.shared is None else self.shared(x, fwd)
        if self.spread is None:
            mixed = self._mix(x, chosen, more)
        else:
            mixed = self.spread.over(x, chosen, max(fwd.num_common, fwd.num_tokens), self._mix_whole)
            mixed = mixed if more is None else plus_more(mixed, more)
        if self.group.size == 1 and self.post is None and self.scale == 1.0:
            return Addend(mixed) if isinstance(mixed, Pairs) else mixed
        return Addend(added_up(mixed), self.group, post_of(self.post, self.scale))

    def lend(self, num_tokens: int) -> None:
        """Multiply other engines' tokens.  num_tokens: of each of them."""
        assert self.spread is not None, "no other engine has experts of this layer"
        self.spread.lend(num_tokens, self._mix_whole)

    def _mix_whole(self, x: Tensor, chosen: Chosen) -> Tensor:
        return added_up(self._mix(x, chosen, None))

    def _mix(self, x: Tensor, chosen: Chosen, more: More | None) -> Tensor | Pairs:
        """x [T, D] -> [T, D], by the experts that are here."""
        assert self._kept is not None, "finish() was not called after loading"
        if isinstance(self._kept, MixesItself):
            return self._kept.mix(x, chosen, self.gating, weighs_input=self.weighs_input, more=more)
        mix = self.leaf.mix if isinstance(self._kept, ExpertWeights) else self.leaf.mix_packed
        return mix(x, chosen, self._kept, self.gating, weighs_input=self.weighs_input, more=more)


def plus_more(mixed: Tensor, more: More) -> Tensor:
    """mixed [T, D], and what every token takes besides."""
    factor = 1.0 if more.gate is None else more.gate.float().sigmoid()
    return (mixed.float() + more.values.float() * factor).to(mixed.dtype)
