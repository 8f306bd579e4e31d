"""Hidden states behind the last token of a text, as embedding models are asked for them."""

from pellucid.features.base import Feature

POOLING = Feature("pellucid.features.pooling.host:Pooling", "pellucid.features.pooling.worker:Pooling")
