"""Launching steps in step with other engines: all replay a recording of as many tokens, or none does.

A step that some engine cannot replay (it has prompt chunks, say) all launch kernel by kernel, and pad what
they send to each other to the most tokens that one of them has.  Who has no work runs the layers of experts
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

import torch
from torch import nn

from pellucid.graphs.launch import Launcher
from pellucid.graphs.recordings import Recorder, Run
from pellucid.graphs.shapes import StepShape
from pellucid.layers.experts import Experts
from pellucid.lockstep.pace import NOTHING, Need, Pace
from pellucid.worker.inputs import Common, StepCounts

Y = TypeVar("Y")


class Lends(Protocol):
    """A layer of experts that serve other engines' tokens, too."""

    def lend(self, num_tokens: int) -> None:
        """Do that, without tokens of one's own.  num_tokens: of each other engine."""
        ...


class LockstepLauncher(Generic[Y]):
    """`begin` and `__call__` wait for the other engines; nothing else does."""

    def __init__(
        self,
        inner: Launcher[Y],
        shapes: Iterable[StepShape],
        layers: Sequence[Lends],
        pace: Pace,
        make_recorder: Callable[[], Recorder],
    ) -> None:
        """shapes: that `inner` has recorded, of decodes and verifications.  layers: in their order."""
        self.inner, self.pace, pace.follow = inner, pace, self.attend
        self._shapes, self._layers = sorted(shapes), layers
        self._make_recorder = make_recorder
        self._empty: dict[int, Run[None]] = {}  # recorded, by tokens

    def __call__(self, counts: StepCounts) -> Y:
        return self.inner(self._in_step(counts))

    def begin(self, counts: StepCounts) -> Callable[[], Y]:
        return self.inner.begin(self._in_step(counts))

    def attend(self) -> None:
        """Take part in a step that others have begun."""
        common = self._common(self.pace.agree(NOTHING))
        if common.shape is None:
            self._lend(common.num_tokens)
        else:
            self._empty[common.num_tokens]()

    def measure(self) -> int:
        return self.inner.measure()

    def capture(self) -> None:
        """Also the steps of an engine without work: all engines record all alike."""
        self.inner.capture()
        if self._shapes:
            with torch.inference_mode():
                record = self._make_recorder()
                sizes = sorted({shape.num_tokens for shape in self._shapes}, reverse=True)
                self._empty = {size: record(lambda size=size: self._lend(size)) for size in sizes}

    def forget(self) -> None:
        self._empty.clear()
        self.inner.forget()

    def _lend(self, num_tokens: int) -> None:
        with torch.inference_mode():
            for layer in self._layers:
                layer.lend(num_tokens)

    def _in_step(self, counts: StepCounts) -> StepCounts:
        if not self.pace.is_kept:  # all engines go through the same steps as they start
            return counts
        return replace(counts, common=self._common(self.pace.agree(need_of(counts))))

    def _common(self, need: Need) -> Common:
        fits = (shape for shape in self._shapes if has_room(shape, need))
        shape = None if need.is_eager else next(fits, None)
        return Common(need.num_tokens if shape is None else shape.num_tokens, shape)


def spread_layers(model: object, num_engines: int) -> list[Experts]:
    """The layers whose experts engines divide, in their order.

    Raises ValueError if engines are to divide experts, and there are none.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    layers = [each for each in modules if isinstance(each, Experts) and each.spread is not None]
    if num_engines > 1 and not layers:
        raise ValueError(
            f"enable_expert_parallel has {num_engines} engines divide the model's experts, of which it has "
            "none; leave it out"
        )
    return layers


def need_of(counts: StepCounts) -> Need:
    """What a step takes room for."""
    return Need(
        counts.num_tokens,
        counts.num_rows,
        max(counts.max_query, 2 if counts.num_propose else 1),
        int(counts.has_chunks or counts.any_scores),
    )


def has_room(shape: StepShape, need: Need) -> bool:
    """Is there a place for each row and token, and do drafts follow if they are wanted?"""
    return (
        need.num_tokens <= shape.num_tokens
        and need.num_rows <= shape.num_short + shape.num_chunks
        and need.max_query <= shape.max_query
    )
