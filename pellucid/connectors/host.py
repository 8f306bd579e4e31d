"""KV transfer beside the scheduler: when the connector is asked, and what becomes of who waits for a load."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from pellucid.connectors.base import KV_CONNECTORS, Ended, Jobs, KVConnector
from pellucid.connectors.lending import Transfer, lend_for_load, lend_for_save, of_kind
from pellucid.connectors.transfers import Transfers
from pellucid.features.base import HostFeature
from pellucid.kv.hashes import Tokens
from pellucid.kv.manager import PrefixHit
from pellucid.kv.pool import Pages
from pellucid.registry import load_object
from pellucid.resolve import Resolved
from pellucid.schedule.sequence import Sequence as Seq

if TYPE_CHECKING:
    from pellucid.executor.base import Capacity
    from pellucid.schedule.scheduler import Scheduler


logger = logging.getLogger(__name__)


class KVTransfer(HostFeature):
    """The door, seen from its own side: see base.py."""

    def __init__(self, resolved: Resolved) -> None:
        self._resolved = resolved
        self.num_ranks = resolved.num_workers

    def bind(self, scheduler: Scheduler, capacity: Capacity) -> None:
        config = self._resolved.kv_transfer
        assert config is not None, "a feature that nobody has asked for"
        host = load_object(KV_CONNECTORS.load(config.kv_connector).host)
        self.fails, self.seconds = config.kv_load_failure_policy == "fail", config.kv_load_seconds
        self.serve(scheduler, None)
        self.connector: KVConnector = host(self, self._resolved, capacity, config.kv_connector_extra_config)

    def serve(self, scheduler: Scheduler, connector: KVConnector | None) -> None:
        """Begin; the connector may come later."""
        self._scheduler, self._kv = scheduler, scheduler.kv
        self.kinds, self.block_size = self._kv.kinds, self._kv.block_size
        self._transfers = Transfers(self._kv, self.num_ranks)
        self._asked: set[str] = set()  # requests whose load has begun, or that none is there for
        self._failed: dict[str, str | None] = {}
        self._due: dict[Transfer, float] = {}  # loads that are waited for, and until when by `clock`
        self._late: set[Transfer] = set()  # loads that nobody waits for any more
        self._kv.pool.observers.append(self._publishes)
        if connector is not None:
            self.connector = connector

    fails = False  # does a request whose load fails?
    seconds = 20.0  # that a load is waited for
    clock = staticmethod(time.monotonic)

    # The connector's door

    def start(self, what: object) -> Transfer:
        transfer = Transfer()
        self._transfers.begin(transfer, what)
        return transfer

    def end(self, transfer: Transfer, *, ok: bool = True) -> None:
        self._transfers.give_up(transfer)
        self._finish(transfer, ok=ok)

    # The feature's hooks

    def holds(self, seq: Seq, hit: PrefixHit) -> bool:
        """Ask the connector for what is not cached here: once, and again only while pages are short."""
        if seq.request.id in self._asked or self._late:
            return False
        kv, tokens = self._kv, seq.tokens[: seq.max_cached]
        digests = kv.digests(seq.prefix, tokens)
        num = self.connector.lookup(seq.request, digests, hit.num_tokens) // kv.block_size
        num_tokens = num * kv.block_size
        if num_tokens <= hit.num_tokens:
            self._asked.add(seq.request.id)
            return False
        transfer = Transfer(
            seq_id=seq.id,
            is_load=True,
            num_cached=hit.num_tokens,
            num_tokens=num_tokens,
            digests=digests[len(hit.pages) : num],
            origin=(seq.prefix, tokens, len(hit.pages)),
        )
        if not lend_for_load(kv, transfer, self._scheduler.watermark):
            return False
        self._asked.add(seq.request.id)
        self._transfers.begin(transfer, self.connector.load(transfer))
        self._due[transfer] = self.clock() + self.seconds
        return True

    def _publishes(self, kind: int, digests: list[bytes], blocks: Pages, origin: object) -> None:
        """Blocks of a kind can be found from now on."""
        transfer = Transfer(digests=digests, pages=of_kind(self._kv, kind, blocks))
        self._save(transfer, self.connector.published(transfer))

    def vacate(self, seq: Seq, tokens: Tokens, num_computed: int) -> None:
        kv = self._kv
        num = min(num_computed, len(tokens)) // kv.block_size
        if not num or not kv.enable_prefix_caching:
            return
        transfer = Transfer(
            num_tokens=num * kv.block_size,
            digests=kv.digests(seq.prefix, tokens)[:num],
            pages=kv.pages[seq.slot, :num].copy(),
        )
        self._save(transfer, self.connector.left(seq.request, transfer))

    def _save(self, transfer: Transfer, what: object) -> None:
        if what is not None:
            lend_for_save(self._kv, transfer)
            self._transfers.begin(transfer, what)

    def leave(self, request_id: str) -> None:
        self._asked.discard(request_id)

    def carry(self) -> Jobs | None:
        jobs = self._transfers.carry()
        return Jobs(jobs) if jobs else None

    def hear(self, rank: int, said: Ended) -> dict[str, str | None]:
        over = self._transfers.hear(said)
        if over is not None:
            self._finish(over[0], ok=over[1])
        return self._take_failed()

    def poll(self) -> dict[str, str | None]:
        self.connector.poll()
        for transfer in [each for each, due in self._due.items() if due <= self.clock()]:
            self._give_up(transfer)
        return self._take_failed()

    def is_busy(self) -> bool:
        return len(self._transfers) > 0

    def counters(self) -> dict[str, int]:
        return self.connector.counters() | {"kv_loads_late_now": len(self._late)}

    def forget(self) -> None:
        self._transfers.forget()
        self.connector.forget()

    def shutdown(self) -> None:
        if "connector" in self.__dict__:  # else it could not be made
            self.connector.close()

    def _finish(self, transfer: Transfer, *, ok: bool) -> None:
        self.connector.ended(transfer, ok=ok)
        self._transfers.take_back(transfer, ok=ok)
        self._scheduler.look_again()
        self._late.discard(transfer)
        if self._due.pop(transfer, None) is not None:
            self._go_on(transfer, ok=ok)

    def _give_up(self, transfer: Transfer) -> None:
        """Wait no longer; its pages stay lent, for workers may still write there."""
        logger.warning("KV of %d tokens has not come for %g s", transfer.num_tokens, self.seconds)
        del self._due[transfer]
        self._late.add(transfer)
        self._transfers.forget(transfer)
        self._go_on(transfer, ok=False)

    def _go_on(self, transfer: Transfer, *, ok: bool) -> None:
        """Who has waited for a load is admitted, or ends."""
        name = self._scheduler.request_of(transfer.seq_id)
        if self.fails and not ok and name is not None:
            self._failed[name] = "its KV could not be loaded (kv_load_failure_policy is 'fail')"
        self._scheduler.release(transfer.seq_id)

    def _take_failed(self) -> dict[str, str | None]:
        failed, self._failed = self._failed, {}
        return failed
