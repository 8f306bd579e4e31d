"""A connector for tests, which ends its transfers when told to."""

from __future__ import annotations

from collections.abc import Sequence

from pellucid.connectors.base import TransferEnd
from pellucid.kv.manager import Transfer
from pellucid.types import Request


class Store:
    """A connector that promises `num_tokens` of every prompt, may save all, and ends when asked."""

    def __init__(self, num_tokens: int = 0, saves: bool = False) -> None:
        self.num_tokens, self.saves = num_tokens, saves
        self.num_lookups = 0
        self.pending: list[object] = []
        self.active: list[Transfer] = []
        self.ends: list[TransferEnd] = []

    def lookup(self, request: Request, digests: Sequence[bytes], num_cached: int) -> int:
        self.num_lookups += 1
        return min(self.num_tokens, len(digests) * 4)

    def reserved(self, transfer: Transfer) -> None:
        self.pending.append(transfer)
        self.active.append(transfer)

    def plan_meta(self) -> list[object]:
        meta, self.pending = self.pending, []
        return meta

    def finished(self, request: Request, transfer: Transfer) -> bool:
        if self.saves:
            self.reserved(transfer)
        return self.saves

    def update(self, kv_done: list[object]) -> list[TransferEnd]:
        ends, self.ends = self.ends, []
        return ends

    def end(self, ok: bool = True) -> None:
        self.ends += [TransferEnd(transfer, ok) for transfer in self.active]
        self.active = []
