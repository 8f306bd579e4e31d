"""A tiny plain checkpoint, and what is needed to quantize it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pellucid.config import ModelConfig
from pellucid.models.checkpoint import Checkpoint
from pellucid.quantize.base import Recipe
from pellucid.quantize.run import Quantizer, Samples
from pellucid.quantize.stage import Machine
from tests.models.harness import CPU
from tests.tiny import write_checkpoint

MACHINE = Machine(CPU, torch.device("cpu"))
Quantize = Callable[..., Quantizer]


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "plain", hidden_size=64, intermediate_size=128, num_hidden_layers=2)


def samples(num: int = 6, length: int = 24) -> Samples:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 200, (num + 1, length), generator=draw).tolist()
    return Samples(name="random", learned=ids[:num], heldout=ids[num:], heldout_bytes=100)


def quantizer(plain: Path | str, out: Path, learned: Samples | None = None, **options: object) -> Quantizer:
    checkpoint = Checkpoint.open(ModelConfig(model=str(plain)))
    recipe = Recipe(**{"group_size": 32, **options})  # type: ignore[arg-type]
    return Quantizer(checkpoint, out, recipe, learned or samples(), MACHINE)
