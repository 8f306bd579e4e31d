"""Mixtures of experts, in codes or in bfloat16, multiplied by native code on a CPU.

What `kernels/experts/packed_experts.py` and `kernels/experts/experts.py` do on a GPU.  Pairs of a token and
an expert are sorted by experts, of which only those that are hit are read, each one once for all its rows,
however many these are.

Legend: T tokens, E experts here, k of a token, D model dim, I hidden features of an expert.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from pellucid.kernels.experts.experts import ExpertWeights, Gating, More, in_slices, most_tokens
from pellucid.kernels.experts.routing import Chosen
from pellucid.kernels.packed.packed_weight import GroupCodes
from pellucid.native.library import GATES, TYPES, GatingFields, Library, MatrixFields, MixtureFields, pointer
from pellucid.native.matrix import PANEL, NativeMatrix, in_bfloat16
from pellucid.quant.native_codes import native_numbers

Biases = tuple[Tensor | None, Tensor | None]  # [E, 2 * I], gate and up by turns; [E, D]


class NativeExperts:
    """All experts of a layer that are here."""

    def __init__(self, code: Library, gate_up: Sequence[NativeMatrix], down: Sequence[NativeMatrix]) -> None:
        """Of each expert [gate; up] [2 * I, D], which may be gated, and [D, I]."""
        first, last = gate_up[0], down[0]
        self.dim, self.hidden, self.dtype = first.num_used, last.num_used, first.dtype
        self.kept = gate_up, down
        self._arrays = [(MatrixFields * len(some))(*(each.fields for each in some)) for some in self.kept]
        self._mix = code.mix

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for some in self.kept for each in some)

    def mix(
        self,
        x: Tensor,
        chosen: Chosen,
        gating: Gating,
        *,
        weighs_input: bool = False,
        more: More | None = None,
    ) -> Tensor:
        """x [T, D] -> [T, D]; see `mix_experts`."""
        if len(x) > most_tokens(x, chosen):
            return in_slices(partial(self.mix, gating=gating, weighs_input=weighs_input), x, chosen, more)
        assert x.dtype is self.dtype and x.shape[1] == self.dim, (x.dtype, x.shape)
        x, ids, weights = (each.contiguous() for each in (x, chosen.ids, chosen.weights))
        assert ids.dtype is torch.int32 and weights.dtype is torch.float32, (ids.dtype, weights.dtype)
        values, factor = None, None
        if more is not None:
            values = more.values.to(x.dtype).contiguous()
            factor = None if more.gate is None else more.gate.float().sigmoid().contiguous()
        given, y = x.new_empty(ids.numel(), self.dim), torch.empty_like(x)
        fields = self._fields(gating, ids.shape[1], weighs_input=weighs_input)
        addresses = [None if t is None else t.data_ptr() for t in (x, ids, weights, values, factor, given, y)]
        self._mix(pointer(fields), *addresses, len(x))
        return y

    def _fields(self, gating: Gating, top_k: int, *, weighs_input: bool) -> MixtureFields:
        gate_up, down = self._arrays
        return MixtureFields(
            gate_up=ctypes.cast(gate_up, ctypes.c_void_p),
            down=ctypes.cast(down, ctypes.c_void_p),
            num=len(down),
            top_k=top_k,
            hidden=self.hidden,
            dim=self.dim,
            gate=GatingFields(act=GATES[gating.act], limit=gating.limit or 0.0, alpha=gating.alpha),
            weighs_input=weighs_input,
            type=TYPES[self.dtype],
        )


def native_experts(
    code: Library,
    gate_up: Iterable[Sequence[GroupCodes]],
    down: Iterable[Sequence[GroupCodes]],
    dtype: torch.dtype,
    biases: Biases = (None, None),
) -> NativeExperts:
    """Of each expert (gate, up) and (down,).  Raises ValueError where these cannot stay packed, and why."""
    up_bias, down_bias = None if biases[0] is None else apart(biases[0]), biases[1]
    ups = [matrix_of(code, parts, dtype, bias_of(up_bias, i)) for i, parts in enumerate(gate_up)]
    return NativeExperts(
        code, ups, [matrix_of(code, parts, dtype, bias_of(down_bias, i)) for i, parts in enumerate(down)]
    )


def matrix_of(
    code: Library, parts: Sequence[GroupCodes], dtype: torch.dtype, bias: Tensor | None
) -> NativeMatrix:
    """One of these below the other; two of them are gates and what they open."""
    for part in parts:
        if part.index is not None:
            raise ValueError("their inputs are in an order of their own")
        if any(size % PANEL for size in part.q.shape):
            raise ValueError(f"their matrices of {tuple(part.q.shape)} are not of whole {PANEL}s")
    return NativeMatrix(code, native_numbers(parts), dtype, bias=bias, gated=len(parts) == 2)


def native_plain(code: Library, experts: ExpertWeights) -> NativeExperts | None:
    """Of plain matrices in bfloat16.  None: they are not of whole panels."""
    gate_up, down = experts.gate_up.detach(), experts.down.detach()
    if any(size % PANEL for size in down.shape[1:]):
        return None
    up_bias = None if experts.gate_up_bias is None else apart(experts.gate_up_bias)

    def matrix(weight: Tensor, bias: Tensor | None, *, gated: bool) -> NativeMatrix:
        return NativeMatrix(code, in_bfloat16(weight), weight.dtype, bias=bias, gated=gated)

    return NativeExperts(
        code,
        [matrix(apart(each[None])[0], bias_of(up_bias, i), gated=True) for i, each in enumerate(gate_up)],
        [matrix(each, bias_of(experts.down_bias, i), gated=False) for i, each in enumerate(down)],
    )


def apart(by_turns: Tensor) -> Tensor:
    """[E, 2 * I, ...], gate and up by turns -> all gates before all ups."""
    return torch.cat((by_turns[:, 0::2], by_turns[:, 1::2]), 1)


def bias_of(biases: Tensor | None, expert: int) -> Tensor | None:
    return None if biases is None else biases[expert]
