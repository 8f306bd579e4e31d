"""KV from and for another engine: pages of prompts lie in memory that its workers may read."""

from pellucid.connectors.base import Connector

PEER = Connector(
    "pellucid.connectors.peer.host:PeerHost", "pellucid.connectors.peer.worker:PeerWorker", may_sleep=False
)
