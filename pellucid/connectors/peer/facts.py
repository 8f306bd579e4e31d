"""In what two engines must agree before one may read the other's pages: names and values."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from pellucid.connectors.peer.wire import VERSION, Facts
from pellucid.executor.base import Capacity
from pellucid.models.checkpoint import Checkpoint
from pellucid.resolve import Resolved

SAMPLE = 1 << 16  # bytes at either end of a file of weights


def facts_of(resolved: Resolved, capacity: Capacity) -> Facts:
    """What a page's bytes depend on."""
    draft = resolved.draft
    return {
        "the protocol": str(VERSION),
        "the model": fingerprint(resolved.checkpoint, resolved.user.model.seed),
        "the drafter": "none" if draft is None else fingerprint(draft, resolved.user.model.seed),
        "dtype": resolved.dtype,
        "kv_cache_dtype": resolved.kv_dtype,
        "quantization": str(resolved.user.device.quantization),
        "attention": str(resolved.user.device.attention_backend),
        "block_size": str(resolved.block_size),
        "the kinds of KV": ", ".join(map(str, capacity.kinds)),
        "bytes of a page": str(capacity.page_bytes),
        "tensor_parallel_size": str(resolved.user.parallel.tensor_parallel_size),
        "layers of the pipeline's stages": ", ".join(map(str, resolved.stage_layers)),
    }


def fingerprint(checkpoint: Checkpoint, seed: int) -> str:
    """Of a model: its name, and a hash of its config and of samples of its files, wherever they lie."""
    digest = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True, default=str).encode())
    for file in sorted(checkpoint.files, key=lambda file: file.name):
        digest.update(f"{file.name} {file.stat().st_size}".encode())
        digest.update(sample(file))
    if checkpoint.is_dummy:
        digest.update(str(seed).encode())
    return f"{Path(checkpoint.name).name} {digest.hexdigest()[:16]}"


def sample(file: Path) -> bytes:
    """Both ends: names and sizes of tensors, and some of their values."""
    with file.open("rb") as data:
        beginning = data.read(SAMPLE)
        data.seek(max(0, file.stat().st_size - SAMPLE))
        return beginning + data.read(SAMPLE)
