"""Hidden states on their way from the device."""

from __future__ import annotations

import numpy as np

from pellucid.features.base import Halves, Home, WorkerFeature, Yielded
from pellucid.features.pooling.host import NAME, Vectors
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
