"""What the scheduler counts over its life, for metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pellucid.schedule.plan import Column


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the beginning."""

    num_prompt_tokens: int = 0  # of the requests that were admitted
    num_cached_tokens: int = 0  # of these, found in the prefix cache
    num_sampled_tokens: int = 0  # that requests have got
    num_preemptions: int = 0
    num_verifying_steps: int = 0  # that came home with drafts in them
    num_drafts: int = 0  # rows with drafts that came home
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # of the drafts
    num_accepted_per_position: list[int] = field(default_factory=list[int])

    def count_drafts(self, draft: Column, stood: Column) -> None:
        """Rows with so many drafts, or none, have come home, and of each so many stood."""
        num_verified = int(np.count_nonzero(draft))
        self.num_verifying_steps += num_verified > 0
        self.num_drafts += num_verified
        self.num_draft_tokens += int(draft.sum())
        num_rows, by_stood = 0, np.bincount(stood).tolist()
        for position in range(len(by_stood) - 2, -1, -1):
            num_rows += by_stood[position + 1]
            self.num_accepted_per_position[position] += num_rows
            self.num_accepted_tokens += num_rows
