"""What peft writes beside an adapter's tensors: adapter_config.json.  Needs no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

CONFIG = "adapter_config.json"
FILES = ("adapter_model.safetensors", "adapter_model.bin")
REFUSED = {
    "use_dora": "DoRA, which scales whole columns",
    "modules_to_save": "whole modules of its own",
    "layer_replication": "layers that are repeated",
    "trainable_token_indices": "tokens of its own",
    "use_qalora": "QA-LoRA",
    "lora_bias": "biases of its own",
    "target_parameters": "parameters that are no linear layer's",
    "fan_in_fan_out": "matrices that are stored the other way round",
}


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """What adapter_config.json says."""

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    @property
    def max_rank(self) -> int:
        return max([self.rank, *self.rank_pattern.values()])

    def scale(self, module: str, rank: int) -> float:
        """Of the product B A: alpha / r (Hu et al. 2021), or alpha / sqrt(r) (rsLoRA, Kalajdzievski 2023)."""
        alpha = next((value for name, value in self.alpha_pattern.items() if is_at(module, name)), self.alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def is_at(module: str, name: str) -> bool:
    """Does a pattern's key, the end of a path or a wildcard, mean this module?"""
    return module == name or module.endswith(f".{name}") or fnmatchcase(module, name)


def read_config(folder: Path, allowed: Set[str] = frozenset()) -> PeftConfig:
    """Raises ValueError for a folder that is no adapter, or one of a kind that is not served.

    allowed: what is otherwise refused, and "bias".
    """
    try:
        raw = json.loads((folder / CONFIG).read_text())
    except OSError as error:
        raise ValueError(
            f"{folder} is no LoRA adapter: {CONFIG} cannot be read ({error.strerror})"
        ) from error
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG} is no JSON: {error}") from error
    if not isinstance(raw, dict) or raw.get("peft_type") != "LORA":
        kind = raw.get("peft_type") if isinstance(raw, dict) else raw
        raise ValueError(f"{folder}: peft_type is {kind!r}; only LORA is served")
    for key, what in REFUSED.items():
        if raw.get(key) and key not in allowed:
            raise ValueError(
                f"{folder}: {key} is {raw[key]!r}: {what}, is not served; train without it, or merge the "
                "adapter with peft (merge_and_unload)"
            )
    if raw.get("bias", "none") != "none" and "bias" not in allowed:
        raise ValueError(f"{folder}: bias is {raw['bias']!r}; adapters with biases are not served")
    rank, alpha = raw.get("r"), raw.get("lora_alpha", 8)
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise ValueError(f"{folder / CONFIG}: r is {rank!r} and lora_alpha {alpha!r}; they must be numbers")
    return PeftConfig(
        rank=rank,
        alpha=alpha,
        use_rslora=bool(raw.get("use_rslora")),
        rank_pattern=raw.get("rank_pattern") or {},
        alpha_pattern=raw.get("alpha_pattern") or {},
    )


def weights_file(folder: Path) -> Path:
    """Raises ValueError if there is none."""
    for name in FILES:
        if (folder / name).is_file():
            return folder / name
    raise ValueError(f"{folder} has neither {' nor '.join(FILES)}")
