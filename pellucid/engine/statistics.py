"""What the engine has done, in numbers that are cheap enough to keep at every step.

Knows nothing of where they are shown.
"""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot.  Totals are since the engine began; times in seconds."""

    num_steps: int  # plans that came home
    num_prompt_tokens: int  # of admitted requests
    num_cached_tokens: int  # of these, found in the prefix cache
    num_sampled_tokens: int
    num_preemptions: int
    num_drafts: int  # rows with drafts, each verified in one step
    num_draft_tokens: int
    num_accepted_tokens: int  # of the drafts
    num_accepted_per_position: tuple[int, ...]  # how often the first, the second, .. draft was accepted
    host_seconds: float  # between two submits, without waiting for the device
    wait_seconds: float  # waiting for the device
    num_running: int
    num_waiting: int
    kv_usage: float  # share of the KV blocks in use
    is_synthetic: bool = False  # drafts stood by chance: neither they nor the speed are the model's own

    @property
    def spec_decode(self) -> dict[str, int | tuple[int, ...]]:
        """The counters of speculation by the names under which they are shown everywhere, vLLM's."""
        return {
            "spec_decode_num_drafts": self.num_drafts,
            "spec_decode_num_draft_tokens": self.num_draft_tokens,
            "spec_decode_num_accepted_tokens": self.num_accepted_tokens,
            "spec_decode_num_accepted_tokens_per_pos": self.num_accepted_per_position,
        }


class StepClock:
    """Splits time into the host's work and waiting for the device.

    Host time is what passes from one submit to the next, less the wait between them; idle time is neither.
    """

    def __init__(self) -> None:
        self.host_seconds = 0.0
        self.wait_seconds = 0.0
        self.num_steps = 0
        self._host_since = time.perf_counter()

    def resume(self) -> None:
        """The engine was idle until now."""
        self._host_since = time.perf_counter()

    def submitted(self) -> None:
        now = time.perf_counter()
        self.host_seconds += now - self._host_since
        self._host_since = now

    def waited(self, since: float) -> None:
        """A result has come; the wait for it began at `since` of time.perf_counter."""
        wait = time.perf_counter() - since
        self.wait_seconds += wait
        self._host_since += wait
        self.num_steps += 1
