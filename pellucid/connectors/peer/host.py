"""The peer connector beside the scheduler: what is kept for other engines, and what is asked of them."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import cast

from pellucid.connectors.base import Door, Options
from pellucid.connectors.lending import Transfer
from pellucid.connectors.peer.facts import facts_of
from pellucid.connectors.peer.lender import Lender
from pellucid.connectors.peer.options import PeerOptions, way_of
from pellucid.connectors.peer.params import KVParams
from pellucid.connectors.peer.shelf import Shelf
from pellucid.connectors.peer.trust import Trust
from pellucid.connectors.peer.wire import Key
from pellucid.executor.base import Capacity
from pellucid.resolve import Resolved
from pellucid.types import Request

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PeerStats:
    """What came of it, since the start."""

    loads: int = 0  # that went well
    failed_loads: int = 0
    pages_loaded: int = 0
    bytes_loaded: int = 0  # of all ranks
    load_microseconds: int = 0  # from the question until all ranks had said so
    copy_microseconds: int = 0  # of that, what the slowest rank's copies took
    pages_saved: int = 0  # for others


class PeerHost:
    """See `KVConnector`.

    A producer puts each block of a prompt on its shelf when its forward is planned, so pages leave chunk by
    chunk; who does both puts there only what a request wants to be kept.
    """

    def __init__(self, door: Door, resolved: Resolved, capacity: Capacity, options: Options) -> None:
        config = resolved.kv_transfer
        assert config is not None, "a connector that nobody has asked for"
        self._door, self._options = door, PeerOptions.of(options)
        self._trust = Trust.of(self._options.peers, has_port=config.kv_port is not None)
        self._has_warned = False
        self._facts = facts_of(resolved, capacity)
        self._lends, self._loads = config.kv_role != "kv_consumer", config.kv_role != "kv_producer"
        self._saves_all = config.kv_role == "kv_producer"
        self._engine_id = config.engine_id or uuid.uuid4().hex
        self._lender: Lender | None = None
        self._params = KVParams()
        self.stats = PeerStats()
        self._began: dict[Transfer, float] = {}  # loads
        self._page_bytes = capacity.page_bytes * door.num_ranks
        if self._lends:
            stride = capacity.page_bytes
            device = resolved.platform.device
            way = way_of(config, device)
            on_gpu = way is not None and device == "cuda"
            num_places = self._options.num_places(capacity.num_pages, stride, door.num_ranks, on_gpu=on_gpu)
            shelf = Shelf(num_places, num_ranks=door.num_ranks)
            at = None if config.kv_port is None else (config.kv_ip, config.kv_port)
            self._lender = Lender(
                self._engine_id, self._facts, shelf, num_ranks=door.num_ranks, stride=stride,
                at=at, secret=self._trust.secret, way=way,
            )  # fmt: skip
            where = way or "memory of the host"
            logger.info(
                "engine %s lends %d pages of %d bytes: %s", self._engine_id, num_places, stride, where
            )
            own = self._peer(self._engine_id, None, None)
            door.start({"attach": own, "way": way, "num_places": num_places, "stride": stride})

    def _peer(self, engine_id: str, host: str | None, port: int | None) -> dict[str, object]:
        return {"engine_id": engine_id, "host": host, "port": port, "facts": self._facts}

    # For this engine

    def lookup(self, request: Request, digests: Sequence[bytes], num_cached: int) -> int:
        params = self._params = KVParams.of(request.kv_transfer)
        if not (self._loads and params.do_remote_prefill and params.remote_engine_id):
            return 0
        if (refusal := self._trust.refusal(params)) is not None:
            level = logging.DEBUG if self._has_warned else logging.WARNING
            logger.log(level, "KV is computed here: %s (further ones are not told of)", refusal)
            self._has_warned = True
            return 0
        size = self._door.block_size
        return min(len(digests), len(request.prompt_token_ids) // size) * size

    def load(self, transfer: Transfer) -> object:
        params = self._params  # of who has just been looked up
        assert params.remote_engine_id is not None
        self._began[transfer] = time.perf_counter()
        return {
            "peer": self._peer(params.remote_engine_id, params.remote_host, params.remote_port),
            "request": params.remote_request_id or "",
            "keys": list(keys_of(transfer)),
        }

    # For others

    def published(self, transfer: Transfer) -> object:
        return self._put(transfer) if self._saves_all else None

    def left(self, request: Request, transfer: Transfer) -> object:
        if self._lender is None or not KVParams.of(request.kv_transfer).do_remote_decode:
            return None
        what = self._put(transfer)
        self._lender.shelf.lend(request.id, list(keys_of(transfer)), self._options.lend_seconds)
        return what

    def _put(self, transfer: Transfer) -> object:
        """Save those of its pages that do not lie there yet."""
        assert self._lender is not None, "a consumer lends nothing"
        keys = list(keys_of(transfer))
        new = self._lender.shelf.put(keys)
        if not new:
            return None
        transfer.meta = new
        places = [new.get(key, -1) for key in keys]
        return {"places": places}

    def ended(self, transfer: Transfer, *, ok: bool) -> None:
        if transfer.is_load:
            self._count(transfer, time.perf_counter() - self._began.pop(transfer), ok=ok)
        elif isinstance(transfer.meta, dict) and self._lender is not None:
            new = cast("dict[Key, int]", transfer.meta)
            self._lender.shelf.written(new, ok=ok)
            self.stats.pages_saved += len(new) * ok

    def _count(self, transfer: Transfer, seconds: float, *, ok: bool) -> None:
        if not ok:
            self.stats.failed_loads += 1
            return
        num_pages = int((transfer.pages > 0).sum())
        self.stats.loads += 1
        self.stats.pages_loaded += num_pages
        self.stats.bytes_loaded += num_pages * self._page_bytes
        self.stats.load_microseconds += int(1e6 * seconds)
        self.stats.copy_microseconds += int(1e6 * transfer.copy_seconds)

    def forget(self) -> None:
        if self._lender is not None:
            self._lender.shelf.forget()

    def counters(self) -> dict[str, int]:
        return {f"kv_peer_{name}": num for name, num in asdict(self.stats).items()}

    def poll(self) -> None:
        if self._lender is not None and (num := self._lender.shelf.expire()):
            logger.warning("nobody has asked for the KV of %d requests in time", num)

    def close(self) -> None:
        if self._lender is not None:
            self._lender.close()


def keys_of(transfer: Transfer) -> Iterator[Key]:
    """Of its pages, in the order of `Job.pages`."""
    for digest, pages in zip(transfer.digests, transfer.pages.tolist(), strict=True):
        for column, page in enumerate(pages):
            if page:
                yield digest, column
