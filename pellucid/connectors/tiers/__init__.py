"""KV beside the pool: pages of host memory, and behind them files of a folder."""

from pellucid.connectors.base import Connector

TIERS = Connector("pellucid.connectors.tiers.host:Tiers", "pellucid.connectors.tiers.worker:Tiers")
