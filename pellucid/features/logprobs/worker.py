"""Log-probabilities on their way from the device."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from pellucid.features.base import Halves, Home, WorkerFacts, WorkerFeature, Yielded
from pellucid.features.logprobs.host import Entries
from pellucid.rows import StepRows
from pellucid.sample.logprobs import LogprobTensors, score
from pellucid.schedule.plan import Admission
from pellucid.transfer import upload
from pellucid.types import TokenLogprobs
from pellucid.worker.inputs import StepCounts

logger = logging.getLogger(__name__)


class Logprobs(WorkerFeature):
    """Of the tokens that are sampled: the sampler makes them, of rows that ask."""

    halves = Halves.EAGER

    def __init__(self, facts: WorkerFacts) -> None:
        self._wanted = facts.sampler.state.num_logprobs

    def after(self, rows: StepRows, yielded: Yielded) -> Home | None:
        logprobs, counts = yielded.output.logprobs, rows.counts
        if logprobs is None:
            return None
        wanted = np.where(counts.num_sampled > 0, self._wanted[counts.slots], -1)
        askers = np.flatnonzero(wanted >= 0)
        if len(askers) < len(wanted):  # others' are not worth their way
            logprobs = logprobs.take(upload(askers, logprobs.ranks.device))

        def read(
            counts: StepCounts, num_new: np.ndarray, arrays: list[np.ndarray], failed: dict[int, str]
        ) -> Entries:
            entries = Entries()
            for place, row in enumerate(askers.tolist()):
                if num_new[row]:
                    add(entries, failed, row, [array[place, : num_new[row]] for array in arrays], wanted[row])
            return entries

        return Home(parts(logprobs), read)


class PromptLogprobs(WorkerFeature):
    """Of known tokens, straight from the hidden states before them."""

    halves = Halves.EAGER

    def __init__(self, facts: WorkerFacts) -> None:
        self._slots, self._head, self._vocab_size = facts.slots, facts.head, facts.vocab_size
        self._wanted = np.zeros(facts.slots.num_slots + 1, dtype=np.int64)  # by slot, most likely tokens

    def admit(self, admissions: Sequence[Admission]) -> None:
        self._wanted[[a.slot for a in admissions]] = [a.sampling.prompt_logprobs or 0 for a in admissions]

    def after(self, rows: StepRows, yielded: Yielded) -> Home | None:
        num_scores = rows.counts.num_scores
        if not num_scores.any():
            return None
        at = rows.score_index
        known = self._slots.token_ids[rows.score_slots, yielded.step.fwd.positions[at] + 1]
        wanted = self._wanted[rows.counts.slots]
        most = int(wanted[num_scores > 0].max())
        scores = score(
            yielded.hidden[at], self._head, known, most,
            vocab_size=self._vocab_size, of_head=tuple(each[at] for each in yielded.step.fwd.of_head),
        )  # fmt: skip

        def read(
            counts: StepCounts, num_new: np.ndarray, arrays: list[np.ndarray], failed: dict[int, str]
        ) -> Entries:
            entries, ends = Entries(), np.cumsum(num_scores)
            for row in np.flatnonzero(num_scores).tolist():
                places = slice(ends[row] - num_scores[row], ends[row])
                add(entries, failed, row, [array[places] for array in arrays], wanted[row])
            return entries

        return Home(parts(scores), read)


def parts(logprobs: LogprobTensors) -> list[Tensor]:
    return [logprobs.token_ids, logprobs.logprobs, logprobs.ranks]


def add(entries: Entries, failed: dict[int, str], row: int, arrays: list[np.ndarray], num_top: int) -> None:
    """Make a row's entries; if that fails, no other row does."""
    try:
        entries.rows[row] = entries_of(*arrays, num_top=num_top)
    except Exception as error:
        logger.exception("the logprobs of row %d cannot be told", row)
        failed[row] = f"its logprobs cannot be told: {type(error).__name__}: {error}"


def entries_of(ids: np.ndarray, bits: np.ndarray, ranks: np.ndarray, *, num_top: int) -> list[TokenLogprobs]:
    """Logprob arrays [K, n + 1], [K, n + 1] and [K] as K entries, of the chosen token and num_top others."""
    ids, bits = ids[:, : 1 + num_top], bits[:, : 1 + num_top]
    columns = ids.tolist(), bits.view(np.float32).tolist(), ranks.tolist()
    return [TokenLogprobs(*entry) for entry in zip(*columns, strict=True)]
