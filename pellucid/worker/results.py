"""From the device back to the host: one packed copy a step, and nothing else ever.

`ResultReader.begin` starts the copy behind the step's work; the `PendingResult` waits for it, and unpacks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pellucid.executor.base import Pending
from pellucid.features.base import Home
from pellucid.kernels.compile.compilations import LateCompilations
from pellucid.sample.output import SampleOutput
from pellucid.schedule.plan import StepResult, ints
from pellucid.types import STUCK
from pellucid.worker.inputs import StepCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A step's yield as one row of 32-bit integers, on the device.  It may have more rows than the step."""

    flat: Tensor  # [N] int32
    shapes: tuple[tuple[int, ...], ...]  # of the parts: tokens, num_new, what features bring, is_stuck
    homes: Mapping[str, Home] = field(default_factory=dict)  # what features bring, by name
    has_stuck: bool = False
    places: np.ndarray | None = None  # of the step's rows among those of the parts; None: the first ones
    feedback: Tensor | None = None  # [B, ...], for the other stages of a pipeline: feedback.py


def pack(output: SampleOutput, homes: Mapping[str, Home | None], feedback: Tensor | None = None) -> Packed:
    """All that the host will want, side by side.  homes: of features, by name."""
    bringing = {name: home for name, home in homes.items() if home is not None}
    stuck = [] if output.is_stuck is None else [output.is_stuck]
    brought = chain.from_iterable(home.tensors for home in bringing.values())
    tensors = [output.tokens, output.num_new, *brought, *stuck]
    flat = output.flat if len(tensors) == 2 else None
    return Packed(
        flat=torch.cat([_as_int32(tensor).flatten() for tensor in tensors]) if flat is None else flat,
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        homes=bringing,
        has_stuck=output.is_stuck is not None,
        feedback=feedback,
    )


class EmptyResult:
    """Of a plan without rows, or on a rank that does not report."""

    def __init__(self, plan_id: int) -> None:
        self.plan_id = plan_id

    def wait(self) -> None:
        """Nothing is on its way."""

    def result(self) -> StepResult:
        return StepResult(plan_id=self.plan_id)


class Reader(Protocol):
    """Where a step's yield goes."""

    def begin(self, plan_id: int, counts: StepCounts, packed: Packed) -> Pending: ...


class NoReader:
    """Nowhere: another rank samples the same, and reports."""

    def begin(self, plan_id: int, counts: StepCounts, packed: Packed) -> Pending:
        return EmptyResult(plan_id)


class Copy(Protocol):
    """A step's yield on its way."""

    def wait(self) -> None:
        """Until it is here."""
        ...

    def read(self) -> np.ndarray:
        """[N] int32, waited for if need be.  May be asked again: after Ctrl-C."""
        ...


class NoCopy:
    """It was made on the host."""

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat

    def wait(self) -> None:
        """It is here."""

    def read(self) -> np.ndarray:
        return self._flat.numpy()


class HostBuffer:
    """Pinned memory for one step's yield, and the event that says it has arrived."""

    def __init__(self, size: int) -> None:
        self._ints = torch.empty(size, dtype=torch.int32, pin_memory=True)
        self._array = self._ints.numpy()
        self._part = self._ints  # for as many as came last: seldom another number
        # Not torch.cuda.Event, which looks for the current stream in Python.
        self._arrived = torch.Event("cuda", enable_timing=False)
        self._is_here = False

    def __len__(self) -> int:
        return len(self._array)

    def fill(self, flat: Tensor) -> None:
        """Start a copy of [N] int32 from the device, in stream order."""
        size, self._is_here = flat.numel(), False
        if self._part.numel() != size:
            self._part = self._ints[:size]
        self._part.copy_(flat, non_blocking=True)
        self._arrived.record()

    def wait(self) -> None:
        """Until what `fill` was given has come."""
        if not self._is_here:
            self._arrived.synchronize()
            self._is_here = True

    def read(self) -> np.ndarray:
        """What has come; the buffer may then be filled again."""
        self.wait()
        return self._array[: self._part.numel()].copy()


