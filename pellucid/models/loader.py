"""Fills a model's weights, one layer after the other: from a checkpoint's files, or with random numbers.

It knows no model and no quantization: each `Weight` names its tensors and places them itself.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Set
from fnmatch import fnmatchcase
from typing import Protocol

import torch
from torch import nn
from tqdm import tqdm

from pellucid.collector import trim
from pellucid.layers.weight import Finishing, Weight
from pellucid.models.checkpoint import GGUF, Checkpoint
from pellucid.quant.layouts.base import LayerFormat
from pellucid.quant.stored_scales import UNUSED, scale_name
from pellucid.weights.decoded import Decoded
from pellucid.weights.gguf_model import GgufModel
from pellucid.weights.source import PICKLES, Pickled, Shards, TensorSource

logger = logging.getLogger(__name__)


MAX_NAMED = 5  # tensors listed in an error
LARGE = {"cuda": 64 << 20, "cpu": 1 << 20}  # bytes of a weight that are worth the wait to give them back


class Loadable(Protocol):
    """A model or a draft head; also an `nn.Module`."""

    @property
    def ignored(self) -> tuple[str, ...]: ...


def load_weights(
    model: Loadable,
    checkpoint: Checkpoint,
    source: TensorSource,
    formats: Mapping[str, LayerFormat],
    *,
    elsewhere: Set[str] = frozenset(),
    show_progress: bool = True,
) -> None:
    """Bring the checkpoint's tensors into the model, a layer at a time, and let each layer repack.

    formats: of the matrices that are stored in codes, by path.  elsewhere: names of what other pipeline
    stages hold, which is not read.  Before a tensor is read, raises ValueError naming those that are missing,
    misshapen, or that no weight claims.
    """
    wanted = elsewhere | {name for weight in weights_of(model) for name in weight.sources}
    tensors = Decoded(source, formats, wanted)
    check_fit(model, checkpoint, tensors, elsewhere)
    total = sum(weight.nbytes for weight in weights_of(model))
    hidden = None if show_progress else True  # None: shown on a terminal only
    with tqdm(total=total, unit="B", unit_scale=True, desc="weights", disable=hidden) as bar:

        def load(weight: Weight) -> None:
            for name, parts in weight.parts().items():
                if name not in tensors:
                    assert weight.spec.default is not None, name
                    weight.fill_(weight.spec.default)
                    continue
                if name in tensors.matrices:
                    tensor = tensors.decode(name, weight.whole_shape(parts[0]), weight.device)
                    tensor = tensor if weight.keeps_codes else tensor.dequantized()
                else:
                    tensor = tensors.read(name)
                for part in parts:
                    weight.load(part, tensor)
            bar.update(weight.nbytes)

        fill_each(model, load)


def check_fit(model: Loadable, checkpoint: Checkpoint, tensors: Decoded, elsewhere: Set[str]) -> None:
    """Raise ValueError if the checkpoint's tensors are not what the model asks for, by their shapes."""
    wanted, missing, misshapen = set[str](), set[str](), list[str]()
    for weight in weights_of(model):
        wanted.update(weight.sources)
        stored = {part: name for part, name in enumerate(weight.sources) if name in tensors}
        if stored or weight.spec.default is None:
            missing.update(name for name in weight.sources if name not in tensors)
        for part, name in stored.items():
            try:
                if name in tensors.matrices:
                    tensors.check(name, weight.whole_shape(part))
                else:
                    weight.check(part, tensors.shape(name))
            except ValueError as error:
                misshapen.append(f"{tensors.key(name)} {error}")
    passed = (*model.ignored, *UNUSED)
    unclaimed = [
        f"{tensors.key(name)} {tensors.shape(name)}"
        for name in tensors.names
        if name not in wanted and name not in elsewhere
        if 0 not in tensors.shape(name)  # of no expert, say
        if not any(fnmatchcase(name, pattern) for pattern in passed)
    ]
    complain(checkpoint, "these tensors have another shape", misshapen)
    complain(checkpoint, "these tensors are missing", sorted(missing))
    complain(checkpoint, "this model has no use for these tensors", unclaimed)


