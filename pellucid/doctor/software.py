"""What is installed, in which versions, and the variables that ranks are handed."""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from pellucid import __version__
from pellucid.doctor.finding import Finding, error, ok, warning
from pellucid.nodes.connection import SECRET, SHORTEST
from pellucid.nodes.launcher import PASSED

EXTRAS = {  # of which packages one lacks
    "serve": ("fastapi", "uvicorn", "xgrammar", "prometheus_client"),
    "ray": ("ray",),
    "transformers": ("transformers",),
}
OWN = ("CUDA_VISIBLE_DEVICES", "TRITON_", "OMP_", "KMP_", "PYTORCH_")
LATE = "NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT"  # old names, which torch warns of


def versions() -> Iterator[Finding]:
    yield ok("Pellucid", f"{__version__}, Python {platform.python_version()}, {platform.platform()}")
    try:
        import torch
    except Exception as failure:
        yield error("torch", f"cannot be imported: {failure}", "install it: pip install torch")
        return
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    yield ok("torch", f"{torch.__version__}, built for {built}")
    if torch.version.cuda:
        yield from _triton()
        from torch.cuda import nccl

        yield ok("NCCL", ".".join(map(str, nccl.version())))


def _triton() -> Iterator[Finding]:
    try:
        yield ok("Triton", version("triton"))
    except PackageNotFoundError:
        yield error(
            "Triton", "is not installed", "pip install 'pellucid[cuda]': the kernels are written in it"
        )


def extras() -> Iterator[Finding]:
    for name, packages in EXTRAS.items():
        missing = [each for each in packages if importlib.util.find_spec(each) is None]
        if missing:
            yield ok(f"extra {name}", f"not installed ({', '.join(missing)}): pip install 'pellucid[{name}]'")
        else:
            yield ok(f"extra {name}", "installed")


def variables() -> Iterator[Finding]:
    """Those of communication go to ranks on other nodes, too; all go to ranks of this one."""
    for name, value in sorted(os.environ.items()):
        if name.startswith(PASSED):
            if name in LATE:
                yield warning(name, f"{value}, an old name", f"TORCH_{name}")
            else:
                yield ok(name, f"{value} (passed to every worker)")
        elif name.startswith(OWN):
            yield ok(name, value)
    secret = os.environ.get(SECRET, "")
    if secret and len(secret.encode()) < SHORTEST:
        advice = f"export {SECRET}=$(openssl rand -hex 16), the same on all nodes"
        yield error(SECRET, f"has {len(secret)} characters, must have {SHORTEST}", advice)
    else:
        yield ok(SECRET, "is set" if secret else "is not set: several machines, and KV between them, need it")
