"""`pellucid agent`: one of several machines, which does what the one of rank 0 says."""

from __future__ import annotations

import argparse

from pellucid.cli.options import add_section, chosen
from pellucid.config import ParallelConfig
from pellucid.progress import tell
from pellucid.registry import load_object

OPTIONS = ("master_addr", "master_port", "node_rank", "node_addr")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `agent` understands."""
    add_section(parser, "node", ParallelConfig, only=OPTIONS)
    parser.add_argument("--once", action="store_true", help="end with the first head, wait for no other one")


def run(args: argparse.Namespace) -> int:
    """Serve one head after the other, until Ctrl-C or SIGTERM; with --once, one alone."""
    given = chosen(args, OPTIONS)
    rank = given.pop("node_rank", None)
    parallel = ParallelConfig(**given)  # type: ignore[arg-type]
    while True:
        serve(parallel, rank=rank)  # type: ignore[arg-type]
        if args.once:
            return 0


def serve(parallel: ParallelConfig, *, rank: int | None) -> None:
    """Be a node of the head that these options name, until that ends.  rank: None is any that is free."""
    address, port = parallel.head
    tell(f"a node for {address}:{port}")
    load_object("pellucid.nodes.agent:serve_head")(address, port, rank=rank, host=parallel.node_addr)
