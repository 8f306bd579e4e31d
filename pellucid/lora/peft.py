"""Adapters as peft saves them: adapter_config.json beside adapter_model.safetensors (or .bin).

Knows no model: which matrices there are, and whether they fit, is for who has the layers.
"""

from __future__ import annotations

from pathlib import Path

from pellucid.lora.bank import LowRank
from pellucid.lora.peft_config import read_config, weights_file
from pellucid.weights.source import Pickled, Shards

PREFIX = "base_model.model."


def read_adapter(folder: Path) -> dict[str, LowRank]:
    """Both matrices by the path of the module that they are for, the scale multiplied into B.

    Raises ValueError for tensors that are no pairs of a LoRA.
    """
    config, file = read_config(folder), weights_file(folder)
    source = (Shards if file.suffix == ".safetensors" else Pickled)([file], lambda key: key)
    pairs: dict[str, dict[str, str]] = {}
    for key in source.infos:
        path, _, kind = key.removesuffix(".weight").removesuffix(".default").rpartition(".")
        if kind not in ("lora_A", "lora_B"):
            raise ValueError(
                f"{file}: {key} is not served; an adapter of linear layers has lora_A and lora_B"
            )
        pairs.setdefault(path.removeprefix(PREFIX), {})[kind] = key
    adapter: dict[str, LowRank] = {}
    for module, keys in pairs.items():
        if len(keys) < 2:
            raise ValueError(f"{file}: {module} has {next(iter(keys))} alone")
        down, up = source.read(keys["lora_A"]), source.read(keys["lora_B"])
        adapter[module] = LowRank(down, up.float() * config.scale(module, len(down)))
    return adapter
