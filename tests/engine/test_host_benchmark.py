"""benchmarks/host.py takes the engine apart, so it breaks when the engine's parts change."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_it_shows_what_the_host_does_in_a_step() -> None:
    sizes = ["--requests", "4", "--input-len", "20", "--output-len", "12", "--repeat", "1"]
    done = subprocess.run(
        [sys.executable, "benchmarks/host.py", *sizes],
        check=False, cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "whole" in done.stdout and "us a step" in done.stdout, done.stdout