class BufferedCopy:
    """On its way into a buffer, which is free behind it."""

    def __init__(self, buffer: HostBuffer, free: list[HostBuffer]) -> None:
        self._buffer, self._free = buffer, free
        self._array: np.ndarray | None = None

    def wait(self) -> None:
        if self._array is None:
            self._buffer.wait()

    def read(self) -> np.ndarray:
        if self._array is None:
            self._array = self._buffer.read()
            self._free.append(self._buffer)  # interrupted before this it is lost, but never shared
        return self._array


class ResultReader:
    """Copies results into pinned buffers, which go round: one for each plan under way."""

    def __init__(self, late: LateCompilations) -> None:
        self._late = late
        self._free: list[HostBuffer] = []

    def begin(self, plan_id: int, counts: StepCounts, packed: Packed) -> PendingResult:
        """Start the copy, in stream order."""
        copy = self._copy(packed.flat) if packed.flat.is_cuda else NoCopy(packed.flat)
        return PendingResult(plan_id, counts, packed, copy, self._late)

    def _copy(self, flat: Tensor) -> BufferedCopy:
        size = flat.numel()
        buffer = self._free.pop() if self._free else HostBuffer(size)
        if len(buffer) < size:
            buffer = HostBuffer(size)
        buffer.fill(flat)
        return BufferedCopy(buffer, self._free)


class PendingResult:
    """One step's copy under way."""

    def __init__(
        self, plan_id: int, counts: StepCounts, packed: Packed, copy: Copy, late: LateCompilations
    ) -> None:
        self.plan_id, self._counts, self._packed, self._copy = plan_id, counts, packed, copy
        self._late = late

    def wait(self) -> None:
        self._copy.wait()

    def result(self) -> StepResult:
        """Unpack the copy."""
        packed, flat = self._packed, self._copy.read()
        num_rows, most_new = packed.shapes[0]
        size = num_rows * most_new
        places = slice(self._counts.num_rows) if packed.places is None else packed.places
        tokens = flat[:size].reshape(num_rows, most_new)[places]
        num_new = flat[size : size + num_rows][places]
        told, failed = dict[str, object](), dict[int, str]()
        if len(packed.shapes) > 2:
            arrays = _unpack(flat[size + num_rows :], packed.shapes[2:])
            told, failed = self._read(num_new, arrays)
        return StepResult(
            plan_id=self.plan_id,
            token_ids=ints(tokens.tobytes()),
            num_new=ints(num_new.tobytes()),
            told=told,
            failed=failed,
            num_late_compilations=self._late.num,
        )

    def _read(
        self, num_new: np.ndarray, arrays: list[np.ndarray]
    ) -> tuple[dict[str, object], dict[int, str]]:
        """What features are told, and which rows have failed.  arrays: behind tokens and their numbers."""
        told, failed = dict[str, object](), dict[int, str]()
        if self._packed.has_stuck:
            is_stuck = arrays.pop()
            is_new = np.arange(is_stuck.shape[1]) < num_new[:, None]
            rows = np.flatnonzero((is_stuck[: len(num_new)] & is_new).any(1)).tolist()
            failed.update(dict.fromkeys(rows, STUCK))
        left = iter(arrays)
        for name, home in self._packed.homes.items():
            own = [next(left) for _ in home.tensors]
            said = home.read(self._counts, num_new, own, failed)
            if said is not None:
                told[name] = said
        return told, failed


def _unpack(flat: np.ndarray, shapes: tuple[tuple[int, ...], ...]) -> list[np.ndarray]:
    start, arrays = 0, []
    for shape in shapes:
        size = math.prod(shape)
        arrays.append(flat[start : start + size].reshape(shape))
        start += size
    return arrays


def _as_int32(tensor: Tensor) -> Tensor:
    """The same 32 bits as integers; counts and ids of 64 bits fit, too."""
    return tensor.view(torch.int32) if tensor.dtype == torch.float32 else tensor.to(torch.int32)
