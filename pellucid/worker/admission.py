"""Requests into their slots; what is wrong with one of them is its own end and no other's.

All that may fail is done on the host, before anything has changed.  A request that fails there gets its slot
all the same, as one that asks for nothing, since plans already have its rows; the result of its first row
says what is wrong.  Every rank finds the same, because nothing here depends on the machine; what does
(MemoryError) is raised, and ends the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np
from msgspec.structs import replace

from pellucid.executor.base import Pending
from pellucid.sample.state import SamplingState, SlotParameters
from pellucid.sampling_params import SamplingParams
from pellucid.schedule.plan import Admission, StepResult, ints
from pellucid.spec.base import Remembers
from pellucid.worker.inputs import StepCounts
from pellucid.worker.slots import Slots

logger = logging.getLogger(__name__)
NOTHING = SamplingParams(temperature=0.0)


class Admitter:
    """Fills slots, and remembers what is wrong with whose request."""

    def __init__(self, slots: Slots, state: SamplingState, proposer: object = None) -> None:
        """proposer: on the stage that has one."""
        self.slots, self.state = slots, state
        self._memory = proposer if isinstance(proposer, Remembers) else None
        self._failed: dict[int, str] = {}  # by slot

    def retire(self, slots: list[int]) -> None:
        """These requests have ended."""
        if self._memory is not None:
            self._memory.retire(slots, self.slots.token_ids, self.slots.num_computed)
        self.slots.retire(slots)
        for slot in slots:
            self._failed.pop(slot, None)

    def admit(self, admissions: list[Admission]) -> None:
        """Write newly admitted requests into their slots; at most one a slot."""
        if not admissions:
            return
        tokens = np.concatenate([admission.token_ids for admission in admissions])
        are_good = bool(tokens.min() >= 0 and tokens.max() < self.state.vocab_size)
        ready = [self._prepare(admission, are_good=are_good) for admission in admissions]
        self.slots.admit([admission for admission, _ in ready])
        self.state.admit([parameters for _, parameters in ready])

    def fail(self, failed: Mapping[int, str]) -> None:
        """These have something wrong with them, by slot, and end with their first row."""
        self._failed.update(failed)

    def tell(self, counts: StepCounts, pending: Pending) -> Pending:
        """A step's result, with what is wrong with its rows' requests."""
        if not self._failed:
            return pending
        rows = {row: self._failed[slot] for row, slot in enumerate(counts.slots) if slot in self._failed}
        return WithFailures(pending, rows) if rows else pending

    def _prepare(self, admission: Admission, *, are_good: bool) -> tuple[Admission, SlotParameters]:
        """Read a request; one that cannot be read as one that asks for nothing.

        are_good: its tokens, and those of all others that come with it.
        """
        try:
            if not are_good:
                check_tokens(admission, self.state.vocab_size)
            return admission, self.state.prepare(admission)
        except MemoryError:
            raise
        except Exception as error:
            is_users = isinstance(error, ValueError)
            logger.warning("sequence %d cannot run: %s", admission.seq_id, error, exc_info=not is_users)
            self._failed[admission.slot] = str(error) if is_users else f"{type(error).__name__}: {error}"
        harmless = without_wishes(admission, self.state.vocab_size)
        return harmless, self.state.prepare(harmless)


def check_tokens(admission: Admission, vocab_size: int) -> None:
    """Raise ValueError for a token without an embedding: a GPU would read elsewhere, and end with it."""
    tokens = np.asarray(admission.token_ids)
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        wrong = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
        raise ValueError(f"token id {wrong} is out of range, the vocabulary has ids 0 to {vocab_size - 1}")


def without_wishes(admission: Admission, vocab_size: int) -> Admission:
    """The same sequence, of tokens that exist, which asks for nothing.

    All before a token that does not exist keeps its KV, which others may find in the prefix cache.
    """
    tokens = np.asarray(admission.token_ids).clip(0, vocab_size - 1)
    return replace(
        admission,
        token_ids=ints(tokens.tobytes()),
        seed=0,
        sampling=NOTHING,
        stop_token_ids=(),
        bad_words_token_ids=(),
    )


class WithFailures:
    """A step's result, once it is there, with rows whose requests had failed before it began."""

    def __init__(self, pending: Pending, failed: dict[int, str]) -> None:
        self._pending, self._failed = pending, failed

    def wait(self) -> None:
        self._pending.wait()

    def result(self) -> StepResult:
        result = self._pending.result()
        return replace(result, failed=result.failed | self._failed)
