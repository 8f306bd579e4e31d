"""`pellucid inspect MODEL`: how its weights are stored, and what multiplies them on this machine."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from pellucid.cli.console import terminal
from pellucid.cli.options import add_engine_options, engine_options

if TYPE_CHECKING:
    from pellucid.models.kinds import Kind

GIB = 1 << 30
ACTIVATIONS = ("bfloat16", "float16", "float32")  # whatever the format; `dtype` chooses


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--json", action="store_true", help="write one JSON object instead of a table")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Read headers and configs alone."""
    import torch

    from pellucid.config import EngineConfig
    from pellucid.models.checkpoint import Checkpoint
    from pellucid.models.inspect import inspect
    from pellucid.platform import OLDEST_GPU, detect
    from pellucid.resolve import resolve

    named = {} if args.name is None else {"model": args.name}
    config = EngineConfig.from_options(engine_options(args) | named | {"skip_tokenizer_init": True})
    checkpoint, platform = Checkpoint.open(config.model), detect(config.device.device)
    resolved = resolve(config, platform, checkpoint)
    dtype = getattr(torch, resolved.dtype)
    kinds = inspect(checkpoint, platform, dtype=dtype, quantization=config.device.quantization)
    facts = {
        "model": checkpoint.name,
        "architecture": checkpoint.architecture,
        "dtype": resolved.dtype,
        "device": platform.name,
        "max_model_len": resolved.max_model_len,
        "activations": ", ".join(ACTIVATIONS),
        "min_capability": ".".join(map(str, OLDEST_GPU)),
    }
    if args.json:
        rows = [asdict(kind) | {"bits": round(kind.bits, 3)} for kind in kinds]
        sys.stdout.write(json.dumps(facts | {"matrices": rows}) + "\n")
    else:
        terminal().print(", ".join(f"{name} {value}" for name, value in facts.items()))
        show(kinds)
    return 0


def show(kinds: list[Kind]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("matrices", "stored as", "bits", "GiB", "kept: GiB", "multiplied here"):
        table.add_column(column, justify="right" if column in ("bits", "GiB", "kept: GiB") else "left")
    for kind in kinds:
        table.add_row(
            f"{kind.num_matrices} x {kind.names}",
            kind.stored,
            f"{kind.bits:.2f}" if kind.file_bytes else "",
            f"{kind.file_bytes / GIB:.3f}" if kind.file_bytes else "",
            f"{kind.kept_bytes / GIB:.3f}",
            kind.served,
        )
    terminal().print(table)
