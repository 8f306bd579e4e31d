"""Fills a model's weights: from safetensors shards, one tensor at a time, or with random numbers.

It knows no model and no quantization: each `Weight` names its tensors and places them itself.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Set
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm import tqdm

from pellucid.layers.weight import Finishing, Weight
from pellucid.models.checkpoint import Checkpoint
from pellucid.models.registry import Model
from pellucid.quant.kv_scales import UNUSED, kv_scale_name

MAX_NAMED = 5  # tensors listed in an error


def load_weights(
    model: Model, checkpoint: Checkpoint, *, elsewhere: Set[str] = frozenset(), show_progress: bool = True
) -> None:
    """Stream the checkpoint's tensors into the model, then let the layers repack.

    Each tensor is copied to its weight's device and dtype before the next is read.  elsewhere: names of what
    other pipeline stages hold, which is not read.  Raises ValueError naming tensors that are missing,
    misshapen, or that no weight claims.
    """

    def name_of(key: str) -> str:
        return kv_scale_name(model.rename(key))

    wanted = {
        name: (weight, part) for weight in weights_of(model) for part, name in enumerate(weight.sources)
    }
    unloaded, unclaimed, misshapen = set(wanted), list[str](), list[str]()
    skipped = elsewhere - wanted.keys()  # a tied table is wanted at both ends
    tensors = read_shards(
        checkpoint.shards, skips=lambda key: name_of(key) in skipped, show_progress=show_progress
    )
    for key, tensor in tensors:
        name = name_of(key)
        if name in wanted:
            weight, part = wanted[name]
            try:
                weight.load(part, tensor)
            except ValueError as error:
                misshapen.append(f"{key} {error}")
            unloaded.discard(name)
        elif not any(fnmatchcase(name, pattern) for pattern in (*model.ignored, *UNUSED)):
            unclaimed.append(f"{key} {tuple(tensor.shape)}")
    unloaded -= fill_defaults(model, unloaded)
    complain(checkpoint, "these tensors have another shape", misshapen)
    complain(checkpoint, "these tensors are missing", sorted(unloaded))
    complain(checkpoint, "this model has no use for these tensors", unclaimed)
    finish(model)


@torch.no_grad()
def fill_defaults(model: Model, unloaded: set[str]) -> set[str]:
    """Fill the unloaded weights that need no tensor in the checkpoint.  Returns the names they go by."""
    filled = set[str]()
    for weight in weights_of(model):
        if weight.spec.default is not None and unloaded.issuperset(weight.sources):
            weight.fill_(weight.spec.default)
            filled.update(weight.sources)
    return filled


def fill_dummy(model: Model, seed: int) -> None:
    """Fill every weight with random numbers, the same for the same seed and device; let the layers repack.

    Each weight's follow from its name, so that they are the same on whichever pipeline stage it is.
    """
    for weight in weights_of(model):
        name = "".join(weight.sources).encode()
        weight.fill(torch.Generator(weight.device).manual_seed(zlib.crc32(name, seed)))
    finish(model)


@torch.no_grad()
def finish(model: Model) -> None:
    """Let every layer repack its weights, one after the other, so that only one is held twice at a time."""
    for module in torch_module(model).modules():
        if isinstance(module, Finishing):
            module.finish()


def weights_of(model: Model) -> list[Weight]:
    """Every weight once, also one that two layers share."""
    return [weight for weight in torch_module(model).parameters() if isinstance(weight, Weight)]


def torch_module(model: object) -> nn.Module:
    assert isinstance(model, nn.Module), type(model)
    return model


def read_shards(
    shards: tuple[Path, ...], *, skips: Callable[[str], bool], show_progress: bool
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of every shard but those it `skips`, in host memory only until the next is asked for."""
    total = sum(shard.stat().st_size for shard in shards)
    hidden = None if show_progress else True  # None: shown on a terminal only
    with tqdm(total=total, unit="B", unit_scale=True, desc="weights", disable=hidden) as bar:
        for shard in shards:
            left = shard.stat().st_size
            with open_shard(shard) as file:
                for key in file.keys():  # noqa: SIM118 (it is no dict)
                    if skips(key):
                        continue
                    tensor = file.get_tensor(key)
                    yield key, tensor
                    bar.update(tensor.nbytes)
                    left -= tensor.nbytes
            bar.update(left)


def open_shard(shard: Path) -> safe_open:
    """Read a shard's header.  Raises ValueError naming the file if it is cut off, or of another kind."""
    try:
        return safe_open(shard, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ValueError(f"{shard} is no whole safetensors file ({error}); download it again") from error


def complain(checkpoint: Checkpoint, what: str, tensors: list[str]) -> None:
    if not tensors:
        return
    more = f" and {len(tensors) - MAX_NAMED} more" if len(tensors) > MAX_NAMED else ""
    named = "; ".join(tensors[:MAX_NAMED])
    raise ValueError(
        f"{checkpoint.name} does not fit {checkpoint.architecture}: {what}: {named}{more}; "
        "check config.json, or download the checkpoint again"
    )
