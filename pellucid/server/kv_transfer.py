"""`kv_transfer_params` in a request: its KV is at another engine, or another one will ask for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import msgspec

from pellucid.connectors.peer.params import KVParams
from pellucid.connectors.peer.trust import Trust
from pellucid.server.context import Server
from pellucid.server.errors import ApiError

FIELD = "kv_transfer_params"


def kv_wish(given: Mapping[str, object] | None, server: Server) -> str | None:
    """What the engine's connector is told.  Raises a 400 for what it cannot do."""
    if given is None:
        return None
    if (config := server.llm.resolved.kv_transfer) is None:
        message = f"{FIELD} means nothing here: start the server with --kv-transfer-config"
        raise ApiError(400, message, param=FIELD)
    try:
        params = msgspec.convert(given, KVParams)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"{FIELD} cannot be read: {error}", param=FIELD) from error
    if params.do_remote_prefill and params.remote_engine_id is None:
        raise ApiError(400, f"{FIELD} has do_remote_prefill, but no remote_engine_id", param=FIELD)
    peers = config.kv_connector_extra_config.get("peers", ())
    if (refusal := Trust.of(cast("list[str]", peers)).refusal(params)) is not None:
        raise ApiError(400, f"{FIELD}: {refusal}", param=FIELD)
    return params.encode()
