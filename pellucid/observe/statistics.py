"""What the engine has done, in numbers that are cheap enough to keep at every step.

Knows nothing of where they are shown.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from pellucid.sleep.state import AWAKE, GONE, SleepState

STEP_TOKENS = (1, *(2**power for power in range(3, 15)))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot.  Totals are since the engine began; times in seconds."""

    num_steps: int  # plans that came home
    num_step_tokens: int  # computed in them, drafts included
    num_steps_by_tokens: tuple[int, ...]  # steps of up to each of STEP_TOKENS, and of more than the last
    num_prompt_tokens: int  # of admitted requests
    num_cached_tokens: int  # of these, found in the prefix cache
    num_sampled_tokens: int  # that requests have got: neither behind a stop nor of those that had left
    num_preemptions: int
    num_drafts: int  # rows with drafts, each verified in one step
    num_draft_tokens: int
    num_accepted_tokens: int  # of the drafts
    num_accepted_per_position: tuple[int, ...]  # how often the first, the second, .. draft was accepted
    host_seconds: float  # between two submits, without waiting for the device; reading its results included
    wait_seconds: float  # waiting for the device
    num_late_compilations: int  # kernels compiled since the engine was ready: each stalls a step
    num_running: int
    num_waiting: int
    kv_usage: float  # share of the KV blocks in use
    is_synthetic: bool  # drafts stood by chance: neither they nor the speed are the model's own
    proposer: str = "none"  # the speculative method
    num_verifying_steps: int = 0  # with drafts in them
    draft_seconds_saved: float = 0.0  # by drafts, less what drafters took of prompts; below 0: they have cost
    sleep: SleepState = AWAKE
    # Totals that features count, by name; a name that ends in _now is of what is there now.
    of_features: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def spec_decode(self) -> dict[str, int | tuple[int, ...]]:
        """The counters of speculation by the names under which they are shown everywhere, vLLM's."""
        return {
            "spec_decode_num_drafts": self.num_drafts,
            "spec_decode_num_draft_tokens": self.num_draft_tokens,
            "spec_decode_num_accepted_tokens": self.num_accepted_tokens,
            "spec_decode_num_accepted_tokens_per_pos": self.num_accepted_per_position,
        }

    def at_rest(self) -> Self:
        """The same, when nothing runs any more."""
        return replace(self, num_running=0, num_waiting=0, kv_usage=0.0, sleep=GONE)

    @classmethod
    def total(cls, parts: Sequence[Self]) -> Self:
        """Several engines as one: numbers are summed, but of `kv_usage` it is the mean."""
        by_tokens = zip(*(part.num_steps_by_tokens for part in parts), strict=True)
        accepted = zip(*(part.num_accepted_per_position for part in parts), strict=True)
        sums: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in SUMMED}
        of_features = Counter[str]()
        for part in parts:
            of_features.update(part.of_features)  # what is 0 stays there
        return replace(
            parts[0],
            **sums,
            num_steps_by_tokens=tuple(map(sum, by_tokens)),
            num_accepted_per_position=tuple(map(sum, accepted)),
            kv_usage=sum(part.kv_usage for part in parts) / len(parts),
            is_synthetic=any(part.is_synthetic for part in parts),
            sleep=SleepState.total([part.sleep for part in parts]),
            of_features=dict(of_features),
        )


NUMBERS = [each.name for each in fields(EngineStats) if each.type in ("int", "float")]
SUMMED = [name for name in NUMBERS if name != "kv_usage"]


class StepSizes:
    """How many tokens steps compute."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.counts = [0] * (len(STEP_TOKENS) + 1)

    def add(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self.counts[bisect_left(STEP_TOKENS, num_tokens)] += 1


class StepClock:
    """Splits time into the host's work and waiting for the device.

    Host time is what passes from one submit to the next, less the wait between them; idle time is neither.
    """

    def __init__(self) -> None:
        self.host_seconds = 0.0
        self.wait_seconds = 0.0
        self.num_steps = 0
        self._host_since = self._last_result = time.perf_counter()
        self._starts: deque[float] = deque()  # of the steps under way

    def resume(self) -> None:
        """The engine was idle until now."""
        self._host_since = time.perf_counter()

    def starts(self) -> None:
        """A plan is about to be submitted."""
        self._starts.append(time.perf_counter())

    def submitted(self) -> None:
        now = time.perf_counter()
        self.host_seconds += now - self._host_since
        self._host_since = now

    def waited(self, since: float, until: float) -> float:
        """A result has come, which was waited for; times of time.perf_counter.

        Returns the seconds that its step took: since it began, or since the one before it came home.
        """
        wait, seconds = until - since, until - max(self._starts.popleft(), self._last_result)
        self._last_result = until
        self.wait_seconds += wait
        self._host_since += wait
        self.num_steps += 1
        return seconds
