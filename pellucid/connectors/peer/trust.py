"""Whom to believe about KV: a request names the engine that has it, and clients write requests.

On this node only processes of the same user are asked or answered.  On another one an engine must know the
secret of the nodes (`PELLUCID_SECRET`), and it is asked only if whoever knows that has sealed what the
request says of it, or its host is listed.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from pellucid.connectors.peer.params import KVParams
from pellucid.nodes.connection import SECRET, read_secret

PURPOSE = b"kv"  # what connections are for that prove the secret


@dataclass(frozen=True, slots=True)
class Trust:
    """Of one engine.  secret: None if nobody has set it; then only engines of this node are believed."""

    secret: bytes | None
    peers: tuple[str, ...] = ()  # hosts, addresses or networks

    @classmethod
    def of(cls, peers: Sequence[str], *, has_port: bool = False) -> Trust:
        """has_port: do others ask here?  Raises ValueError if a secret is needed and not set."""
        is_needed = has_port or bool(peers) or bool(os.environ.get(SECRET))
        return cls(read_secret() if is_needed else None, tuple(peers))

    def sealed(self, params: KVParams) -> KVParams:
        """The same, to be believed by whoever knows the secret."""
        return (
            params if self.secret is None else msgspec.structs.replace(params, remote_seal=self._seal(params))
        )

    def refusal(self, params: KVParams) -> str | None:
        """Why no KV is asked for there; None if it may be."""
        if not params.do_remote_prefill:
            return None
        where = f"engine {params.remote_engine_id!r}"
        if params.is_elsewhere:
            where += f" at {params.remote_host}:{params.remote_port}"
        if self.secret is None:
            if not params.is_elsewhere:
                return None  # a process of this user, on this node
            return f"{where} is on another node, of which none is believed while {SECRET} is not set"
        if self._is_listed(params.remote_host) or self._is_sealed(params):
            return None
        return (
            f"{where} is not believed: the request has no remote_seal that an engine with this {SECRET} has "
            "made, and kv_connector_extra_config does not list its host in peers"
        )

    def _is_sealed(self, params: KVParams) -> bool:
        return hmac.compare_digest(self._seal(params).encode(), (params.remote_seal or "").encode())

    def _seal(self, params: KVParams) -> str:
        assert self.secret is not None
        said = (params.remote_engine_id, params.remote_request_id, params.remote_host, params.remote_port)
        return hmac.digest(self.secret, PURPOSE + msgspec.json.encode(said), hashlib.sha256).hex()

    def _is_listed(self, host: str | None) -> bool:
        return host is not None and any(host == peer or _is_in(host, peer) for peer in self.peers)


def _is_in(host: str, network: str) -> bool:
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(network, strict=False)
    except ValueError:  # one of them is a name
        return False
