"""The folder that is made: a shard for each layer, the rest once all are there, so that work can be taken up.

`quantization.json` says from the first layer on what is being made, and of which layers how exactly.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pellucid.models.checkpoint import CONFIG_FILES, SIDE_FILES, Checkpoint
from pellucid.models.text_config import text_architecture
from pellucid.quantize.base import Recipe

REPORT = "quantization.json"
INDEX = "model.safetensors.index.json"


@dataclass(slots=True, kw_only=True)
class MatrixReport:
    """What became of a matrix.  error: of its outputs, relative; None where no sample has reached it."""

    path: str
    stored: str
    weights: int  # how many it has
    bits: float  # of each, scales and all
    error: float | None


@dataclass(slots=True, kw_only=True)
class Report:
    """What was made, and what it cost."""

    recipe: Recipe
    calibration: str  # where the samples come from, and how many tokens
    matrices: list[MatrixReport] = field(default_factory=list)
    plain_bytes: int = 0
    bytes: int = 0
    bits_per_byte: tuple[float, float] | None = None  # of held-out text, before and after
    scores: dict[str, tuple[float, float]] = field(default_factory=dict)  # of tasks, before and after
    num_layers_done: int = 0

    @property
    def bits(self) -> float:
        """Of a weight of the matrices that are quantized, scales and all."""
        total = sum(each.weights * each.bits for each in self.matrices)
        return total / max(1, sum(each.weights for each in self.matrices))

    def write(self, folder: Path) -> None:
        text = json.dumps(asdict(self) | {"bits": round(self.bits, 4)}, indent=1)
        new = folder / f"{REPORT}.new"
        new.write_text(text, encoding="utf-8")
        new.replace(folder / REPORT)

    @classmethod
    def read(cls, folder: Path) -> Report:
        """Raises ValueError if there is none."""
        try:
            said = json.loads((folder / REPORT).read_text(encoding="utf-8"))
            del said["bits"]
            said["recipe"] = Recipe(**{**said["recipe"], "ignore": tuple(said["recipe"]["ignore"])})
            said["matrices"] = [MatrixReport(**each) for each in said["matrices"]]
            return cls(**said)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{folder / REPORT} cannot be read ({error}); leave --resume out") from error


class Output:
    """OUT: what is there, and what is added."""

    def __init__(self, folder: Path, num_layers: int) -> None:
        self.folder, self.num_layers = folder, num_layers

    def open(self, report: Report, *, resume: bool) -> Report:
        """Make the folder, or find what is there already.  Raises ValueError if that is something else."""
        if resume and (self.folder / REPORT).is_file():
            found = Report.read(self.folder)
            if not all(shard.is_file() for shard in self.shards(found.num_layers_done)):
                if finished := [file.name for file in self.folder.glob("*.gguf")]:
                    self.remove_shards()  # which are in that file, and were about to be removed
                    raise ValueError(f"{finished[0]} in {self.folder} is finished; name another folder")
                raise ValueError(f"{self.folder} lacks layers that it had; name another folder")
            for name in ("recipe", "calibration"):
                there, wanted = getattr(found, name), getattr(report, name)
                if there != wanted:
                    raise ValueError(
                        f"{self.folder} was begun with {name} {there}, and this is {wanted}; "
                        "give the same options, or leave --resume out"
                    )
            return found
        if self.folder.exists() and any(self.folder.iterdir()):
            raise ValueError(f"{self.folder} is not empty; name another folder, or go on in it with --resume")
        self.folder.mkdir(parents=True, exist_ok=True)
        report.write(self.folder)
        return report

    def shard(self, index: int) -> Path:
        return self.folder / f"model-{index + 1:05d}-of-{self.num_layers:05d}.safetensors"

    def shards(self, num: int) -> list[Path]:
        return [self.shard(i) for i in range(num)]

    def write_shard(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        """All of it or nothing.  Raises OSError if it cannot be written; one may go on with what is there."""
        new = self.folder / "shard.new"
        try:
            save_file(dict(tensors), new, metadata={"format": "pt"})
            new.replace(self.shard(index))
        except (OSError, SafetensorError) as error:
            new.unlink(missing_ok=True)
            raise OSError(
                f"{self.shard(index)} of {stored_bytes(tensors):,} bytes cannot be written ({error}); "
                "make room, and go on with --resume"
            ) from error

    def finish(self, checkpoint: Checkpoint, quantization: Mapping[str, object]) -> None:
        """Config, index, and a copy of all other files that are no weights."""
        weight_map, total = dict[str, str](), 0
        for shard in self.shards(self.num_layers):
            with safe_open(shard, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118
                    weight_map[key] = shard.name
            total += shard.stat().st_size
        self.write_json(INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        config = {**checkpoint.config, "architectures": [text_architecture(checkpoint.architecture)]}
        self.write_json("config.json", {**config, "quantization_config": dict(quantization)})
        copy_configs(checkpoint.path, self.folder)

    def remove_shards(self) -> None:
        for shard in self.shards(self.num_layers):
            shard.unlink(missing_ok=True)

    def write_json(self, name: str, content: Mapping[str, object]) -> None:
        (self.folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")


def copy_configs(source: Path, target: Path) -> None:
    """Tokenizer, templates and what else there is; nothing of the weights, which are others now."""
    passed = {"config.json", INDEX, REPORT, *(file.name for file in source.glob(SIDE_FILES))}
    for file in sorted({file for pattern in CONFIG_FILES for file in source.glob(pattern)}):
        if file.name not in passed:
            shutil.copyfile(file, target / file.name)


def stored_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def dtype_named(name: str) -> torch.dtype:
    return getattr(torch, name)
