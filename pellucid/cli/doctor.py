"""`pellucid doctor`: what this machine is, what keeps an engine from running well on it, and what to do."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from pellucid.cli.console import terminal

if TYPE_CHECKING:
    from pellucid.doctor.finding import Finding

SIGNS = {"ok": "  ", "warning": "! ", "error": "X "}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="write one JSON object instead of lines")
    parser.add_argument("--host", default="127.0.0.1", help="where a server is to listen")
    parser.add_argument("--port", type=int, default=8000, help="its port, default 8000")
    parser.add_argument(
        "--master-addr", default="127.0.0.1", help="address of the node of rank 0, if this is it"
    )
    parser.add_argument("--master-port", type=int, default=29501, help="its port for other nodes")
    parser.add_argument("--no-links", action="store_true", help="measure no copies to and between GPUs")


def run(args: argparse.Namespace) -> int:
    """0: nothing is wrong, whatever might be better; 1: something will not run."""
    from pellucid.doctor.examine import examine

    ports = {
        "a server": (args.host, args.port),
        "nodes to meet": (args.master_addr, args.master_port),
    }
    findings = examine(ports, measures_links=not args.no_links)
    num = {verdict: sum(each.verdict == verdict for each in findings) for verdict in SIGNS}
    if args.json:
        shown = {
            "findings": [asdict(each) for each in findings],
            "errors": num["error"],
            "warnings": num["warning"],
        }
        sys.stdout.write(json.dumps(shown) + "\n")
    else:
        show(findings)
        sys.stdout.write(f"{num['error']} errors, {num['warning']} warnings\n")
    return 1 if num["error"] else 0


def show(findings: list[Finding]) -> None:
    console = terminal()
    width = max(len(each.name) for each in findings)
    for each in findings:
        line = f"{SIGNS[each.verdict]}{each.name:{width}}  {each.said}"
        console.print(
            line,
            style={"ok": "", "warning": "yellow", "error": "red"}[each.verdict],
            markup=False,
            soft_wrap=True,
        )
        if each.advice:
            console.print(f"{'':{width + 4}}-> {each.advice}", markup=False, soft_wrap=True)