def check_tied(source: TensorSource, tied: Mapping[str, str]) -> None:
    """Raise ValueError for a head that is stored with other numbers than the table it is to share.

    tied: a head's tensor, to the embedding's.
    """
    for head, table in tied.items():
        if not {head, table} <= source.infos.keys():
            continue
        ours, shared = source.read(head), source.read(table)
        are_plain = all(each.is_floating_point() and each.itemsize > 1 for each in (ours, shared))
        if are_plain and ours.shape == shared.shape and not torch.equal(ours.to(shared.dtype), shared):
            raise ValueError(
                f"tie_word_embeddings in config.json is true, and {source.key(head)} differs from "
                f"{source.key(table)}, which versions of transformers take differently; set it to false to "
                f"have both, or take {source.key(head)} out of the checkpoint"
            )


def fill_dummy(model: Loadable, seed: int) -> None:
    """Fill every weight with random numbers, the same for the same seed and device; let the layers repack.

    Each weight's follow from its name, so that they are the same on whichever pipeline stage it is.
    """

    def fill(weight: Weight) -> None:
        name = "".join(weight.sources).encode()
        weight.fill(torch.Generator(weight.device).manual_seed(zlib.crc32(name, seed)))

    fill_each(model, fill)


@torch.no_grad()
def fill_each(model: object, fill: Callable[[Weight], None]) -> None:
    """Allocate and fill the weights of one layer after the other, and let it repack before the next.

    So no more is held than what is finished and one layer.  What a large one lets go of goes back to the GPU
    or the system: cut up for what stays, it would hold room that nothing else has use for.
    """
    filled = set[int]()  # a weight that two layers share is filled once
    for module in inner_first(torch_module(model)):
        lets_go = fill_own(module, fill, filled)
        if isinstance(module, Finishing):
            module.finish()
        if lets_go:
            torch.cuda.empty_cache()
            trim()


def fill_own(module: nn.Module, fill: Callable[[Weight], None], filled: set[int]) -> bool:
    """Allocate and fill what a layer has itself.  Returns whether much memory may be let go of later.

    filled: what has been, which is noted here.  Holds none of them afterwards.
    """
    lets_go = False
    for weight in module.parameters(recurse=False):
        if not isinstance(weight, Weight):
            continue
        if id(weight) not in filled:
            filled.add(id(weight))
            weight.allocate()
            fill(weight)
        is_repacked = not weight.is_cuda or weight.spec.kept_bits is not None
        lets_go |= is_repacked and weight.nbytes >= LARGE[weight.device.type]
    return lets_go


def inner_first(module: nn.Module) -> Iterator[nn.Module]:
    """All modules, each behind those that it is made of."""
    seen = set[nn.Module]()

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        if module in seen:
            return
        seen.add(module)
        for child in module.children():
            yield from walk(child)
        yield module

    return walk(module)


def weights_of(model: object) -> list[Weight]:
    """Every weight once, also one that two layers share."""
    return [weight for weight in torch_module(model).parameters() if isinstance(weight, Weight)]


def torch_module(model: object) -> nn.Module:
    assert isinstance(model, nn.Module), type(model)
    return model


def open_source(checkpoint: Checkpoint, rename: Callable[[str], str]) -> TensorSource:
    """The tensors of a checkpoint's files, none if it is a dummy.  rename: from their keys to the model's."""
    if any(file.suffix == GGUF for file in checkpoint.files):
        return GgufModel(checkpoint.files[0])
    is_pickled = any(file.suffix in PICKLES for file in checkpoint.files)
    return (Pickled if is_pickled else Shards)(checkpoint.files, lambda key: scale_name(rename(key)))


def complain(checkpoint: Checkpoint, what: str, tensors: list[str]) -> None:
    if not tensors:
        return
    more = f" and {len(tensors) - MAX_NAMED} more" if len(tensors) > MAX_NAMED else ""
    named = "; ".join(tensors[:MAX_NAMED])
    kind = checkpoint.architecture if checkpoint.config.get("architectures") else "a draft head"
    raise ValueError(
        f"{checkpoint.name} does not fit {kind}: {what}: {named}{more}; "
        "check config.json, or download the checkpoint again"
    )
