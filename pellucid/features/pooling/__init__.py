"""Hidden states of a prompt, the last one or the mean of all, as embedding models are asked for them."""

from pellucid.features.base import Feature

POOLING = Feature("pellucid.features.pooling.host:Pooling", "pellucid.features.pooling.worker:Pooling")
MEAN_POOLING = Feature(
    "pellucid.features.pooling.host:MeanPooling", "pellucid.features.pooling.worker:MeanPooling"
)
