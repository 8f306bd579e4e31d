"""Several connectors at once: tiers, and another engine's KV, say."""

from pellucid.connectors.base import Connector

MULTI = Connector(
    "pellucid.connectors.multi.host:Multi", "pellucid.connectors.multi.worker:Multi", may_sleep=False
)
