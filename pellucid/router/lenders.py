"""Engines that hand KV to each other: what each is told of itself, and what others are told of it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pellucid.config import EngineConfig, ParallelConfig, json_object
from pellucid.connectors.peer.params import KVParams
from pellucid.connectors.peer.trust import Trust
from pellucid.types import Request

DEFAULT = "PeerConnector"


@dataclass(frozen=True, slots=True)
class Lenders:
    """given: kv_transfer_config as the user wrote it; None: engines have their own KV alone."""

    base: EngineConfig
    given: Mapping[str, object] | None
    engine_id: str  # where it begins, of each engine

    @classmethod
    def of(cls, config: EngineConfig) -> Lenders:
        """Raises ValueError for what is no JSON."""
        given = config.cache.kv_transfer_config
        if given is not None:
            given = json_object("kv_transfer_config", given)
        elif config.parallel.prefill_engines:
            given = {"kv_connector": DEFAULT}
        engine_id = str((given or {}).get("engine_id") or uuid.uuid4().hex)
        return cls(config, given, engine_id)

    def config(self, index: int) -> EngineConfig:
        """An engine's own."""
        if self.given is None:
            return self.base
        own = {**self.given, "engine_id": self.engine_of(index)}
        if (port := self.port(index)) is not None:
            own["kv_port"] = port
        if (role := role_of(self.base.parallel, index)) is not None:
            own["kv_role"] = role
        return replace(self.base, cache=replace(self.base.cache, kv_transfer_config=own))

    def engine_of(self, index: int) -> str:
        return f"{self.engine_id}-{index}"

    def port(self, index: int) -> int | None:
        port = (self.given or {}).get("kv_port")
        return port + index if isinstance(port, int) else None

    def params(self, index: int, request: Request) -> KVParams:
        """What another engine is told of a request whose KV this one keeps."""
        size = self.base.cache.block_size or 1
        host = (self.given or {}).get("kv_ip")
        params = KVParams(
            do_remote_prefill=True,
            remote_engine_id=self.engine_of(index),
            remote_request_id=request.id,
            remote_host=str(host) if host is not None else None,
            remote_port=self.port(index),
            remote_block_ids=list(range(len(request.prompt_token_ids) // size)),
            tp_size=self.base.parallel.tensor_parallel_size,
        )
        return Trust.of(()).sealed(params)


def role_of(parallel: ParallelConfig, index: int) -> str | None:
    """By vLLM's names; None: as the user has said."""
    if not parallel.prefill_engines:
        return None
    return "kv_producer" if index < parallel.prefill_engines else "kv_consumer"
