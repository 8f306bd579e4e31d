"""From the device back to the host: one packed copy a step, and nothing else ever.

`ResultReader.begin` starts the copy behind the step's work; the `PendingResult` waits for it, and unpacks.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pellucid.executor.base import Pending
from pellucid.kernels.compilations import LateCompilations
from pellucid.sample.output import LogprobTensors, SampleOutput
from pellucid.schedule.plan import Extras, StepResult, ints
from pellucid.transfer import upload
from pellucid.types import TokenLogprobs
from pellucid.worker.inputs import StepCounts

logger = logging.getLogger(__name__)
STUCK = (
    "no token is left that may come next: allowed_token_ids, bad_words, min_tokens and the grammar, as far "
    "as the request has them, together rule out all; loosen one of them"
)


@dataclass(frozen=True, slots=True)
class Asked:
    """How many of the most likely tokens each row wants to know, on the host; -1: not even the chosen."""

    logprobs: np.ndarray  # [B], of tokens that this step yields
    prompt_logprobs: np.ndarray  # [B], of scored ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A step's yield as one row of 32-bit integers, on the device.  It may have more rows than the step."""

    flat: Tensor  # [N] int32
    # Of the parts: tokens, num_new, drafts, logprobs (3) of the rows that ask, scores (3), is_stuck.
    shapes: tuple[tuple[int, ...], ...]
    has_drafts: bool
    has_logprobs: bool
    has_scores: bool
    has_stuck: bool = False
    asked: Asked | None = None  # if there are logprobs or scores
    places: np.ndarray | None = None  # of the step's rows among those of the parts; None: the first ones
    feedback: Tensor | None = None  # [B, ...], for the other stages of a pipeline: feedback.py


def pack(
    output: SampleOutput,
    drafts: Tensor,
    scores: LogprobTensors | None,
    feedback: Tensor | None = None,
    *,
    asked: Asked | None = None,
) -> Packed:
    """All that the host will want, side by side.  drafts: [B, k], a chain; of trees none."""
    has_drafts = drafts.shape[1] > 0
    own = [output.tokens, output.num_new, *([drafts] if has_drafts else [])]
    stuck = [] if output.is_stuck is None else [output.is_stuck]
    tensors = [*own, *_parts(_of_askers(output.logprobs, asked)), *_parts(scores), *stuck]
    flat = output.flat if len(tensors) == 2 else None
    return Packed(
        flat=torch.cat([_as_int32(tensor).flatten() for tensor in tensors]) if flat is None else flat,
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        has_drafts=has_drafts,
        has_logprobs=output.logprobs is not None,
        has_scores=scores is not None,
        has_stuck=output.is_stuck is not None,
        asked=asked,
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
        extras = None
        if len(packed.shapes) > 2:
            extras = self._extras(num_new, _unpack(flat[size + num_rows :], packed.shapes[2:]))
        return StepResult(
            plan_id=self.plan_id,
            token_ids=ints(tokens.tobytes()),
            num_new=ints(num_new.tobytes()),
            extras=extras,
            num_late_compilations=self._late.num,
        )

    def _extras(self, num_new: np.ndarray, rest: list[np.ndarray]) -> Extras:
        """rest: what lies behind tokens and their numbers."""
        packed, extras = self._packed, Extras()
        if packed.has_stuck:
            *rest, is_stuck = rest
            is_new = np.arange(is_stuck.shape[1]) < num_new[:, None]
            rows = np.flatnonzero((is_stuck[: len(num_new)] & is_new).any(1)).tolist()
            extras.failed.update(dict.fromkeys(rows, STUCK))
        if packed.has_drafts:
            drafts, *rest = rest
            rows = [row for row in self._counts.host_bound if num_new[row]]
            extras.drafts.update({row: drafts[row].tolist() for row in rows})
        if packed.has_logprobs:
            self._add_logprobs(extras, rest[:3], num_new)
        if packed.has_scores:
            self._add_scores(extras, rest[-3:])
        return extras

    def _add_logprobs(self, extras: Extras, arrays: list[np.ndarray], num_new: np.ndarray) -> None:
        """arrays: of the rows that ask."""
        asked = self._asked.logprobs
        for place, row in enumerate(np.flatnonzero(asked >= 0).tolist()):
            if num_new[row]:
                parts = [array[place, : num_new[row]] for array in arrays]
                _tell(extras, extras.logprobs, row, parts, asked[row])

    def _add_scores(self, extras: Extras, arrays: list[np.ndarray]) -> None:
        """arrays: of all scored places, row by row."""
        num_scores, asked = self._counts.num_scores, self._asked.prompt_logprobs
        ends = np.cumsum(num_scores)
        for row in np.flatnonzero(num_scores).tolist():
            parts = [array[ends[row] - num_scores[row] : ends[row]] for array in arrays]
            _tell(extras, extras.prompt_logprobs, row, parts, asked[row])

    @property
    def _asked(self) -> Asked:
        assert self._packed.asked is not None, "logprobs that nobody has asked for"
        return self._packed.asked


def _unpack(flat: np.ndarray, shapes: tuple[tuple[int, ...], ...]) -> list[np.ndarray]:
    start, arrays = 0, []
    for shape in shapes:
        size = math.prod(shape)
        arrays.append(flat[start : start + size].reshape(shape))
        start += size
    return arrays


def _parts(logprobs: LogprobTensors | None) -> list[Tensor]:
    return [] if logprobs is None else [logprobs.token_ids, logprobs.logprobs, logprobs.ranks]


def _as_int32(tensor: Tensor) -> Tensor:
    """The same 32 bits as integers; counts and ids of 64 bits fit, too."""
    return tensor.view(torch.int32) if tensor.dtype == torch.float32 else tensor.to(torch.int32)


def _of_askers(logprobs: LogprobTensors | None, asked: Asked | None) -> LogprobTensors | None:
    """Logprobs [B, ...] of the rows that ask for some; others' are not worth their way."""
    if logprobs is None or asked is None or (asked.logprobs >= 0).all():
        return logprobs
    return logprobs.take(upload(np.flatnonzero(asked.logprobs >= 0), logprobs.ranks.device))


def _tell(
    extras: Extras, into: dict[int, list[TokenLogprobs]], row: int, arrays: list[np.ndarray], num_top: int
) -> None:
    """Make a row's entries; if that fails, no other row does."""
    try:
        into[row] = entries_of(*arrays, num_top=num_top)
    except Exception as error:
        logger.exception("the logprobs of row %d cannot be told", row)
        extras.failed[row] = f"its logprobs cannot be told: {type(error).__name__}: {error}"


def entries_of(ids: np.ndarray, bits: np.ndarray, ranks: np.ndarray, *, num_top: int) -> list[TokenLogprobs]:
    """Logprob arrays [K, n + 1], [K, n + 1] and [K] as K entries, of the chosen token and num_top others."""
    ids, bits = ids[:, : 1 + num_top], bits[:, : 1 + num_top]
    columns = ids.tolist(), bits.view(np.float32).tolist(), ranks.tolist()
    return [TokenLogprobs(*entry) for entry in zip(*columns, strict=True)]
