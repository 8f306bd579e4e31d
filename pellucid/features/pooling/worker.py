"""Hidden states on their way from the device."""

from __future__ import annotations

import numpy as np
import torch

from pellucid.features.base import Halves, Home, WorkerFeature, Yielded
from pellucid.features.pooling.host import MEAN_NAME, NAME, Sums, Vectors
from pellucid.rows import StepRows
from pellucid.transfer import upload
from pellucid.worker.inputs import StepCounts


class Pooling(WorkerFeature):
    """What the last norm gives of the newest token of each row that asks."""

    halves = Halves.EAGER

    def after(self, rows: StepRows, yielded: Yielded) -> Home | None:
        counts = rows.counts
        askers = counts.riders.rows_of(NAME)
        askers = askers[counts.num_sampled[askers] > 0]
        if not len(askers):
            return None
        hidden = yielded.step.fwd.sampled(yielded.hidden)  # [S, D], of the places that are sampled
        newest = np.cumsum(counts.num_sampled)[askers] - 1
        vectors = hidden[upload(newest, hidden.device)].float()

        def read(
            counts: StepCounts, num_new: np.ndarray, arrays: list[np.ndarray], failed: dict[int, str]
        ) -> Vectors:
            return Vectors({row: arrays[0][i].tobytes() for i, row in enumerate(askers.tolist())})

        return Home([vectors], read)


class MeanPooling(WorkerFeature):
    """The sum, in float32, of what the last norm gives of the prompt's tokens that a row computes."""

    halves = Halves.EAGER

    def after(self, rows: StepRows, yielded: Yielded) -> Home | None:
        counts = rows.counts
        askers = counts.riders.rows_of(MEAN_NAME)
        if not len(askers):
            return None
        # All but a prompt's last token are scored, and that one is sampled behind.
        scored, sampled = yielded.hidden[rows.score_index], yielded.step.fwd.sampled(yielded.hidden)
        ends, newest = np.cumsum(counts.num_scores), np.cumsum(counts.num_sampled)
        sums: list[torch.Tensor] = []
        for row in askers.tolist():
            part = scored[ends[row] - counts.num_scores[row] : ends[row]].float().sum(0)
            is_last = counts.num_sampled[row] > 0
            sums.append(part + sampled[newest[row] - 1].float() if is_last else part)

        def read(
            counts: StepCounts, num_new: np.ndarray, arrays: list[np.ndarray], failed: dict[int, str]
        ) -> Sums:
            nums = counts.num_scores[askers].tolist()
            parts = zip(askers.tolist(), nums, strict=True)
            return Sums({row: (arrays[0][i].tobytes(), num) for i, (row, num) in enumerate(parts)})

        return Home([torch.stack(sums)], read)
