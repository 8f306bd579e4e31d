"""All features of a worker, and which of them a step's rows ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from pellucid.features.base import FEATURES, Halves, Hooks, WorkerFacts, WorkerFeature, bits_of, defines
from pellucid.registry import load_object
from pellucid.schedule.plan import FEATURE_BITS, NOBODY, Admission, StepPlan

if TYPE_CHECKING:
    from torch import Tensor

    from pellucid.executor.base import Capacity
    from pellucid.worker.inputs import StepCounts

Named = tuple[tuple[str, Any], ...]  # (name, feature)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Riders:
    """What the rows of a step ask for, and the hooks that are to be called for it."""

    bits: int = 0
    asked: np.ndarray = field(default_factory=lambda: NOBODY)  # [B], each row's bits
    halves: Halves = Halves.WHOLE  # what of a recording may be replayed
    before: Named = ()
    extend: Named = ()
    fill: Named = ()
    between: Named = ()
    after: Named = ()
    bit_of: Mapping[str, int] = field(default_factory=dict[str, int])

    def rows_of(self, name: str) -> np.ndarray:
        """Indices of the rows that ask for this feature."""
        return np.flatnonzero(self.asked & self.bit_of[name])


NO_RIDERS = Riders()


class WorkerFeatures:
    """The halves in a worker."""

    def __init__(self, features: Mapping[str, WorkerFeature], num_slots: int) -> None:
        """num_slots: the spare one included."""
        self._features, self._bits = dict(features), bits_of(features)
        self._hooks = Hooks(self._features)
        self._asked = np.zeros(num_slots, dtype=np.int64)  # by slot
        self.split_bits = self._bits_with(Halves.SPLIT)
        self.eager_bits = self._bits_with(Halves.EAGER)
        # Of those that change what the forward sees: each step is recorded with them and without.
        self.forward_bits = sum(bit for name, bit in self._bits.items() if defines(features[name], "extend"))

    @classmethod
    def of(cls, names: Sequence[str], facts: WorkerFacts) -> Self:
        """Those of an engine."""
        features = {name: load_object(FEATURES.load(name).worker)(facts) for name in names}
        return cls(features, facts.slots.num_slots + 1)

    def _bits_with(self, halves: Halves) -> int:
        return sum(self._bits[name] for name, each in self._features.items() if halves_of(each) is halves)

    def make_room(self, most: int) -> None:
        """Recordings of up to so many logits will read what features fill."""
        for _, feature in self._hooks.of(FEATURE_BITS, "make_room"):
            feature.make_room(most)

    def admit(self, admissions: list[Admission]) -> dict[int, str]:
        """These are in their slots; by slot, what is wrong with whom."""
        union, failed = 0, dict[int, str]()
        for admission in admissions:
            self._asked[admission.slot] = admission.asked
            union |= admission.asked
        for name, feature in self._hooks.of(union, "admit"):
            failed |= feature.admit([each for each in admissions if each.asked & self._bits[name]]) or {}
        return failed

    def retire(self, slots: list[int]) -> None:
        """Nobody is in these slots any more."""
        if slots:
            for _, feature in self._hooks.of(FEATURE_BITS, "retire"):
                feature.retire(slots)

    def bind(self, pages: Tensor | None, capacity: Capacity) -> None:
        """The KV cache is there, or about to go."""
        for _, feature in self._hooks.of(FEATURE_BITS, "bind"):
            feature.bind(pages, capacity)

    def ahead(self, plan: StepPlan) -> None:
        """What the plan carries whoever asks, before its forward."""
        for name, feature in self._hooks.of(plan.asked, "ahead"):
            if name in plan.ride:
                feature.ahead(plan.ride[name])

    def behind(self, plan: StepPlan) -> None:
        """The same, when all of it is launched."""
        for name, feature in self._hooks.of(plan.asked, "behind"):
            if name in plan.ride:
                feature.behind(plan.ride[name])

    def shutdown(self) -> None:
        """They are used no more."""
        for _, feature in self._hooks.of(FEATURE_BITS, "shutdown"):
            feature.shutdown()

    def riders(self, plan: StepPlan) -> Riders:
        """What this plan's rows ask for."""
        if not plan.asked:
            return NO_RIDERS
        return self.with_bits(plan.asked, self._asked[plan.rows.slots] & plan.asked)

    def with_bits(self, bits: int, asked: np.ndarray) -> Riders:
        """asked: [B], of these bits each row's."""
        return Riders(
            bits=bits,
            asked=asked,
            halves=max(halves_of(each) for name, each in self._features.items() if self._bits[name] & bits),
            before=self._hooks.of(bits, "before"),
            extend=self._hooks.of(bits, "extend"),
            fill=self._hooks.of(bits, "fill"),
            between=self._hooks.of(bits, "between"),
            after=self._hooks.of(bits, "after"),
            bit_of=self._bits,
        )

    def forward_riders(self, num_rows: int) -> Riders:
        """All that change what the forward sees, asked for by nobody."""
        return self.with_bits(self.forward_bits, np.zeros(num_rows, dtype=np.int64))

    def split_riders(self, num_rows: int) -> Riders:
        """All whose second half is recorded, asked for by nobody."""
        if not self.split_bits:
            return NO_RIDERS
        return self.with_bits(self.split_bits, np.zeros(num_rows, dtype=np.int64))

    def clear(self, counts: StepCounts) -> None:
        """Let those change nothing whose part is recorded, but that no row asks for."""
        for _, feature in self._hooks.of(self.split_bits & ~counts.riders.bits, "clear"):
            feature.clear(counts)


def halves_of(feature: WorkerFeature) -> Halves:
    """What its class says, but a whole replay would call none of the hooks of the second half."""
    is_called = any(defines(feature, hook) for hook in ("fill", "between", "after"))
    return Halves.EAGER if feature.halves is Halves.WHOLE and is_called else feature.halves
