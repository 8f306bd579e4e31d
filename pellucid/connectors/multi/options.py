"""`kv_connector_extra_config` of several connectors: {"connectors": [a kv_transfer_config each]}."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pellucid.connectors.base import KV_CONNECTORS
from pellucid.connectors.config import KVTransferConfig
from pellucid.resolve import Resolved

OF_ALL = ("kv_load_seconds", "kv_load_failure_policy")  # at once: whoever waits for a load knows of one
SHARED = ("engine_id", "kv_role", "kv_ip", "kv_port", "kv_buffer_device")


def each_resolved(resolved: Resolved) -> list[Resolved]:
    """What each connector is made with: its own config, and what it does not say from the one for all.

    Raises ValueError for what is none.
    """
    config = resolved.kv_transfer
    assert config is not None, "a connector that nobody has asked for"
    extra = config.kv_connector_extra_config
    given = extra.get("connectors")
    if extra.keys() != {"connectors"} or not isinstance(given, Sequence) or not given:
        raise ValueError(
            f"kv_connector_extra_config is {dict(extra)!r}; with {config.kv_connector} it must be "
            '{"connectors": [...]}, a list with a kv_transfer_config for each'
        )
    shared = {name: getattr(config, name) for name in SHARED}
    return [replace(resolved, kv_transfer=_own(shared, each, config.kv_connector)) for each in given]


def _own(shared: Mapping[str, object], given: object, outer: str) -> KVTransferConfig:
    if not isinstance(given, Mapping):
        raise ValueError(f"one of the connectors is {given!r}, must be a kv_transfer_config")
    said = {str(name): value for name, value in given.items()}
    for name in OF_ALL:
        if name in said:
            raise ValueError(
                f"{name} is {said[name]!r} for {said.get('kv_connector')} alone, but it holds for all "
                f"connectors at once; give it beside {outer}"
            )
    own = KVTransferConfig.from_fields({**shared, **said})
    if KV_CONNECTORS.load(own.kv_connector) is KV_CONNECTORS.load(outer):
        raise ValueError(f"{own.kv_connector} cannot be one of its own connectors; name them side by side")
    return own
