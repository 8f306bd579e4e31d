"""Host to device without waiting: the only way that plans' numbers reach the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy a host array to the device in stream order.  The array must not change afterwards.

    On a CPU the tensor shares the array's memory.
    """
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def refill(buffer: Tensor, array: np.ndarray) -> None:
    """Copy a host array over a buffer there, in stream order.  The array must not change afterwards."""
    tensor = torch.from_numpy(array)
    buffer.copy_(tensor.pin_memory() if buffer.is_cuda else tensor, non_blocking=True)
