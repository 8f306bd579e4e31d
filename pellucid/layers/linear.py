"""Linear layers, merged ones included: a `LinearMethod` says how they are stored and multiplied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from pellucid.forward import ForwardInput
from pellucid.kernels.products.round_rows import Rounded, Rounding
from pellucid.layers.weight import Weight
from pellucid.lora.bank import LoraBank
from pellucid.quant.base import Gates, LinearMethod, LinearShape, TakesRounded, Widens, choose_product


class Linear(nn.Module):
    """y = x W^T + bias, on this rank's slice of W, into which several matrices may be merged."""

    def __init__(
        self,
        shape: LinearShape,
        method: LinearMethod,
        weights: dict[str, Weight],
        bias: Weight | None = None,
        lora: LoraBank | None = None,
    ) -> None:
        """lora: what tokens' adapters add; None: there are never any."""
        super().__init__()
        self.lora, self._is_widened = lora, False
        self.shape = shape
        self.method = method
        self.gates = method if isinstance(method, Gates) else None  # asked once: protocols answer slowly
        for name, weight in weights.items():
            self.register_parameter(name, weight)
        self.bias = bias
        self.product = choose_product(method, shape, next(iter(weights.values())).device)

    def param(self, name: str) -> Tensor:
        parameter = self._parameters[name]
        assert parameter is not None, name
        return parameter

    def replace(self, name: str, value: Tensor | None) -> None:
        self._parameters[name] = None if value is None else nn.Parameter(value, requires_grad=False)

    def finish(self) -> None:
        self.method.finish(self)
        if self.lora is not None:
            num_rows = self.lora.num_wide_rows
            rows = self.method.widen(self, num_rows) if num_rows and isinstance(self.method, Widens) else None
            self.lora.make_room(rows)
            self._is_widened = rows is not None

    @property
    def rounding(self) -> Callable[[], Rounding] | None:
        """How rows may be rounded to bytes already, known once weights are loaded; None: they may not.

        Adapters take them as they were.
        """
        if (
            self.lora is None
            and isinstance(self.method, TakesRounded)
            and self.method.takes_rounded(self.shape)
        ):
            return self.method.rounding
        return None

    def forward(self, x: Tensor | Rounded, fwd: ForwardInput | None = None) -> Tensor:
        """x [T, in_features] -> [T, out_features]."""
        if isinstance(x, Rounded):
            assert isinstance(self.method, TakesRounded), self.method
            return self.method.apply_rounded(self, x)
        adapters = None if self.lora is None or fwd is None else fwd.adapters_of(x)
        if self.lora is None or adapters is None:
            return self.method.apply(self, x, fwd)
        if not self._widens(self.lora, x):
            y = self.method.apply(self, x, fwd)
            self.lora.add(y, x, adapters)
            return y
        y, shrunk = self._apply_widened(x)
        return self.lora.added(y, shrunk, adapters)

    def _widens(self, lora: LoraBank, x: Tensor) -> bool:
        """Whether one product multiplies by the layer's matrix and the A of all adapters."""
        return self._is_widened and lora.takes_wide(x)

    def _apply_widened(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, out_features] and what all adapters' A make of x; neither is contiguous."""
        assert isinstance(self.method, Widens), self.method
        y, num_out = self.method.apply_widened(self, x), self.shape.out_features
        return y[:, :num_out], y[:, num_out:]

    def adapted(self, x: Tensor, adapters: Tensor) -> Tensor:
        """The same of a layer that is not given the step.  adapters: [T], the place of each row's, or -1."""
        y = self(x)
        if self.lora is not None:
            self.lora.add(y, x, adapters)
        return y

    def gated(self, x: Tensor | Rounded, act: str, fwd: ForwardInput) -> Tensor | None:
        """act(gate) * up of this layer's [gate | up], or None where that takes a pass of its own.

        For rounded rows it does: that pass rounds what it lets through for all programs of the next product.
        """
        if isinstance(x, Rounded):
            return None
        adapters = None if self.lora is None else fwd.adapters_of(x)
        if self.lora is not None and adapters is not None:
            if self._widens(self.lora, x):
                y, shrunk = self._apply_widened(x)
                return self.lora.gated(y, shrunk, adapters, act)
            return None
        return None if self.gates is None else self.gates.apply_gated(self, x, act)


class Unmerged(nn.Module):
    """Matrices that a scheme refused to merge, applied one by one; their outputs stand side by side."""

    rounding = None  # they are not stored alike

    def __init__(self, parts: Sequence[Linear]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor, fwd: ForwardInput | None = None) -> Tensor:
        return torch.cat([part(x, fwd) for part in self.parts], dim=-1)

    def adapted(self, x: Tensor, adapters: Tensor) -> Tensor:
        return torch.cat([cast("Linear", part).adapted(x, adapters) for part in self.parts], dim=-1)

    def gated(self, x: Tensor | Rounded, act: str, fwd: ForwardInput) -> None:
        """Gate and up are two products."""
