"""What one process has compiled is found by another, whatever each of them compiled before."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# Says of which functions Triton found no key when it made that of a function that calls them.
FIND = """
from importlib import import_module
from pkgutil import walk_packages
from triton.runtime.jit import DependenciesFinder, JITFunction
import pellucid.kernels
from pellucid.kernels.compile.keys import settle

update, without = DependenciesFinder._update_hash, []

def noting(self, function):
    if function.hash is None:
        without.append((self.name, function.__name__))
    update(self, function)

DependenciesFinder._update_hash = noting
kernels = [
    value
    for module in walk_packages(pellucid.kernels.__path__, "pellucid.kernels.")
    for value in vars(import_module(module.name)).values()
    if isinstance(value, JITFunction)
]
for kernel in reversed(kernels):
    settle(kernel)
assert len(kernels) > 200
assert not without, without
"""


def test_functions_have_keys_before_those_that_call_them() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, "-c", FIND], env=environment, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
