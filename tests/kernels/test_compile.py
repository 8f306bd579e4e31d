"""The kernels compile for a GPU, which the interpreter that the other tests run under does not tell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
LIMIT = 160 * 1024  # bytes of shared memory a program may take
HOPPER_LIMIT = 227 * 1024
SMALL = 99 * 1024  # of Ada, and of Blackwell but for data centres
HOPPER = ("hopper", "persistent")  # kernels for nothing else


def run(module: str, *arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        check=False,
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.mark.parametrize("num_workers,found", [(0, 0), (2, 4)], ids=["threads", "processes"])
def test_what_is_launched_may_be_compiled_instead(tmp_path: Path, num_workers: int, found: int) -> None:
    done = run("tests.kernels.compile_together", str(num_workers), cache=tmp_path)
    assert done.stdout == f"compiled [2, 2], found {found}\n", done.stderr


@pytest.mark.parametrize(
    "variants", [(), pytest.param(("--all",), marks=pytest.mark.matrix)], ids=["few", "all"]
)
def test_every_kernel_compiles_and_fits_shared_memory(
    pytestconfig: pytest.Config, variants: tuple[str, ...]
) -> None:
    """What an earlier run has compiled, of the same source by the same compiler, is looked at again."""
    cache = pytestconfig.cache
    assert cache is not None
    done = run("tests.kernels.compile_kernels", *variants, cache=cache.mkdir("triton"))
    assert done.returncode == 0, done.stderr
    sizes = [line.split() for line in done.stdout.splitlines()]
    assert len(sizes) >= (200 if variants else 60)
    limits = [
        HOPPER_LIMIT
        if name.startswith(HOPPER) or "90" in rest
        else SMALL
        if {"89", "120"} & {*rest}
        else LIMIT
        for name, *rest, _ in sizes
    ]
    assert all(int(size) <= limit for (*_, size), limit in zip(sizes, limits, strict=True)), done.stdout
