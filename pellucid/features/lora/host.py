"""Which requests have adapters, and how many may run beside each other."""

from __future__ import annotations

from collections.abc import Sequence

from pellucid.features.base import HostFeature
from pellucid.resolve import Resolved
from pellucid.schedule.sequence import Sequence as Seq
from pellucid.types import Request


class Lora(HostFeature):
    """A request names its adapter; the worker's half finds its files."""

    def __init__(self, resolved: Resolved) -> None:
        self._max_loras = resolved.user.lora.max_loras

    def asks(self, request: Request) -> bool:
        return request.lora is not None

    def enter(self, seq: Seq) -> str | None:
        return seq.request.lora

    def gate(self, seq: Seq, beside: Sequence[Seq]) -> bool:
        """There is room on the device for so many adapters."""
        adapters = {other.request.lora for other in beside} | {seq.request.lora}
        return len(adapters) <= self._max_loras
