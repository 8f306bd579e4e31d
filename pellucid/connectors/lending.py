"""Pages that are lent to a connector, which reads and writes them out of stream order."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pellucid.kv.manager import KVManager
from pellucid.kv.pool import Pages


@dataclass(slots=True, eq=False, kw_only=True)
class Transfer:
    """Some blocks, until every rank has said that it has ended."""

    seq_id: int = -1  # that waits for it; -1: none does
    is_load: bool = False  # the connector writes them; otherwise it reads
    num_cached: int = 0  # tokens before these blocks
    num_tokens: int = 0  # tokens up to the end of these blocks
    digests: list[bytes] = field(default_factory=list[bytes])  # one a block
    # Of a load: prefix, tokens, and the first block's place, as `KVManager.publish` says them.
    origin: object = None
    # [blocks, pages of a block], those of a kind side by side; 0 is not there: a window does not reach it.
    pages: Pages = field(default_factory=lambda: np.zeros((0, 1), dtype=np.int32))
    meta: object = None  # the connector's own
    copy_seconds: float = 0.0  # of the rank whose copies took longest, of who counts them


def lend_for_load(kv: KVManager, transfer: Transfer, num_spare: int) -> bool:
    """Take pages for a connector to write.  False if fewer than `num_spare` stay.

    Of a window those blocks that the next query sees, and that a hit up to `num_cached` does not bring.
    """
    pages = np.zeros((len(transfer.digests), kv.pages_a_block), dtype=np.int32)
    for kind, _, which in kv.stripes:
        first = kv.first_kept(kind, transfer.num_tokens) - transfer.num_cached // kv.block_size
        pages[max(0, first) :, which] = 1
    needed = int(np.count_nonzero(pages))
    if kv.pool.num_free < needed + num_spare:
        return False
    pages[pages > 0] = kv.pool.take(needed)
    transfer.pages = pages
    kv.lent[transfer] = None
    return True


def lend_for_save(kv: KVManager, transfer: Transfer) -> None:
    """Hold the pages that a connector will read."""
    kv.hold(transfer.pages)
    kv.lent[transfer] = None


def take_back(kv: KVManager, transfer: Transfer, *, publish: bool) -> None:
    """A transfer has ended: publish what a load brought, if it did, and drop the pages."""
    del kv.lent[transfer]
    for i, where, blocks in kv.by_kind(transfer.pages):
        if publish:
            kv.pool.publish(i, blocks, map(transfer.digests.__getitem__, where), transfer.origin)
        kv.pool.drop(blocks[::-1])


def of_kind(kv: KVManager, kind: int, blocks: Pages) -> Pages:
    """Blocks of one kind [n, stripes] as pages of all, 0 where the others are."""
    pages = np.zeros((len(blocks), kv.pages_a_block), dtype=np.int32)
    pages[:, kv.stripes[kind].which] = blocks
    return pages
