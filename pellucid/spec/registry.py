"""Names of proposers and of verifiers; a new one is a line here and a file beside this one."""

from __future__ import annotations

from pellucid.registry import Registry
from pellucid.spec.base import Proposer
from pellucid.spec.verify import Verifier

PROPOSERS: Registry[type[Proposer]] = Registry(
    "speculative method",
    {
        "none": "pellucid.spec.base:NullProposer",
        "dflash": "pellucid.spec.dflash:DFlashProposer",
        "draft_model": "pellucid.spec.draft_model:DraftModelProposer",
        "eagle": "pellucid.spec.eagle:EagleProposer",
        "eagle3": "pellucid.spec.eagle3:Eagle3Proposer",
        "grammar": "pellucid.spec.grammar:GrammarProposer",
        "medusa": "pellucid.spec.medusa:MedusaProposer",
        "mtp": "pellucid.spec.mtp:MtpProposer",
        "pard": "pellucid.spec.pard:PardProposer",
        "ngram": "pellucid.spec.ngram:NgramProposer",
        "suffix": "pellucid.spec.suffix:SuffixProposer",
    },
)
VERIFIERS: Registry[type[Verifier]] = Registry(
    "rejection_sample_method",
    {
        "strict": "pellucid.spec.verify:StrictVerifier",
        "standard": "pellucid.spec.standard:StandardVerifier",
        "synthetic": "pellucid.spec.synthetic:SyntheticVerifier",
    },
)
