"""An adapter merged into the weights of its model: W + B A, a checkpoint that needs no adapter any more.

Of one tensor after the other, so it takes the memory of a shard.  Sums are float32 and rounded once, to what
the checkpoint's weights are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from pellucid.lora.peft import Adapter, read_all
from pellucid.lora.peft_config import read_config
from pellucid.models.checkpoint import Checkpoint, read_json
from pellucid.models.loader import open_source
from pellucid.quantize.output import INDEX, copy_configs
from pellucid.weights.source import TensorSource

MERGED = frozenset({"use_dora", "modules_to_save", "bias"})  # what can be merged, and not be served
SHARD_BYTES = 4 << 30
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
WRAPPERS = {"model", "language_model"}  # parts of a path that some classes have around others
WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class Merged:
    """What was done."""

    num_matrices: int  # that an adapter has changed
    num_whole: int  # tensors that it has replaced
    num_bytes: int
    is_untied: bool  # head and embedding were one, and are two now


def merge(checkpoint: Checkpoint, folder: Path, out: Path) -> Merged:
    """Write to `out` what `checkpoint` is with the adapter in `folder`.

    Raises ValueError for a checkpoint that is quantized, and for an adapter that does not fit.
    """
    refuse_codes(checkpoint)
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty; name another folder")
    adapter = read_all(folder, read_config(folder, MERGED))
    source = open_source(checkpoint, lambda key: key)
    config = read_json(checkpoint.path / "config.json")
    has_head = any(bare_name(name) == HEAD for name in source.infos)
    is_tied = not has_head or bool(checkpoint.config.get("tie_word_embeddings"))
    merger = Merger(source, adapter, is_tied=is_tied)
    out.mkdir(parents=True, exist_ok=True)
    num_bytes = write_shards(out, merger.tensors())
    if merger.unties:
        for part in (config, config.get("text_config")):
            if isinstance(part, dict):
                part["tie_word_embeddings"] = False
    (out / "config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False), encoding="utf-8")
    copy_configs(checkpoint.path, out)
    return Merged(
        num_matrices=len(adapter.pairs) + len(adapter.embeddings),
        num_whole=len(adapter.whole),
        num_bytes=num_bytes,
        is_untied=merger.unties,
    )


def refuse_codes(checkpoint: Checkpoint) -> None:
    """Raise ValueError for weights that are no numbers which could be added to."""
    config = checkpoint.config.get("quantization_config") or checkpoint.config.get("compression_config")
    kind = config.get("quant_method", "codes") if isinstance(config, Mapping) else None
    if any(file.suffix == ".gguf" for file in checkpoint.files):
        kind = "gguf"
    if checkpoint.is_dummy or not checkpoint.files:
        raise ValueError(f"{checkpoint.name} has no weights to merge into; name a checkpoint with files")
    if kind is not None or checkpoint.side:
        raise ValueError(
            f"{checkpoint.name} is quantized ({kind or next(iter(checkpoint.side))}), and a sum would be "
            "rounded to its codes; merge into the plain checkpoint that it was made of, and then `pellucid "
            "quantize` the result; or serve it with --enable-lora"
        )


class Merger:
    """A checkpoint's tensors as they are with an adapter."""

    def __init__(self, source: TensorSource, adapter: Adapter, *, is_tied: bool) -> None:
        """is_tied: the head is the embedding.  Raises ValueError for what does not fit."""
        self.source, self.adapter = source, adapter
        targets = {bare_name(name): name for name in source.infos}
        embedding = next((name for name in source.infos if name.endswith(EMBEDDING)), None)
        changed = {*(f"{path}{WEIGHT}" for path in (*adapter.pairs, *adapter.embeddings)), *adapter.whole}
        ties = is_tied and embedding is not None
        touches = any(name.endswith((HEAD, EMBEDDING)) for name in changed)
        self.unties = ties and touches
        # Where a tensor of the result comes from.
        self.places: dict[str, str] = {name: name for name in source.infos}
        if self.unties and embedding is not None:
            self.places[HEAD], targets[HEAD] = embedding, HEAD
        unknown = sorted(name for name in changed if bare_name(name) not in targets)
        if unknown:
            raise ValueError(
                f"the adapter changes {unknown[0]}, which this checkpoint does not have "
                f"({len(unknown)} such tensors); is it another model's?"
            )
        # Names of ours, to the adapter's.
        self._of = {targets[bare_name(name)]: name for name in changed}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All of the result, in the order of the files."""
        for name, place in self.places.items():
            base, its = self.source.read(place), self._of.get(name)
            yield name, base if its is None else self._changed(name, base, its)

    def _changed(self, name: str, base: Tensor, its: str) -> Tensor:
        adapter, path = self.adapter, its.removesuffix(WEIGHT)
        weight = adapter.whole.get(its, base)
        if weight.shape != base.shape:
            raise ValueError(f"{its} is {tuple(weight.shape)} in the adapter, {tuple(base.shape)} in {name}")
        delta = None
        if path in adapter.pairs:
            down, up = adapter.pairs[path]
            delta = up @ down.float()
        elif path in adapter.embeddings:
            down, up = adapter.embeddings[path]
            delta = (up @ down.float()).t()
        if delta is None:
            return weight.to(base.dtype)
        if delta.shape != base.shape:
            raise ValueError(
                f"the adapter's matrices for {path} make {tuple(delta.shape)}, {name} is another"
            )
        total = weight.float() + delta
        if path in adapter.magnitudes:  # DoRA (Liu et al. 2024): a length of its own for each output
            total *= (adapter.magnitudes[path].float().view(-1) / total.norm(dim=1))[:, None]
        return total.to(base.dtype)


def bare_name(name: str) -> str:
    """Without what some classes put around others."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def write_shards(out: Path, tensors: Iterator[tuple[str, Tensor]]) -> int:
    """Shards of some GiB and their index; returns the bytes of all."""
    names: list[list[str]] = []
    held: dict[str, Tensor] = {}
    total = size = 0

    def flush() -> None:
        nonlocal held, size
        names.append([*held])
        save_file(held, out / part_name(len(names)), metadata={"format": "pt"})
        held, size = {}, 0

    for name, tensor in tensors:
        if held and size + tensor.nbytes > SHARD_BYTES:
            flush()
        held[name] = tensor.clone(memory_format=torch.contiguous_format)
        size, total = size + tensor.nbytes, total + tensor.nbytes
    flush()
    if len(names) == 1:
        (out / part_name(1)).rename(out / "model.safetensors")
        return total
    where: dict[str, str] = {}
    for i, keys in enumerate(names, start=1):
        file = f"model-{i:05d}-of-{len(names):05d}.safetensors"
        (out / part_name(i)).rename(out / file)
        where |= dict.fromkeys(keys, file)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (out / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    return total


def part_name(i: int) -> str:
    return f"part-{i:05d}.new"
