"""Constrained decoding: what may come next in a text is made by a grammar, while the forward runs."""

from pellucid.features.base import Feature

GRAMMAR = Feature("pellucid.features.grammar.host:Grammars", "pellucid.features.grammar.worker:TokenMasks")
