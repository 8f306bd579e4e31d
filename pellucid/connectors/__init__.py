"""KV from elsewhere, and KV for others: see base.py."""

from pellucid.features.base import Feature

KV_TRANSFER = Feature(
    "pellucid.connectors.host:KVTransfer",
    "pellucid.connectors.worker:KVTransfer",
)
KV_EVENTS = Feature("pellucid.connectors.events:KVEvents", "pellucid.features.base:WorkerFeature")
