"""Fills a model's weights, one layer after the other: from safetensors shards, or with random numbers.

It knows no model and no quantization: each `Weight` names its tensors and places them itself.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Set
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
    """Bring the checkpoint's tensors into the model, a layer at a time, and let each layer repack.

    elsewhere: names of what other pipeline stages hold, which is not read.  Before a tensor is read, raises
    ValueError naming those that are missing, misshapen, or that no weight claims.
    """
    tensors = StoredTensors(checkpoint.shards, lambda key: kv_scale_name(model.rename(key)))
    check_fit(model, checkpoint, tensors, elsewhere)
    total = sum(weight.nbytes for weight in weights_of(model))
    hidden = None if show_progress else True  # None: shown on a terminal only
    with tqdm(total=total, unit="B", unit_scale=True, desc="weights", disable=hidden) as bar:

        def load(weight: Weight) -> None:
            for part, name in enumerate(weight.sources):
                if name in tensors:
                    weight.load(part, tensors.read(name))
                elif weight.spec.default is not None:
                    weight.fill_(weight.spec.default)
            bar.update(weight.nbytes)

        fill_each(model, load)


def check_fit(model: Model, checkpoint: Checkpoint, tensors: StoredTensors, elsewhere: Set[str]) -> None:
    """Raise ValueError if the checkpoint's tensors are not what the model asks for, by their shapes."""
    wanted, missing, misshapen = set[str](), set[str](), list[str]()
    for weight in weights_of(model):
        wanted.update(weight.sources)
        stored = {part: name for part, name in enumerate(weight.sources) if name in tensors}
        if stored or weight.spec.default is None:
            missing.update(name for name in weight.sources if name not in tensors)
        for part, name in stored.items():
            try:
                weight.check(part, tensors.shape(name))
            except ValueError as error:
                misshapen.append(f"{tensors.key(name)} {error}")
    passed = (*model.ignored, *UNUSED)
    unclaimed = [
        f"{tensors.key(name)} {tensors.shape(name)}"
        for name in tensors.names
        if name not in wanted and name not in elsewhere
        if not any(fnmatchcase(name, pattern) for pattern in passed)
    ]
    complain(checkpoint, "these tensors have another shape", misshapen)
    complain(checkpoint, "these tensors are missing", sorted(missing))
    complain(checkpoint, "this model has no use for these tensors", unclaimed)


def fill_dummy(model: Model, seed: int) -> None:
    """Fill every weight with random numbers, the same for the same seed and device; let the layers repack.

    Each weight's follow from its name, so that they are the same on whichever pipeline stage it is.
    """

    def fill(weight: Weight) -> None:
        name = "".join(weight.sources).encode()
        weight.fill(torch.Generator(weight.device).manual_seed(zlib.crc32(name, seed)))

    fill_each(model, fill)


@torch.no_grad()
def fill_each(model: Model, fill: Callable[[Weight], None]) -> None:
    """Allocate and fill the weights of one layer after the other, and let it repack before the next.

    So no more is held than what is finished and one layer.
    """
    filled = set[int]()  # a weight that two layers share is filled once
    for module in inner_first(torch_module(model)):
        for weight in module.parameters(recurse=False):
            if isinstance(weight, Weight) and id(weight) not in filled:
                filled.add(id(weight))
                weight.allocate()
                fill(weight)
        if isinstance(module, Finishing):
            module.finish()


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


def weights_of(model: Model) -> list[Weight]:
    """Every weight once, also one that two layers share."""
    return [weight for weight in torch_module(model).parameters() if isinstance(weight, Weight)]


def torch_module(model: object) -> nn.Module:
    assert isinstance(model, nn.Module), type(model)
    return model


class StoredTensors:
    """The tensors of safetensors shards, of which only headers are read until one is asked for.

    rename: from a file's key to the name that the model has for it.
    """

    def __init__(self, shards: Iterable[Path], rename: Callable[[str], str]) -> None:
        files = map(open_shard, shards)
        self._places = {rename(key): (key, file) for file in files for key in file.keys()}  # noqa: SIM118

    @property
    def names(self) -> Iterable[str]:
        return self._places

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def key(self, name: str) -> str:
        """What its file calls it."""
        return self._places[name][0]

    def shape(self, name: str) -> tuple[int, ...]:
        key, file = self._places[name]
        return tuple(file.get_slice(key).get_shape())

    def read(self, name: str) -> Tensor:
        """In host memory."""
        key, file = self._places[name]
        return file.get_tensor(key)


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
