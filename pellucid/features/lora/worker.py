"""Adapters on their way from files to the device, and which token has which.

Those in use are in the banks of the layers, each at its place; the others are in host memory, the least
recently used ones in files alone.  All ranks admit the same requests in the same order, so they put an
adapter to the same place without a word.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pellucid.features.base import WorkerFacts, WorkerFeature
from pellucid.forward import ForwardInput
from pellucid.kernels.slots.gather_rows import owners
from pellucid.lora.bank import LowRank
from pellucid.lora.content import content_of
from pellucid.lora.peft import read_adapter
from pellucid.lora.request import AdapterRef
from pellucid.rows import StepRows
from pellucid.schedule.plan import Admission
from pellucid.transfer import refill
from pellucid.worker.inputs import StepCounts

logger = logging.getLogger(__name__)
NONE = -1  # the place of no adapter


class Adapters:
    """All that have been read, and the places of those on the device."""

    def __init__(self, facts: WorkerFacts) -> None:
        lora = facts.resolved.user.lora
        self._banks, self._adaptable, self._read_own = facts.lora_banks, facts.adaptable, facts.read_own
        self._modules, self._rename = facts.modules | facts.adaptable, facts.rename
        self._ignored = facts.ignored
        self._pins = facts.device.type == "cuda"
        self._most = lora.max_cpu_loras or lora.max_loras
        self._held: OrderedDict[str, dict[str, LowRank]] = OrderedDict()  # the least recently used first
        self._places: OrderedDict[str, int] = OrderedDict()  # the same
        self._free = list(reversed(range(lora.max_loras)))
        # By place, whether the adapter there has something for the head; behind them NONE.
        self.has_head = np.zeros(lora.max_loras + 1, dtype=np.bool_)

    def place(self, ref: str, in_use: Sequence[int]) -> int:
        """Where an adapter is, brought there if need be, for which one that is not `in_use` gives way.

        Raises ValueError for one that cannot be read or does not fit the model.
        """
        if ref not in self._places:
            adapter = self._read(ref)
            place = self._make_room(in_use)
            for bank in self._banks:
                bank.put(place, [adapter.get(prefix) for prefix in bank.prefixes])
            heads = [prefix for bank in self._banks if bank.is_head for prefix in bank.prefixes]
            self.has_head[place] = any(head in adapter for head in heads)
            self._places[ref] = place
        elif ref in self._held:
            self._held.move_to_end(ref)
        self._places.move_to_end(ref)
        return self._places[ref]

    def _make_room(self, in_use: Sequence[int]) -> int:
        if self._free:
            return self._free.pop()
        oldest = next(ref for ref, place in self._places.items() if place not in in_use)
        return self._places.pop(oldest)

    def _read(self, ref: str) -> dict[str, LowRank]:
        """From host memory, or from its files."""
        if ref not in self._held:
            named = AdapterRef.decode(ref)
            adapter = read_adapter(Path(named.path), self._read_own, self._rename)
            adapter = self._without_ignored(named, adapter)
            self._check(named, adapter)
            own = Tensor.pin_memory if self._pins else Tensor.clone  # no view of a file that may change
            adapter = {name: LowRank(*map(own, pair)) for name, pair in adapter.items()}
            if content_of(Path(named.path)) != named.content:
                raise ValueError(
                    f"adapter {named.name!r} was written again while a request for it waited; send it anew"
                )
            self._held[ref] = adapter
            while len(self._held) > self._most:
                self._held.popitem(last=False)
        self._held.move_to_end(ref)
        return self._held[ref]

    def _without_ignored(self, named: AdapterRef, adapter: dict[str, LowRank]) -> dict[str, LowRank]:
        """Without what changes parts that are not computed here, such as what reads images."""
        others = sorted(adapter.keys() - self._modules)
        passed = {
            name for name in others for pattern in self._ignored if fnmatchcase(f"{name}.weight", pattern)
        }
        if passed:
            logger.warning(
                "adapter %r also changes %s, which is not computed here (%d such modules)",
                named.name,
                min(passed),
                len(passed),
            )
        return {name: pair for name, pair in adapter.items() if name not in passed}

    def _check(self, named: AdapterRef, adapter: Mapping[str, LowRank]) -> None:
        """Raise ValueError if some of it fits no layer."""
        experts = sorted(name for name in adapter if ".experts" in name)
        if experts:
            raise ValueError(
                f"adapter {named.name!r} changes {experts[0]}; adapters of linear layers alone are served, "
                "not of mixtures of experts"
            )
        unknown = sorted(adapter.keys() - self._modules)
        if unknown:
            raise ValueError(
                f"adapter {named.name!r} changes {unknown[0]}, which this model does not have "
                f"({len(unknown)} such modules)"
            )
        others = sorted(adapter.keys() - self._adaptable)
        if others:
            raise ValueError(
                f"adapter {named.name!r} changes {others[0]}; adapters of linear layers alone are served, "
                "and of embedding and head, but not of routers, and what makes keys and values of latents; "
                "`pellucid merge` puts it into the model"
            )
        for bank in self._banks:
            for part, prefix in enumerate(bank.prefixes):
                if prefix in adapter:
                    bank.check(part, adapter[prefix])


class Lora(WorkerFeature):
    """Tells the layers which token has which adapter."""

    def __init__(self, facts: WorkerFacts) -> None:
        self._adapters = Adapters(facts)
        num_slots = facts.slots.num_slots + 1
        self._place_of = np.full(num_slots, NONE, dtype=np.int64)  # by slot, of those that have asked
        # As the device has it: places of all, and of those alone that change the head.
        self._sent = np.full((2, num_slots), NONE, dtype=np.int32)
        self._table = torch.full((2, num_slots), NONE, dtype=torch.int32, device=facts.device)
        self._has_head = any(bank.is_head for bank in facts.lora_banks)

    def admit(self, admissions: Sequence[Admission]) -> Mapping[int, str]:
        failed: dict[int, str] = {}
        for admission in admissions:
            self._place_of[admission.slot] = NONE
            ref = admission.ride.get("lora")
            if ref is None:  # the warm-up: banks are zeros
                self._place_of[admission.slot] = 0
                continue
            try:
                self._place_of[admission.slot] = self._adapters.place(ref, self._place_of.tolist())
            except (ValueError, OSError) as error:
                logger.warning("%s", error)
                failed[admission.slot] = str(error)
        return failed

    def retire(self, slots: Sequence[int]) -> None:
        self._place_of[slots] = NONE

    def before(self, counts: StepCounts, ride: None) -> None:
        """Rows of the step that ask have an adapter, the others none."""
        slots = counts.slots
        places = np.where(counts.riders.asked & counts.riders.bit_of["lora"], self._place_of[slots], NONE)
        both = np.stack([places, np.where(self._adapters.has_head[places], places, NONE)])
        if not np.array_equal(self._sent[:, slots], both):
            self._sent[:, slots] = both
            refill(self._table, self._sent.copy())

    def extend(self, rows: StepRows, fwd: ForwardInput) -> None:
        _, row = owners(rows.cu_query, rows.num_tokens)
        slots = rows.slots[row]
        fwd.adapters = self._table[0, slots]
        if self._has_head:
            fwd.of_head = (self._table[1, slots],)
