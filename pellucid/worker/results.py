"""From the device back to the host: one packed copy a step, and nothing else ever.

A `PendingResult` starts the copy behind the step's work; its `result` waits for it and unpacks.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pellucid.sample.output import LogprobTensors, SampleOutput
from pellucid.schedule.plan import StepResult
from pellucid.types import TokenLogprobs
from pellucid.worker.inputs import StepInput


class PendingResult:
    """One step's copy under way."""

    def __init__(
        self, plan_id: int, step: StepInput, output: SampleOutput, scores: LogprobTensors | None
    ) -> None:
        self.plan_id, self.step = plan_id, step
        tensors = [output.tokens, output.num_new, *_parts(output.logprobs), *_parts(scores)]
        self.has_logprobs, self.has_scores = output.logprobs is not None, scores is not None
        self.shapes = [tuple(t.shape) for t in tensors]
        packed = torch.cat([_as_int32(t).flatten() for t in tensors])
        self.event: torch.cuda.Event | None = None
        if packed.is_cuda:
            self.packed = torch.empty(packed.shape, dtype=torch.int32, pin_memory=True)
            self.packed.copy_(packed, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()
        else:
            self.packed = packed

    def result(self) -> StepResult:
        """Wait for the copy, and unpack it."""
        if self.event is not None:
            self.event.synchronize()
        tokens, num_new, *rest = self._unpack()
        counts = num_new.tolist()
        new_tokens = [row[:count] for row, count in zip(tokens.tolist(), counts, strict=True)]
        result = StepResult(plan_id=self.plan_id, tokens=new_tokens)
        if self.has_logprobs:
            entries = _entries(rest[:3])
            result.logprobs.update({row: entries[row][:count] for row, count in enumerate(counts) if count})
        if self.has_scores:
            (entries,) = _entries([array[None] for array in rest[-3:]])
            ends = np.cumsum(self.step.num_scores)
            for row in np.flatnonzero(self.step.num_scores).tolist():
                result.prompt_logprobs[row] = entries[ends[row] - self.step.num_scores[row] : ends[row]]
        return result

    def _unpack(self) -> list[np.ndarray]:
        flat, start, arrays = self.packed.numpy(), 0, []
        for shape in self.shapes:
            size = int(np.prod(shape))
            arrays.append(flat[start : start + size].reshape(shape))
            start += size
        return arrays


def _parts(logprobs: LogprobTensors | None) -> list[Tensor]:
    return [] if logprobs is None else [logprobs.token_ids, logprobs.logprobs, logprobs.ranks]


def _as_int32(tensor: Tensor) -> Tensor:
    """The same 32 bits as integers; counts and ids of 64 bits fit, too."""
    return tensor.view(torch.int32) if tensor.dtype == torch.float32 else tensor.to(torch.int32)


def _entries(arrays: list[np.ndarray]) -> list[list[TokenLogprobs]]:
    """Logprob arrays [B, K, n + 1], [B, K, n + 1] and [B, K] as K entries for each of B rows."""
    ids, bits, ranks = arrays
    rows = zip(ids.tolist(), bits.view(np.float32).tolist(), ranks.tolist(), strict=True)
    return [[TokenLogprobs(*entry) for entry in zip(*row, strict=True)] for row in rows]
