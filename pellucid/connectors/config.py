"""What the user says of KV from elsewhere, and to whom blocks are told: with vLLM's keys."""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from pellucid.config import CacheConfig, json_object

logger = logging.getLogger(__name__)
GIB = 1 << 30
ROLES = ("kv_both", "kv_producer", "kv_consumer")
POLICIES = ("recompute", "fail")
BUFFERS = (None, "cpu", "cuda")
PUBLISHERS = ("zmq", "null")
MEANINGLESS = ("kv_rank", "kv_parallel_size", "kv_buffer_size")  # to our connectors


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferConfig:
    """Which connector, and how.  Raises ValueError, naming what is wrong."""

    kv_connector: str
    kv_role: str = "kv_both"
    engine_id: str | None = None
    kv_load_failure_policy: str = "recompute"  # or "fail": the request whose load failed ends
    kv_load_seconds: float = 20.0  # behind which a load that has not come has failed
    # Where pages lie that other engines read: in memory of the host, or of the GPU, for GPUs of one machine.
    kv_buffer_device: str | None = None
    kv_ip: str = "127.0.0.1"
    kv_port: int | None = None  # at which engines of other nodes ask for KV; None: none do
    kv_connector_extra_config: Mapping[str, object] = field(default_factory=dict[str, object])

    def __post_init__(self) -> None:
        for name, choices in (
            ("kv_role", ROLES),
            ("kv_load_failure_policy", POLICIES),
            ("kv_buffer_device", BUFFERS),
        ):
            if (value := getattr(self, name)) not in choices:
                raise ValueError(
                    f"{name} in kv_transfer_config is {value!r}, must be one of "
                    f"{', '.join(map(str, choices))}"
                )
        if not _is_positive(self.kv_load_seconds):
            raise ValueError(
                f"kv_load_seconds in kv_transfer_config is {self.kv_load_seconds!r}, must be above 0"
            )

    @classmethod
    def of(cls, cache: CacheConfig) -> KVTransferConfig | None:
        """None: KV stays in this engine's pool."""
        given = cls._given(cache)
        if given is None:
            return None
        if not cache.enable_prefix_caching:
            raise ValueError(
                "enable_prefix_caching is False, but KV from elsewhere comes through the prefix cache; "
                "leave out kv_transfer_config and kv_offloading_size, or let prefixes be cached"
            )
        return cls.from_fields(given)

    @classmethod
    def _given(cls, cache: CacheConfig) -> Mapping[str, object] | None:
        """What was said, in the long way."""
        size, folder = cache.kv_offloading_size, cache.kv_offloading_path
        if cache.kv_transfer_config is not None:
            if size is not None or folder is not None:
                raise ValueError("kv_transfer_config says all of it; leave out kv_offloading_size and _path")
            return json_object("kv_transfer_config", cache.kv_transfer_config)
        if size is None and folder is None:
            return None
        for name in ("kv_offloading_size", "kv_offloading_disk_size"):
            value = getattr(cache, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}, must be above 0 (GiB)")
        extra: dict[str, object] = {} if size is None else {"cpu_bytes_to_use": int(size * GIB)}
        if folder is not None:
            disk = int(cache.kv_offloading_disk_size * GIB)
            extra |= {"shared_storage_path": folder, "disk_bytes_to_use": disk}
        return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}

    @classmethod
    def from_fields(cls, given: Mapping[str, object]) -> KVTransferConfig:
        """As the user wrote it."""
        for name in sorted(given.keys() & set(MEANINGLESS)):
            logger.warning("%s in kv_transfer_config has no effect: every rank has its own connector", name)
        given = {name: value for name, value in given.items() if name not in MEANINGLESS}
        if "kv_connector_module_path" in given:
            raise ValueError(
                "kv_connector_module_path is not served: code of vLLM's interface does not fit; write "
                "the two halves of pellucid/connectors/base.py and say KV_CONNECTORS.register(name, path)"
            )
        _check_keys("kv_transfer_config", given, [f.name for f in fields(cls)])
        if not isinstance(given.get("kv_connector"), str):
            raise ValueError("kv_transfer_config names no kv_connector")
        return cls(**given)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """To whom it is told which blocks can be found here.  Raises ValueError, naming what is wrong."""

    enable_kv_cache_events: bool = False
    publisher: str | None = None  # "zmq", or "null": nobody is told
    endpoint: str = "tcp://*:5557"  # bound if it has a *, else connected to
    replay_endpoint: str | None = None  # where those who have missed some ask for them
    buffer_steps: int = 10_000  # messages that can be asked for
    hwm: int = 100_000  # messages that wait for a slow subscriber
    max_queue_size: int = 100_000  # events that wait to be sent
    topic: str = ""

    def __post_init__(self) -> None:
        if self.publisher not in (None, *PUBLISHERS):
            raise ValueError(
                f"publisher in kv_events_config is {self.publisher!r}, must be one of {', '.join(PUBLISHERS)}"
            )
        if self.enable_kv_cache_events not in (True, False):
            raise ValueError(
                f"enable_kv_cache_events in kv_events_config is {self.enable_kv_cache_events!r}, "
                "must be true or false"
            )
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} in kv_events_config is {value!r}, must be at least 1")
        for name in ("endpoint", "replay_endpoint", "topic"):
            value = getattr(self, name)
            if not isinstance(value, str) and (value is not None or name != "replay_endpoint"):
                raise ValueError(f"{name} in kv_events_config is {value!r}, must be a text")

    @classmethod
    def of(cls, cache: CacheConfig) -> KVEventsConfig | None:
        """None: nobody is told."""
        if cache.kv_events_config is None:
            return None
        given = json_object("kv_events_config", cache.kv_events_config)
        _check_keys("kv_events_config", given, [f.name for f in fields(cls)])
        config = cls(**given)  # type: ignore[arg-type]
        if not config.enable_kv_cache_events or config.publisher == "null":
            return None
        if not cache.enable_prefix_caching:
            raise ValueError("enable_prefix_caching is False, so kv_events_config has no blocks to tell of")
        return config


def _check_keys(name: str, given: Mapping[str, object], known: list[str]) -> None:
    """Raises ValueError for a key that is not known."""
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else f" (known: {', '.join(known)})"
            raise ValueError(f"unknown key {key!r} in {name}{hint}")


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf
