"""A parameter that knows its names in the checkpoint and where their tensors go.  It reads no file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn

from pellucid.quant.base import CodesPlace, Coords, KnowsWhole, ParamSpec

if TYPE_CHECKING:
    from pellucid.quant.codes import Codes


class Weight(nn.Parameter):
    """An `nn.Parameter` made from a `ParamSpec`: no memory until allocated, then garbage until filled."""

    spec: ParamSpec
    sources: tuple[str, ...]  # the checkpoint's tensors, one for each merged part; a name may come again
    coords: tuple[Coords, ...]  # this rank's slice of each

    @classmethod
    def of(
        cls, spec: ParamSpec, sources: tuple[str, ...], coords: tuple[Coords, ...], device: torch.device
    ) -> Self:
        """A weight for `sources`, with one slice of `coords` for each."""
        assert len(sources) == len(coords), (sources, coords)
        weight = cls(torch.empty((), dtype=spec.dtype, device=device).expand(spec.shape), requires_grad=False)
        weight.spec, weight.sources, weight.coords = spec, sources, coords
        return weight

    def parts(self) -> dict[str, list[int]]:
        """The number of the part that each of `sources` fills, or of several."""
        parts: dict[str, list[int]] = {}
        for part, name in enumerate(self.sources):
            parts.setdefault(name, []).append(part)
        return parts

    def allocate(self) -> None:
        """Give it memory of its own."""
        self.data = torch.empty(self.spec.shape, dtype=self.dtype, device=self.device)

    @property
    def keeps_codes(self) -> bool:
        """Whether a quantized matrix is not decoded for it."""
        return isinstance(self.spec.place, CodesPlace)

    def whole_shape(self, part: int) -> tuple[int, ...]:
        """Of the checkpoint's matrix `sources[part]`, of which this rank has a slice."""
        assert isinstance(self.spec.place, KnowsWhole), self.sources
        return self.spec.place.whole(self.spec.shape, part, self.coords[part])

    def check(self, part: int, shape: tuple[int, ...]) -> None:
        """Raise ValueError if a tensor of this shape cannot be `sources[part]`."""
        nowhere = torch.device("meta")
        param = torch.empty(self.spec.shape, dtype=self.dtype, device=nowhere)
        self.spec.place(param, part, torch.empty(shape, device=nowhere), self.coords[part])

    @torch.no_grad()
    def load(self, part: int, tensor: Tensor | Codes) -> None:
        """Copy the checkpoint's tensor `sources[part]` to its place.  Raises ValueError for a wrong shape.

        Codes are for a weight that keeps them.
        """
        if isinstance(tensor, Tensor):
            self.spec.place(self.data, part, tensor, self.coords[part])
        else:
            assert isinstance(self.spec.place, CodesPlace), self.sources
            self.spec.place.keep(self.data, part, tensor, self.coords[part])

    @torch.no_grad()
    def fill(self, generator: torch.Generator) -> None:
        """Fill with random numbers that look like a model's, on the device."""
        if self.spec.default is not None:
            self.fill_(self.spec.default)
            return
        if self.dtype == torch.float8_e4m3fn:
            self.copy_(torch.empty(self.shape, device=self.device).normal_(0, 1, generator=generator))
            return
        match self.spec.fill:
            case "normal":
                self.normal_(0, 0.02, generator=generator)
            case "near_one":
                self.normal_(1, 0.02, generator=generator)
            case "one":
                self.fill_(1)
            case "bits":
                info = torch.iinfo(self.dtype)
                self.random_(info.min, info.max, generator=generator)


@runtime_checkable
class Finishing(Protocol):
    """A layer that repacks its weights once they are loaded."""

    def finish(self) -> None: ...
