"""Recorded steps: the replays of each shape of a lattice, and which of them has room for a step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Generic, Protocol, TypeVar

import numpy as np

from pellucid.features.worker import NO_RIDERS, Riders
from pellucid.forward import TileMaps
from pellucid.graphs.shapes import StepShape
from pellucid.graphs.static_rows import StaticRows
from pellucid.rows import StepRows
from pellucid.worker.inputs import StepCounts

T = TypeVar("T")
B = TypeVar("B")  # what a step's first half hands to its second
Y = TypeVar("Y")  # what a step yields, on the device
Run = Callable[[], T]


class Recorder(Protocol):
    """Turns what launches kernels on memory that stays in its place into its replay."""

    def __call__(self, run: Run[T]) -> Run[T]: ...


class Step(Protocol[B, Y]):
    """The device's part of a step, in two halves: device_step.py."""

    def begin(self, rows: StepRows, tiles: TileMaps | None = None) -> B:
        """Up to the forward's end.  tiles: of a forward that is recorded for any chunks."""
        ...

    def finish(self, rows: StepRows, begun: B) -> Y:
        """What follows."""
        ...

    def among(self, yielded: Y, places: np.ndarray) -> Y:
        """What rows have yielded that are at these places, between padding."""
        ...

    def alone(self, rows: StepRows, begun: B) -> B:
        """What `begin` gives for these rows, from what it gave for them among padding."""
        ...

    def num_bytes(self, begun: B) -> int:
        """That are kept from one half to the other."""
        ...


class Recording(Generic[B, Y]):
    """The replays of a step of one shape: the whole, and perhaps its forward and then the rest.

    Nothing in it refers to itself: a graph that the garbage collector lets go spoils the one being recorded.
    """

    def __init__(
        self, rows: StaticRows, record: Recorder, step: Step[B, Y], forward: Riders = NO_RIDERS
    ) -> None:
        """forward: those that change what the forward sees."""
        self.rows, self._record, self._step, self._forward = rows, record, step, forward
        self._whole: Run[Y] | None = None
        self._first: Run[B] | None = None
        self._rest: Run[Y] | None = None  # behind `first`
        self.begun: list[B] = []  # what the last replay of a forward has begun
        if rows.shape.samples_all:
            view = rows.view(riders=forward)
            self._whole = record(lambda: step.finish(view, step.begin(view, rows.tiles)))
        else:
            self.record_halves()

    def record_halves(self, riders: Riders | None = None) -> None:
        """riders: what the second half is to have beside tokens."""
        rows, step = self.rows, self._step
        view = rows.view(riders=self._forward)
        with_riders = view if riders is None else rows.view(riders=riders)
        self._first = self._record(lambda: step.begin(view, rows.tiles))
        self.first()
        self._rest = self._record(lambda: step.finish(with_riders, self.begun[0]))

    @property
    def has_halves(self) -> bool:
        return self._first is not None

    def first(self) -> None:
        """The forward of the rows that have been loaded."""
        assert self._first is not None, f"{self.rows.shape} is recorded whole"
        self.begun = [self._first()]

    def rest(self) -> Y:
        """What follows it."""
        assert self._rest is not None, f"{self.rows.shape} is recorded whole"
        return self._rest()

    def whole(self) -> Y:
        """All of the step."""
        if self._whole is not None:
            return self._whole()
        self.first()
        return self.rest()


class Recordings(Generic[B, Y]):
    """Of a lattice of shapes, the smallest one first."""

    def __init__(self, recordings: Mapping[StepShape, Recording[B, Y]]) -> None:
        self._recordings = dict(recordings)
        # Of decodes and verifications alone, and for steps with chunks.
        self._sampling = sorted(shape for shape in recordings if shape.samples_all)
        self._chunked = sorted(shape for shape in recordings if not shape.samples_all)

    def __getitem__(self, shape: StepShape) -> Recording[B, Y]:
        return self._recordings[shape]

    def find(self, counts: StepCounts, *, by_halves: bool) -> Recording[B, Y] | None:
        """The smallest one with room for the step; None: there is none."""
        shapes = self._chunked if counts.has_chunks else self._sampling
        least = bisect_left(shapes, (counts.num_tokens,))
        fits = (self._recordings[shape] for shape in islice(shapes, least, None) if has_room(shape, counts))
        if counts.has_chunks:  # as many short rows as may be, for they are attended to as such
            return min(fits, key=lambda recording: order(recording.rows, counts), default=None)
        return next((found for found in fits if found.has_halves or not by_halves), None)


def has_room(shape: StepShape, counts: StepCounts) -> bool:
    """Is there a place for each row, token and logit, and do drafts follow if they are wanted?"""
    num_short = min(counts.num_leading(shape.max_query), shape.num_short)
    return (
        counts.num_tokens <= shape.num_tokens
        and counts.num_rows - num_short <= shape.num_chunks
        and counts.num_logits <= shape.num_logits
        and (shape.max_keys is None or counts.num_keys(num_short) <= shape.max_keys)
        and counts.num_propose < shape.max_query
    )


def order(rows: StaticRows, counts: StepCounts) -> tuple[int, int, StepShape]:
    return rows.shape.num_tokens, -rows.num_short(counts), rows.shape
