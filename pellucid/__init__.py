"""Pellucid: an LLM inference engine that one person can read in an afternoon.

The public names; each is imported when first used, so `import pellucid` costs milliseconds.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pellucid.async_llm import AsyncLLM as AsyncLLM
    from pellucid.config import EngineConfig as EngineConfig
    from pellucid.llm import LLM as LLM
    from pellucid.llm_engine import LLMEngine as LLMEngine
    from pellucid.lora.request import LoRARequest as LoRARequest
    from pellucid.sampling_params import SamplingParams as SamplingParams
    from pellucid.sampling_params import StructuredOutputsParams as StructuredOutputsParams
    from pellucid.types import RequestOutput as RequestOutput

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "EngineConfig",
    "LLMEngine",
    "LoRARequest",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]

_HOMES = {
    "LLM": "pellucid.llm",
    "AsyncLLM": "pellucid.async_llm",
    "LLMEngine": "pellucid.llm_engine",
    "LoRARequest": "pellucid.lora.request",
    "EngineConfig": "pellucid.config",
    "SamplingParams": "pellucid.sampling_params",
    "StructuredOutputsParams": "pellucid.sampling_params",
    "RequestOutput": "pellucid.types",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'pellucid' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def _pin_openmp_threads() -> None:
    """Give each OpenMP thread its own core; unpinned, two often share one and a CPU runs 2 to 8 times slower.

    OpenMP reads this when torch loads it, so it must be said before.  Whoever has said anything to OpenMP
    keeps the whole say: pinned threads of several processes would share the same cores.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        # What waits for work between two calls leaves the core to other threads of this process soon.
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    said = any(name in os.environ for name in ("OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES"))
    if said or "torch" in sys.modules or os.path.exists("/dev/nvidiactl"):
        return
    from pellucid import platform  # counts the cores, before one thread is bound to one of them

    os.environ["OMP_NUM_THREADS"] = str(platform.NUM_CORES)
    os.environ["OMP_PROC_BIND"] = "close"
    os.environ["OMP_PLACES"] = "cores"


_pin_openmp_threads()
