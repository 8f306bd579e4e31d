"""Adapters as peft saves them: adapter_config.json beside adapter_model.safetensors (or .bin).

Knows no model: which matrices there are, and whether they fit, is for who has the layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from pellucid.lora.bank import LowRank
from pellucid.lora.peft_config import PeftConfig, read_config, weights_file
from pellucid.weights.source import Pickled, Shards

PREFIX = "base_model.model."
WEIGHT = ".weight"
WHOLE = (WEIGHT, ".bias")
KINDS = {  # of tensors that stand for a change, and their ends in the file
    "lora_A": (".lora_A.weight", ".lora_A.default.weight"),
    "lora_B": (".lora_B.weight", ".lora_B.default.weight"),
    "lora_embedding_A": (".lora_embedding_A", ".lora_embedding_A.default"),
    "lora_embedding_B": (".lora_embedding_B", ".lora_embedding_B.default"),
    "lora_magnitude_vector": (".lora_magnitude_vector", ".lora_magnitude_vector.weight"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """All that a folder holds, by the path of the module, or the name of the tensor, that it is for."""

    pairs: dict[str, LowRank] = field(default_factory=dict[str, LowRank])  # of linear layers
    # Of embeddings: `down` [r, V] has a column for each token, `up` is [D, r].
    embeddings: dict[str, LowRank] = field(default_factory=dict[str, LowRank])
    magnitudes: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # of DoRA, [out_features]
    whole: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # in the place of the model's own


def read_adapter(
    folder: Path, read_own: Callable[[str], Tensor | None], rename: Callable[[str], str] = str
) -> dict[str, LowRank]:
    """What may be served: both matrices by the path of the module that they are for.

    The scale is multiplied into B.  peft also saves copies of an embedding that it adapts, and of the head:
    they are passed over if they are the model's own, which `read_own` tells by name.  rename: from a
    checkpoint's key, which peft's are, to the model's name.  Raises ValueError for whatever else there is.
    """
    adapter = read_all(folder, read_config(folder))
    if adapter.magnitudes:
        raise ValueError(
            f"{folder}: DoRA's lengths for {next(iter(adapter.magnitudes))} are not served; `pellucid merge` "
            "puts them into the model"
        )
    for name, tensor in adapter.whole.items():
        own = read_own(rename(name))
        if own is None or own.shape != tensor.shape or not torch.equal(own, tensor.to(own.dtype)):
            raise ValueError(
                f"{folder}: it has a {name} of its own, which is not served; `pellucid merge` puts all of it "
                "into the model"
            )
    return {
        rename(f"{path}{WEIGHT}").removesuffix(WEIGHT): pair
        for path, pair in (adapter.pairs | adapter.embeddings).items()
    }


def read_all(folder: Path, config: PeftConfig) -> Adapter:
    """Raises ValueError for tensors that are none of peft's."""
    file = weights_file(folder)
    source = (Shards if file.suffix == ".safetensors" else Pickled)([file], lambda key: key)
    adapter, found = Adapter(), dict[str, dict[str, str]]()
    for key in source.infos:
        kind, module = kind_of(key)
        if kind is not None:
            found.setdefault(module, {})[kind] = key
        elif key.endswith(WHOLE):
            adapter.whole[module.replace(".base_layer.", ".")] = source.read(key)
        else:
            raise ValueError(f"{file}: {key} is nothing that a LoRA has")
    for module, keys in found.items():
        if "lora_magnitude_vector" in keys:
            adapter.magnitudes[module] = source.read(keys.pop("lora_magnitude_vector"))
        is_embedding = "lora_embedding_A" in keys
        names = ("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A", "lora_B")
        if keys.keys() != set(names):
            raise ValueError(f"{file}: {module} has {next(iter(keys), 'lora_magnitude_vector')} alone")
        down, up = (source.read(keys[name]) for name in names)
        pairs = adapter.embeddings if is_embedding else adapter.pairs
        pairs[module] = LowRank(down, up.float() * config.scale(module, len(down)))
    return adapter


def kind_of(key: str) -> tuple[str | None, str]:
    """Which part of a change a tensor is, and of which module; None: it stands for itself."""
    name = key.removeprefix(PREFIX)
    for kind, ends in KINDS.items():
        for end in ends:
            if name.endswith(end):
                return kind, name.removesuffix(end)
    return None, name
