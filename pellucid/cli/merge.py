"""`pellucid merge MODEL ADAPTER OUT`: a checkpoint with a LoRA adapter of peft's in its weights."""

from __future__ import annotations

import argparse
from pathlib import Path

from pellucid.cli.console import terminal

GIB = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `merge` understands."""
    parser.add_argument("name", metavar="MODEL", help="the plain model: a folder, hub id, or sprout")
    parser.add_argument("adapter", metavar="ADAPTER", type=Path, help="folder with adapter_config.json")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to make")


def run(args: argparse.Namespace) -> int:
    """Merge, and print what was done."""
    from pellucid.config import ModelConfig
    from pellucid.lora.merge import merge
    from pellucid.models.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(ModelConfig(model=args.name))
    done = merge(checkpoint, args.adapter, args.out)
    whole = f", {done.num_whole} tensors replaced" if done.num_whole else ""
    untied = "; head and embedding are two now" if done.is_untied else ""
    terminal().print(
        f"{args.out}: {done.num_matrices} matrices changed{whole}, {done.num_bytes / GIB:.3f} GiB{untied}"
    )
    return 0
