"""What makes an engine's drafts, and how long its steps take, as far as planning has to know."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Drafter(Enum):
    """Named by what it needs."""

    NONE = "none"  # drafts are those that grammars force
    STATELESS = "stateless"
    READS_TEXT = "reads text"  # of the request, and nothing else
    READS_TEXTS = "reads texts"  # those of finished requests, too
    KEEPS_KV = "keeps KV"  # of its own, whole only if it runs behind every step; what has caches does


class Timed(NamedTuple):
    """A step, and what it took.  Of a plain one both numbers are 0; of the proposer alone the first one."""

    num_rows: int
    verified: int  # drafts of each row
    made: int  # for each
    seconds: float


class Timings(NamedTuple):
    """What steps took at start.

    is_padded: what lies between two numbers of drafts takes what the larger one does, as where recorded steps
    are replayed.
    """

    is_padded: bool = False
    steps: tuple[Timed, ...] = ()


UNTIMED = Timings()
