"""A layer of experts, from what a model declares and how its checkpoint holds it; see `Builder.experts`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from pellucid.layers.experts import Experts, Router, Share, Shared, Sparse
from pellucid.layers.leaf import FUSED
from pellucid.layers.linear import Linear
from pellucid.layers.norm import RMSNorm
from pellucid.layers.spread import Spread
from pellucid.layers.weight import Weight
from pellucid.quant.base import (
    WHOLE,
    Coords,
    ExpertMatrix,
    ExpertsMethod,
    LinearShape,
    ParamSpec,
    Place,
    Replicated,
)
from pellucid.quant.expert_places import AddedOnce, AllInOne, ExpertPlace, OneByOne
from pellucid.quant.unquantized import Unquantized

if TYPE_CHECKING:
    from pellucid.models.builder import Builder

GATE_UP, DOWN = ("gate_proj", "up_proj"), ("down_proj",)


def make_experts(
    b: Builder, dim: int, sparse: Sparse, *, post: RMSNorm | None = None, scale: float = 1.0
) -> Experts:
    """b: at the name of the layer.  post, scale: see `Builder.row`.

    Raises ValueError if experts cannot be divided among the ranks.
    """
    maker = Maker(b, dim, sparse, share_of(b, sparse))
    return Experts(
        maker.router(),
        sparse,
        maker.weights(),
        maker.shared(),
        b.context.group,
        b.context.leaf,
        method=maker.method,
        dtype=b.context.dtype,
        post=post,
        scale=scale,
        spread=maker.spread(),
    )


def share_of(b: Builder, sparse: Sparse) -> Share:
    """Which experts this rank has."""
    num, coords, engines = sparse.routing.num_experts, b.context.coords, b.context.engines
    size = coords.size * engines.size
    if not b.context.expert_parallel:
        return Share(0, num)
    if num % size:
        raise ValueError(
            f"enable_expert_parallel divides {num} experts among {size} ranks, which is not whole; "
            "leave it out, or use another tensor_parallel_size or data_parallel_size"
        )
    return Share((engines.rank * coords.size + coords.rank) * (num // size), num // size)


@dataclass(frozen=True)
class Maker:
    """Makes the parts of one layer."""

    b: Builder
    dim: int
    sparse: Sparse
    share: Share

    def router(self) -> Router:
        sparse, b = self.sparse, self.b
        num = sparse.routing.num_experts
        bias = None
        if sparse.choice_bias is not None:
            spec = ParamSpec(shape=(num,), dtype=torch.float32, place=Replicated())
            bias = b.weight(spec, (b.path(sparse.choice_bias),))
        return Router(
            self.plain_linear(sparse.router, num, bias=sparse.router_bias, wide=sparse.router_is_wide),
            sparse,
            Share(0, num) if b.context.engines.size > 1 else self.share,
            bias,
            b.context.leaf,
            name=b.path(sparse.router),
            is_uniform=b.context.is_dummy,
        )

    def spread(self) -> Spread | None:
        """Between engines that divide the experts among them."""
        context, routing = self.b.context, self.sparse.routing
        if context.engines.size == 1:
            return None
        return Spread(
            context.engines,
            self.share,
            routing.num_experts,
            routing.top_k,
            self.dim,
            context.dtype,
            context.device,
            is_fused=context.leaf is FUSED,
        )

    def plain_linear(self, name: str, out: int, *, bias: bool = False, wide: bool = False) -> Linear:
        """A small matrix of which every rank has the whole, and which no scheme quantizes while it loads."""
        dtype = torch.float32 if wide else self.b.context.dtype
        shape = LinearShape(in_features=self.dim, out_partitions=(out,), split="out", dtype=dtype)
        return self.b.linear_of(name, shape, Unquantized(), bias=bias)

    def shared(self) -> Shared | None:
        """The expert that every token takes, if there is one."""
        shared = self.sparse.shared
        if shared is None:
            return None
        gate = None if shared.gate is None else self.plain_linear(shared.gate, 1)
        mlp = self.b.gated_mlp(shared.name, self.dim, shared.hidden, self.sparse.act, bias=shared.bias)
        return Shared(mlp, gate)

    def weights(self) -> dict[str, Weight]:
        """Every matrix and bias, by what `Experts` calls it."""
        weights = {"gate_up": self._matrix("gate_up"), "down": self._matrix("down")}
        if self.sparse.bias:
            weights |= {"gate_up_bias": self._bias(GATE_UP), "down_bias": self._bias(DOWN)}
        return weights

    @cached_property
    def _slice(self) -> tuple[int, Coords]:
        """The features of I that are here, and where: the rank's, unless it has whole experts."""
        if self.b.context.expert_parallel:
            return self.sparse.hidden, WHOLE
        down = self._sources["down"][0][0].removesuffix(".weight")
        return self.b.hidden_share(self.sparse.hidden, down, "experts")

    @property
    def _coords(self) -> Coords:
        return self._slice[1]

    @property
    def _hidden(self) -> int:
        return self._slice[0]

    @cached_property
    def method(self) -> ExpertsMethod:
        """How the matrices are kept."""
        paths = [
            tuple(source.removesuffix(".weight") for source in self._sources[matrix][0])
            for matrix in self._sources
        ]
        return self.b.context.quantization.experts(*paths)

    @cached_property
    def _sources(self) -> dict[ExpertMatrix, tuple[tuple[str, ...], ExpertPlace]]:
        """Of each matrix the tensors' names, and the rule by which they fill it."""
        return {
            "gate_up": self._one_by_one(GATE_UP) or self._all_in_one(GATE_UP),
            "down": self._one_by_one(DOWN) or self._all_in_one(DOWN),
        }

    def _matrix(self, matrix: ExpertMatrix) -> Weight:
        sources, place = self._sources[matrix]
        rows, inputs = (2 * self._hidden, self.dim) if matrix == "gate_up" else (self.dim, self._hidden)
        spec = self.method.spec(matrix, (self.share.num, rows, inputs), self.b.context.dtype, place)
        return self.b.weight(spec, sources, self._coords)

    def _one_by_one(self, matrices: tuple[str, ...]) -> tuple[tuple[str, ...], ExpertPlace] | None:
        """The names and rule of a checkpoint with a tensor for each expert's matrix; None: it has others."""
        b, num = self.b, self.sparse.routing.num_experts
        if not b.context.stored or any(self._name(name) for name in (*matrices, "gate_up_proj")):
            return None
        for expert in range(num):
            paths = tuple(b.path(f"experts.{expert}.{name}") for name in matrices)
            b.note_experts(paths, is_here=self.share.first <= expert < self.share.first + self.share.num)
        here = range(self.share.first, self.share.first + self.share.num)
        names = (b.path(f"experts.{expert}.{name}.weight") for expert in here for name in matrices)
        return tuple(names), OneByOne(len(matrices), "out" if matrices is GATE_UP else "in")

    def _all_in_one(self, matrices: tuple[str, ...]) -> tuple[tuple[str, ...], ExpertPlace]:
        """The same of one with all experts in a tensor, of each matrix or of those that are merged."""
        apart = matrices if all(self._name(name) for name in matrices) else ()
        names = apart or (("gate_up_proj",) if matrices is GATE_UP else DOWN)
        sources = tuple(self._name(name) or self.b.path(f"experts.{name}") for name in names)
        is_coded = any(source.endswith(".weight") for source in sources)  # codes have outputs first
        self.b.note_experts(tuple(source.removesuffix(".weight") for source in sources))
        return sources, AllInOne(
            num_merged=len(matrices),
            num_tensors=len(names),
            split="out" if matrices is GATE_UP else "in",
            first=self.share.first,
            num_experts=self.sparse.routing.num_experts,
            by_turns=self.sparse.by_turns,
            transposed=self.sparse.transposed and not is_coded,
        )

    def _name(self, matrix: str) -> str | None:
        """By which the tensor of all experts' matrices is read; None if there is none.

        Codes are read by the name of the matrix that they are.
        """
        stored, path = self.b.context.stored, self.b.path(f"experts.{matrix}")
        if f"{path}_weight_scale" in stored or f"{path}_scale" in stored:  # of codes that are called `path`
            return f"{path}.weight"
        if path in stored:
            return path
        is_coded = f"{path}_blocks" in stored or any(
            f"{path}.{end}" in stored for end in ("weight", "qweight")
        )
        return f"{path}.weight" if is_coded else None

    def _bias(self, matrices: tuple[str, ...]) -> Weight:
        share, first = self.share.num, self.share.first
        sources, matrix = self._sources["gate_up" if matrices is GATE_UP else "down"]
        is_apart = isinstance(matrix, OneByOne)
        names = tuple(source.removesuffix("weight") + "bias" for source in sources)
        if not is_apart:
            names = (self.b.path(f"experts.{'gate_up_proj' if matrices is GATE_UP else 'down_proj'}_bias"),)
        num = None if is_apart else self.sparse.routing.num_experts
        if matrices is DOWN:
            place: Place = AddedOnce(first, num, self.b.context.expert_parallel)
        elif num is None:
            place = matrix
        else:
            place = AllInOne(
                num_merged=2, split="out", first=first, num_experts=num, by_turns=self.sparse.by_turns
            )
        shape = (share, self.dim if matrices is DOWN else 2 * self._hidden)
        spec = ParamSpec(shape=shape, dtype=self.b.context.dtype, place=place)
        return self.b.weight(spec, names, self.b.context.coords if matrices is DOWN else self._coords)
