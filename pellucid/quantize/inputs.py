"""What a linear layer, or an expert, is fed: statistics of its inputs, gathered while samples run through it.

Legend: T tokens, K inputs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from pellucid.layers.experts import Chosen, Experts
from pellucid.layers.linear import Linear

MOST_ROWS = 512  # that are kept as they are, of all samples together
ROWS_OF_CHUNK = 128
SQUARES_BYTES = 8 << 30


@dataclass(slots=True)
class Inputs:
    """Of one linear layer."""

    count: int = 0  # tokens
    sum_abs: Tensor | None = None  # [K]
    max_abs: Tensor | None = None  # [K]
    squares: Tensor | None = None  # [K, K], X^T X, if it is asked for
    kept: list[Tensor] = field(default_factory=list)  # some rows, for measuring errors

    def see(self, x: Tensor, *, squares: bool) -> None:
        """x: [T, K]."""
        x = x.detach().reshape(-1, x.shape[-1]).float()
        self.count += len(x)
        total, largest = x.abs().sum(0), x.abs().amax(0)
        self.sum_abs = total if self.sum_abs is None else self.sum_abs + total
        self.max_abs = largest if self.max_abs is None else torch.maximum(self.max_abs, largest)
        if squares:
            if self.squares is None:
                self.squares = torch.zeros(x.shape[1], x.shape[1], device=x.device)
            self.squares.addmm_(x.T, x)
        room = min(ROWS_OF_CHUNK, MOST_ROWS - sum(map(len, self.kept)))
        if room > 0:
            self.kept.append(x[:: max(1, -(-len(x) // room))].clone())


class Statistics:
    """The same for good: no more is seen."""

    def __init__(self, inputs: Inputs) -> None:
        assert inputs.sum_abs is not None and inputs.max_abs is not None, "nothing was seen"
        self.mean_abs, self.max_abs = inputs.sum_abs / inputs.count, inputs.max_abs
        self.rows = torch.cat(inputs.kept)
        self._squares, self._count = inputs.squares, inputs.count

    @cached_property
    def hessian(self) -> Tensor:
        """Of an output's squared error by its weights, [K, K]: the mean of x x^T (and not twice that)."""
        assert self._squares is not None, "the method did not ask for it"
        return self._squares / self._count

    def divided(self, scale: Tensor) -> Statistics:
        """Of inputs that are divided by scale [K]."""
        new = object.__new__(Statistics)
        new.mean_abs, new.max_abs, new.rows = self.mean_abs / scale, self.max_abs / scale, self.rows / scale
        new._count = self._count
        new._squares = None if self._squares is None else self._squares / scale[:, None] / scale
        return new

    def error(self, plain: Tensor, quantized: Tensor) -> float:
        """Of the outputs of one matrix [N, K] in the place of another: relative, root of mean squares."""
        wanted = self.rows @ plain.T
        lost = self.rows @ (quantized - plain).T
        return float(lost.square().sum().sqrt() / wanted.square().sum().sqrt().clamp_min(1e-30))


def see_experts(
    seen: dict[Hashable, Inputs], mixture: Experts, x: Tensor, chosen: Chosen, *, squares: bool
) -> None:
    """Each expert's tokens, of x [T, D], and what its gates let through.

    Where products of pairs of inputs, one for each expert, would not fit, experts share those of all tokens.
    """
    shares = squares and 4 * len(mixture.matrix("down")) * x.shape[1] ** 2 > SQUARES_BYTES
    common = seen.setdefault((mixture, None, "gate_up"), Inputs())
    if shares:
        common.see(x, squares=True)
    for expert, inputs, hidden in mixture.fed(x, chosen):
        if shares:
            seen[mixture, expert, "gate_up"] = common
        else:
            seen.setdefault((mixture, expert, "gate_up"), Inputs()).see(inputs, squares=squares)
        seen.setdefault((mixture, expert, "down"), Inputs()).see(hidden, squares=squares)


@contextmanager
def watched(module: nn.Module, *, squares: bool) -> Iterator[dict[Hashable, Inputs]]:
    """While this lasts, all linear layers and experts below `module` note what they are fed.

    Experts are known as (their mixture, number, "gate_up" or "down").
    """
    seen: dict[Hashable, Inputs] = {}

    def watch(layer: Linear | Experts) -> torch.utils.hooks.RemovableHandle:
        if isinstance(layer, Experts):

            def chose(_: nn.Module, args: tuple[Tensor, ...], chosen: Chosen) -> None:
                see_experts(seen, layer, args[0], chosen, squares=squares)

            return layer.router.register_forward_hook(chose)
        inputs = seen[layer] = Inputs()
        return layer.register_forward_pre_hook(lambda _, args: inputs.see(args[0], squares=squares))

    hooks = [watch(layer) for layer in module.modules() if isinstance(layer, Linear | Experts)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
