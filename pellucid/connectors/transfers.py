"""Pages that are lent to the KV connector, which reads and writes them out of stream order (law 5).

A load is asked for before a sequence has slot or pages; a save is offered when a sequence leaves its slot.
"""

from __future__ import annotations

from collections.abc import Iterator

from pellucid.connectors.base import KVConnector, NullConnector
from pellucid.kv.hashes import Tokens
from pellucid.kv.manager import KVManager, PrefixHit, Transfer
from pellucid.schedule.sequence import Sequence


class Transfers:
    """Lends, and takes back when the connector says that a transfer has ended on every rank."""

    def __init__(self, kv: KVManager, connector: KVConnector) -> None:
        self._kv, self._connector = kv, connector
        self._active: list[Transfer] = []
        self._may_save = kv.enable_prefix_caching and not isinstance(connector, NullConnector)

    def __len__(self) -> int:
        return len(self._active)

    def __iter__(self) -> Iterator[Transfer]:
        return iter(self._active)

    def start_load(self, seq: Sequence, hit: PrefixHit, num_spare: int) -> bool:
        """Ask the connector for what is not cached here: once, and again only while pages are short."""
        if not seq.may_load:
            return False
        kv, tokens = self._kv, seq.tokens[: seq.max_cached]
        digests = kv.digests(seq.prefix, tokens)
        num = self._connector.lookup(seq.request, digests, hit.num_tokens) // kv.block_size
        num_tokens = num * kv.block_size
        seq.may_load = num_tokens > hit.num_tokens
        if not seq.may_load:
            return False
        transfer = Transfer(
            seq_id=seq.id,
            is_load=True,
            num_cached=hit.num_tokens,
            num_tokens=num_tokens,
            digests=digests[len(hit.pages) : num],
        )
        if not kv.lend_for_load(transfer, num_spare):
            return False
        seq.may_load = False
        self._active.append(transfer)
        self._connector.reserved(transfer)
        return True

    def offer_for_save(self, seq: Sequence, tokens: Tokens, num_computed: int) -> None:
        """Before a sequence's pages are dropped; what the connector wants to read stays held."""
        kv = self._kv
        num = min(num_computed, len(tokens)) // kv.block_size
        if not num or not self._may_save:
            return
        transfer = Transfer(
            seq_id=seq.id,
            is_load=False,
            num_cached=0,
            num_tokens=num * kv.block_size,
            digests=kv.digests(seq.prefix, tokens)[:num],
            pages=kv.pages_of(seq.slot, num),
        )
        if self._connector.finished(seq.request, transfer):
            kv.lend_for_save(transfer)
            self._active.append(transfer)

    def plan_meta(self) -> list[object]:
        return self._connector.plan_meta()

    def end(self, kv_done: list[object]) -> list[int]:
        """Take back what has ended, publish what loads brought.  Returns ids of sequences that waited."""
        loaded: list[int] = []
        for end in self._connector.update(kv_done):
            transfer = end.transfer
            self._active.remove(transfer)
            self._kv.take_back(transfer, publish=transfer.is_load and end.ok)
            if transfer.is_load:
                loaded.append(transfer.seq_id)
        return loaded
