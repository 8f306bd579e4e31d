"""Weights on their way to host memory and back.

What moves is the memory under tensors, and never a tensor: whoever holds one, or a view of one, finds it
filled again at another address.  So nothing may know addresses meanwhile, which recorded steps do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, UntypedStorage, nn

from pellucid.worker.abridged import parts_of

# Whose memory is shared with other processes.
SHARED = ("pellucid.dist", "pellucid.kernels.ranks.all_reduce")


class HostWeights:
    """The weights of some models, while they are in host memory."""

    def __init__(self, models: Iterable[nn.Module], device: torch.device) -> None:
        """Move all that can be moved from `device`."""
        self._away = [(storage, moved_out(storage)) for storage in storages_of(models, device)]

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for _, copy in self._away)

    def restore(self) -> None:
        """Move it back; of no use afterwards."""
        for storage, copy in self._away:
            storage.resize_(copy.nbytes)
            bytes_of(storage).copy_(copy, non_blocking=True)
        if any(copy.is_pinned() for _, copy in self._away):
            torch.cuda.synchronize()
        self._away = []


def moved_out(storage: UntypedStorage) -> Tensor:
    """A copy in host memory, pinned where that speeds it up; the storage is empty."""
    source = bytes_of(storage)
    copy = torch.empty(source.shape, dtype=torch.uint8, pin_memory=source.device.type == "cuda")
    copy.copy_(source)
    storage.resize_(0)
    return copy


def bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


def storages_of(models: Iterable[nn.Module], device: torch.device) -> list[UntypedStorage]:
    """The memory of all tensors there, each once."""
    found: dict[int, UntypedStorage] = {}
    for tensor in tensors_of(list(models)):
        if tensor.device == device and tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            if storage.resizable() and storage.nbytes():
                found[storage.data_ptr()] = storage
    return list(found.values())


def tensors_of(root: object) -> Iterator[Tensor]:
    """All that an object holds, however deep; what shares memory with other processes is left out."""
    seen, pending = set[int](), [root]
    while pending:
        value = pending.pop()
        if isinstance(value, Tensor):
            yield value
        elif id(value) not in seen and not type(value).__module__.startswith(SHARED):
            seen.add(id(value))
            pending += [part for _, part in parts_of(value) if not isinstance(part, str | int | float)]
