"""Several connectors beside the scheduler: a load is whose store has most; all may save and keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pellucid.connectors.base import KEEP, KV_CONNECTORS, Door, KVConnector
from pellucid.connectors.lending import Transfer
from pellucid.connectors.multi.options import each_resolved
from pellucid.registry import load_object
from pellucid.types import Request

if TYPE_CHECKING:
    from pellucid.executor.base import Capacity
    from pellucid.resolve import Resolved


class OneDoor:
    """The door, as one of the connectors sees it: its jobs go to its own half in workers."""

    def __init__(self, door: Door, index: int, owners: dict[Transfer, int]) -> None:
        self._door, self._index, self._owners = door, index, owners
        self.kinds, self.block_size, self.num_ranks = door.kinds, door.block_size, door.num_ranks

    def start(self, what: object) -> Transfer:
        transfer = self._door.start([[self._index, what, None]])
        self._owners[transfer] = self._index
        return transfer

    def end(self, transfer: Transfer, *, ok: bool = True) -> None:
        self._door.end(transfer, ok=ok)


@dataclass(frozen=True, slots=True)
class Part:
    """What one connector does with a transfer that several share."""

    index: int
    transfer: Transfer  # its own: the same blocks, of which it may leave some out


class Multi:
    """See `KVConnector`.  A job's `what`: a list of [connector, its own, its pages; None is all]."""

    def __init__(
        self, door: Door, resolved: Resolved, capacity: Capacity, options: Mapping[str, object]
    ) -> None:
        self._owners: dict[Transfer, int] = {}  # of what one of them does alone
        self._each: list[KVConnector] = []
        for index, own in enumerate(each_resolved(resolved)):
            config = own.kv_transfer
            assert config is not None
            made = load_object(KV_CONNECTORS.load(config.kv_connector).host)
            one = OneDoor(door, index, self._owners)
            self._each.append(made(one, own, capacity, config.kv_connector_extra_config))
        self._chosen = 0  # for the load that comes next

    def lookup(self, request: Request, digests: Sequence[bytes], num_cached: int) -> int:
        found = [each.lookup(request, digests, num_cached) for each in self._each]
        self._chosen = max(range(len(found)), key=found.__getitem__)
        return found[self._chosen]

    def load(self, transfer: Transfer) -> object:
        self._owners[transfer] = self._chosen
        return [[self._chosen, self._each[self._chosen].load(transfer), None]]

    def published(self, transfer: Transfer) -> object:
        return self._shared(transfer, lambda each, own: each.published(own))

    def left(self, request: Request, transfer: Transfer) -> object:
        return self._shared(transfer, lambda each, own: each.left(request, own))

    def _shared(self, transfer: Transfer, ask: Callable[[KVConnector, Transfer], object]) -> object:
        """Whoever wants the blocks reads them behind the same plan."""
        parts, what = list[Part](), list[list[object]]()
        for index, each in enumerate(self._each):
            own = Transfer(
                num_tokens=transfer.num_tokens, digests=transfer.digests, pages=transfer.pages.copy()
            )
            wanted = ask(each, own)
            assert wanted is not KEEP, "what is kept without a job belongs to one connector"
            if wanted is not None:
                parts.append(Part(index, own))
                what.append([index, wanted, own.pages[own.pages > 0].tolist()])
        transfer.meta = parts
        return what or None

    def ended(self, transfer: Transfer, *, ok: bool) -> None:
        owner = self._owners.pop(transfer, None)
        if owner is not None:
            self._each[owner].ended(transfer, ok=ok)
            return
        parts = transfer.meta
        assert isinstance(parts, list)
        for part in parts:
            assert isinstance(part, Part)
            self._each[part.index].ended(part.transfer, ok=ok)

    def forget(self) -> None:
        for each in self._each:
            each.forget()

    def poll(self) -> None:
        for each in self._each:
            each.poll()

    def counters(self) -> dict[str, int]:
        return {name: num for each in self._each for name, num in each.counters().items()}

    def close(self) -> None:
        for each in self._each:
            each.close()
