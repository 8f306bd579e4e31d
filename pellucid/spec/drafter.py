"""What makes an engine's drafts, as far as planning has to know."""

from __future__ import annotations

from enum import Enum


class Drafter(Enum):
    """Named by what it needs."""

    NONE = "none"  # drafts are those that grammars force
    STATELESS = "stateless"
    READS_TEXT = "reads text"  # of the request, and nothing else
    KEEPS_KV = "keeps KV"  # of its own, whole only if it runs behind every step; what has caches does
