"""A GGUF file as a checkpoint: config.json made from its keys, tensors by the names of the model.

What llama.cpp's converter did to weights is undone as they are read: rows of q and k in `llama`'s order,
the one that Gemma's norms have more, keys and values over latents that lie apart, biases of gates and ups.
Experts of a layer are one tensor, `mlp.experts.up_proj.weight` [E, N, K].
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from pellucid.models.fields import Fields
from pellucid.quant.layouts import layout_of
from pellucid.quant.layouts.base import MatrixShape
from pellucid.quant.layouts.ggml.formats import format_of
from pellucid.weights.gguf import Gguf, TensorInfo
from pellucid.weights.gguf_config import GgufConfig, family_of, num_layers_of
from pellucid.weights.gguf_families import FLAT, NO_SUFFIX, Family

# Numbers that the file has as tensors, for the config alone.
FREQUENCIES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
SHARED_GATE = "shared_expert_gate.weight"  # [1, D], of which some files have no 1
KEYS, VALUES, BOTH = "k_b_proj.weight", "v_b_proj.weight", "kv_b_proj.weight"
GATES, UPS, OPENED = "experts.gate_proj.bias", "experts.up_proj.bias", "experts.gate_up_proj_bias"


class GgufModel:
    """config, generation_config: what those JSON files would hold; infos: by the model's names."""

    def __init__(self, path: str | Path) -> None:
        """Raises ValueError for an architecture or a tensor that is not known here."""
        self.file = Gguf(path)
        self.metadata = self.file.metadata
        keys = Fields(self.metadata, str(self.file.path))
        self.family, kind = family_of(self.file, keys), keys.str("general.architecture")
        num_layers = num_layers_of(keys, kind)
        self._stored_names = {
            model_name(name, self.family, kind): name
            for name in self.file.infos
            if name not in FREQUENCIES and layer_of(name) < num_layers
        }
        self.infos: dict[str, TensorInfo] = {
            ours: self.file.infos[theirs] for ours, theirs in self._stored_names.items()
        }
        self._joined: dict[str, Callable[[], Tensor]] = {}
        for name in tuple(self.infos):
            if name in self.infos:  # and no part of another one by now
                self._find_parts(name)
        own = {re.sub(r"^model\.layers\.\d+\.", "", name) for name in self._stored_names}
        made = GgufConfig(self.file, self.family, own)
        self.config, self.generation_config = made.config(), made.generation_config()

    def key(self, name: str) -> str:
        """What the file calls it."""
        return self._stored_names[name]

    def read(self, name: str) -> Tensor:
        """A tensor as the model has it, on the host; blocks as `Gguf.read` gives them."""
        if name in self._joined:
            return self._joined[name]()
        tensor = self.file.read(self._stored_names[name])
        if self.family.turned and (found := re.search(r"\.([qk])_proj\.", name)):
            heads = self.config["num_attention_heads" if found[1] == "q" else "num_key_value_heads"]
            assert isinstance(heads, int)
            return turned_back(tensor, heads)
        if self.family.one_more and name.endswith("norm.weight"):
            return tensor - 1
        return tensor.view(1, -1) if name.endswith(SHARED_GATE) else tensor

    def _find_parts(self, name: str) -> None:
        """Put one tensor of the model in the place of several of the file, or give it its shape."""
        info = self.infos[name]
        if name.endswith(SHARED_GATE):
            self.infos[name] = info._replace(shape=(1, info.shape[-1]))
        elif name.endswith(KEYS):
            _, rank, nope = info.shape
            heads, value, _ = self.infos[name.replace(KEYS, VALUES)].shape
            self._join(name, KEYS, VALUES, BOTH, (heads * (nope + value), rank), self._latents)
        elif self.family.by_turns and name.endswith(GATES):
            num, hidden = info.shape
            self._join(name, GATES, UPS, OPENED, (num, 2 * hidden), self._by_turns)
        elif self.family.by_turns and name.endswith("experts.down_proj.bias"):
            ours = name.replace(".bias", "_bias")
            self.infos[ours], self._stored_names[ours] = self.infos.pop(name), self._stored_names.pop(name)

    def _join(  # noqa: PLR0913, PLR0917 three names of one place
        self,
        name: str,
        first: str,
        second: str,
        whole: str,
        shape: tuple[int, ...],
        read: Callable[[str, str], Tensor],
    ) -> None:
        parts = name, name.replace(first, second)
        if parts[1] not in self.infos:
            raise ValueError(f"{self.file.path} has {self.key(name)} alone; convert the model again")
        theirs = self.key(parts[0]), self.key(parts[1])
        ours = name.replace(first, whole)
        size = 4 * torch.Size(shape).numel()
        for part in parts:
            del self.infos[part], self._stored_names[part]
        self.infos[ours], self._stored_names[ours] = TensorInfo(shape, "F32", 0, size), theirs[0]
        self._joined[ours] = lambda: read(*theirs)

    def _latents(self, keys: str, values: str) -> Tensor:
        """[H, rank, nope] and [H, value, rank] -> [H * (nope + value), rank]"""
        return torch.cat([self._numbers(keys).transpose(1, 2), self._numbers(values)], 1).flatten(0, 1)

    def _by_turns(self, gates: str, ups: str) -> Tensor:
        """[E, I] each -> [E, 2 * I]"""
        return torch.stack([self._numbers(gates), self._numbers(ups)], -1).flatten(1)

    def _numbers(self, name: str) -> Tensor:
        """float32, of blocks, too."""
        info, stored = self.file.infos[name], self.file.read(name)
        format = format_of(info.type)
        shape = MatrixShape(*info.shape[-2:], *info.shape[:-2])
        return layout_of(format).decode({"weight": stored}, format, shape).dequantized()


def layer_of(name: str) -> int:
    """The number of its layer; -1 for what is of none."""
    found = re.match(r"blk\.(\d+)\.", name)
    return int(found[1]) if found else -1


def model_name(name: str, family: Family, kind: str) -> str:
    """The model's name of a tensor.  Raises ValueError if there is none."""
    stem, _, suffix = name.rpartition(".")
    if suffix in ("weight", "bias"):
        if stem in FLAT:
            return f"{FLAT[stem]}.{suffix}"
        # Old files have a tensor for each expert's matrix: blk.0.ffn_gate.7
        found = re.fullmatch(r"blk\.(\d+)\.(\w+?)(?:\.(\d+))?", stem)
        own = "" if found is None else found[2] if found[3] is None else f"{found[2]}_exps"
        if found and own in family.names:
            ours = family.names[own]
            if found[3] is not None:
                ours = ours.replace("experts.", f"experts.{found[3]}.")
            return f"model.layers.{found[1]}.{ours}" + (f".{suffix}" if ours not in NO_SUFFIX else "")
    raise ValueError(
        f"the GGUF file has a tensor {name!r}, which is not known of the architecture {kind!r}; use the "
        "model's safetensors"
    )


def turned_back(rows: Tensor, heads: int) -> Tensor:
    """[heads x head_dim, ...] with each head's halves side by side, which llama.cpp deals out by turns."""
    head_dim = rows.shape[0] // heads
    return rows.view(heads, head_dim // 2, 2, -1).transpose(1, 2).reshape(rows.shape)
