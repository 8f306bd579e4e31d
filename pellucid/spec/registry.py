"""Names of proposers; a new one is a line here and a file beside this one."""

from __future__ import annotations

from pellucid.registry import Registry
from pellucid.spec.base import Proposer

PROPOSERS: Registry[type[Proposer]] = Registry(
    "speculative method",
    {
        "none": "pellucid.spec.base:NullProposer",
        "draft_model": "pellucid.spec.draft_model:DraftModelProposer",
        "ngram": "pellucid.spec.ngram:NgramProposer",
    },
)
