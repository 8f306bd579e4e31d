"""The loop over layers: load one, run samples, quantize, write, run them again through what was written.

So later layers learn from what earlier ones will give them, errors and all, and what is run is what our
loader reads.  Held-out samples go through plain layers, too, and through quantized ones: what that costs is
counted in bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from pellucid.layers.linear import Linear
from pellucid.layers.norm import RMSNorm
from pellucid.layers.weight import Weight
from pellucid.models.checkpoint import Checkpoint
from pellucid.models.fields import Fields
from pellucid.models.loader import open_source, weights_of
from pellucid.models.registry import MODELS
from pellucid.models.text_config import text_key
from pellucid.quant.layouts.base import LayerFormat
from pellucid.quant.schemes import rules_of
from pellucid.quant.schemes.base import Rules, StoredConfig, plain
from pellucid.quant.stored_scales import scale_name
from pellucid.quantize.base import METHODS, Method, Recipe
from pellucid.quantize.dialects import config_of
from pellucid.quantize.folds import folds_of
from pellucid.quantize.gguf import Gguf
from pellucid.quantize.inputs import Statistics, watched
from pellucid.quantize.matrices import (
    Matrix,
    Stored,
    matrices_of,
    numbers_of,
    part_of,
    parts_by_name,
    rows_of,
    tensors_of,
    together,
)
from pellucid.quantize.output import MatrixReport, Output, Report, dtype_named, stored_bytes
from pellucid.quantize.stage import Chunk, Layer, Machine, bits, in_chunks
from pellucid.weights.decoded import describe
from pellucid.weights.source import Shards


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Token ids to learn from, others to measure with, and what they are called.

    heldout_bytes: of the texts that `heldout` spells, whose first tokens are not predicted.
    """

    name: str
    learned: Sequence[Sequence[int]]
    heldout: Sequence[Sequence[int]] = ()
    heldout_bytes: int = 0

    @property
    def longest(self) -> int:
        return max(map(len, (*self.learned, *self.heldout)))

    @property
    def num_tokens(self) -> int:
        return sum(map(len, (*self.learned, *self.heldout)))

    @property
    def calibration(self) -> str:
        return f"{self.name}: {len(self.learned)} samples, {sum(map(len, self.learned))} tokens"


@dataclass(slots=True)
class Stream:
    """Some samples on their way through the layers."""

    chunks: list[Chunk]
    home: torch.device  # where they wait
    states: list[Tensor] | None = None  # behind the last layer that was run

    def run(self, layer: Layer) -> None:
        self.states = [state.to(self.home, copy=True) for state in layer.run(self.chunks, self.states)]

    def bits(self, layer: Layer) -> float:
        """Behind the last layer."""
        assert self.states is not None
        device = layer.machine.device
        pairs = zip(self.chunks, self.states, strict=True)
        return sum(float(bits(layer, chunk, state.to(device))) for chunk, state in pairs)


@dataclass(slots=True)
class Streams:
    """learned: through quantized layers; before, after: what is held out, through plain and quantized."""

    learned: Stream
    before: Stream
    after: Stream = field(init=False)

    def __post_init__(self) -> None:
        self.after = Stream(self.before.chunks, self.before.home)


class Quantizer:
    """Makes one checkpoint of another."""

    def __init__(
        self, checkpoint: Checkpoint, out: Path, recipe: Recipe, samples: Samples, machine: Machine
    ) -> None:
        """Raises ValueError for a checkpoint that is quantized already, and for what a method has not."""
        refuse_quantized(checkpoint)
        self.checkpoint, self.recipe, self.samples, self.machine = checkpoint, recipe, samples, machine
        self.method: Method = METHODS.load(recipe.kind)(recipe)
        self.dialect, self.format = self.method.formats()
        self.method.check(checkpoint)
        self.rules = Rules((*plain(recipe.ignore), *self.method.rules(self.format, checkpoint)))
        self.output = Output(out, checkpoint.num_layers)
        self.report = Report(recipe=recipe, calibration=samples.calibration)
        self.formats: dict[str, LayerFormat] = {}  # of all matrices so far that are stored in codes
        # Paths of all that are not.  A tied head is a layer to other tools, and has no matrix of its own.
        self.plain = ["lm_head"] if checkpoint.config.get("tie_word_embeddings") else list[str]()
        self.owned: set[str] = set()  # names of all tensors so far

    def run(self, *, resume: bool = False, tell: Callable[[int], None] = lambda done: None) -> Report:
        """Make it.  tell: called with the number of layers done."""
        self.report = self.output.open(self.report, resume=resume)
        size = Fields(self.checkpoint.config).size("hidden_size")
        home = self.machine.home(self.samples.num_tokens * size)
        learned, heldout = (in_chunks(each) for each in (self.samples.learned, self.samples.heldout))
        streams = Streams(Stream(learned, home), Stream(heldout, home))
        before = after = 0.0
        for index in range(self.checkpoint.num_layers):
            layer = Layer(self.checkpoint, index, self.machine, self.samples.longest)
            weights = weights_of(layer.model)
            layer.load(layer.source, {})
            matrices = [matrix for matrix in matrices_of(layer.module) if matrix.name not in self.owned]
            stored = self.choose(matrices)
            if index >= self.report.num_layers_done:
                self.quantize(layer, weights, stored, streams.learned)
            streams.before.run(layer)
            before = streams.before.bits(layer) if layer.is_last else 0.0
            self.owned |= layer.names
            del layer, weights, matrices, stored
            layer = self.written(index)
            streams.learned.run(layer)
            streams.after.run(layer)
            after = streams.after.bits(layer) if layer.is_last else 0.0
            tell(index + 1)
        if self.samples.heldout:
            size = self.samples.heldout_bytes
            self.report.bits_per_byte = before / size, after / size
        self.report.write(self.output.folder)
        self.finish()
        return self.report

    def finish(self) -> None:
        """What is beside the shards, or one file of them all."""
        if isinstance(self.method, Gguf):
            self.method.write(self.checkpoint, self.shards(), self.formats, self.output.folder)
            self.output.remove_shards()
        else:
            self.output.finish(self.checkpoint, config_of(self.dialect, self.format, self.recipe, self.plain))

    def choose(self, matrices: Sequence[Matrix]) -> list[Stored]:
        """Which are quantized, and how; the others are noted as plain."""
        found: list[Stored] = []
        for matrix in matrices:
            format = None if matrix.stays else self.rules.format_of(matrix.path, matrix.kind)
            if format is None:
                if matrix.kind != "embedding":
                    self.plain.append(matrix.path)
                continue
            self.formats[matrix.path] = format
            found.append(Stored(matrix, format))
        return found

    def quantize(
        self, layer: Layer, weights: Sequence[Weight], stored: Sequence[Stored], stream: Stream
    ) -> None:
        """Make a layer's codes, and write them beside what else it has."""
        with watched(layer.module, squares=self.method.squares) as inputs:
            for _ in layer.run(stream.chunks, stream.states):
                pass
        seen = {fed: Statistics(each) for fed, each in inputs.items() if each.count}
        dtype = dtype_named(self.checkpoint.dtype)
        linears = {fed: each for fed, each in seen.items() if isinstance(fed, Linear)}
        self.method.prepare(folds_of(layer.module, dtype), linears, self.format)
        seen |= linears
        tensors = self.other_tensors(layer, weights, {each.matrix.name for each in stored}, dtype)
        for run in together(stored):
            tensors |= self.codes_of(run, seen.get(run[0].matrix.fed), layer)
        self.report.plain_bytes += sum(layer.source.infos[name].nbytes for name in layer.names - self.owned)
        self.report.bytes += stored_bytes(tensors)
        self.report.num_layers_done = layer.index + 1
        self.output.write_shard(layer.index, tensors)
        self.report.write(self.output.folder)

    @torch.no_grad()
    def codes_of(self, run: list[Stored], inputs: Statistics | None, layer: Layer) -> dict[str, Tensor]:
        """The tensors of some matrices that are made as one."""
        format, tensors, first = run[0].format, dict[str, Tensor](), 0
        weight = torch.cat([each.matrix.weight() for each in run])
        with self.machine.device:
            codes = self.method.codes(weight, format, inputs)
        for each in run:
            matrix, plain = each.matrix, each.matrix.weight()
            own = rows_of(codes, first, first + len(plain))
            first += len(plain)
            key = text_key(layer.source.key(matrix.name)).removesuffix(".weight")
            made = tensors_of(own, format, key)
            if inputs is not None:
                beside = self.method.beside(format, inputs)
                made |= {f"{key}.{suffix}": tensor.cpu() for suffix, tensor in beside.items()}
            error = None if inputs is None else inputs.error(plain, numbers_of(own))
            size = plain.numel()
            self.report.matrices.append(
                MatrixReport(
                    path=matrix.path,
                    stored=describe(format),
                    weights=size,
                    bits=8 * stored_bytes(made) / size,
                    error=error,
                )
            )
            tensors |= made
        return tensors

    def other_tensors(
        self, layer: Layer, weights: Sequence[Weight], quantized: set[str], dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """What is not quantized: norms, biases, embedding, head; scaled ones as they are now."""
        scaled = {id(part.bias) for part in layer.module.modules() if isinstance(part, Linear)}
        plain = {
            m.name: m for m in matrices_of(layer.module) if m.kind == "linear" and m.name not in quantized
        }
        tensors: dict[str, Tensor] = {}
        for weight in weights:
            for name, place in parts_by_name(weight).items():
                part = part_of(weight, place)
                if name in quantized or name in self.owned or name not in layer.source.infos:
                    continue
                if name in layer.norms:
                    tensor = norm_tensor(layer.norms[name], layer.source.read(name))
                elif id(weight) in scaled or name in plain:
                    tensor = part.to(dtype).cpu().clone()
                else:
                    tensor = layer.source.read(name)
                tensors[text_key(layer.source.key(name))] = tensor.contiguous()
        return tensors

    def shards(self, num: int | None = None) -> Shards:
        """What has been written, by the model's names."""
        rename = MODELS.load(self.checkpoint.architecture).rename
        files = self.output.shards(self.output.num_layers if num is None else num)
        return Shards(files, lambda key: scale_name(rename(key)))

    def written(self, index: int) -> Layer:
        """The layer as it was written, read back."""
        layer = Layer(self.checkpoint, index, self.machine, self.samples.longest)
        source, own = self.shards(index + 1), layer.names
        layer.load(Part(source, own), {p: f for p, f in self.formats.items() if f"{p}.weight" in own})
        return layer


def norm_tensor(norm: RMSNorm, stored: Tensor) -> Tensor:
    """What a norm multiplies with now, as the checkpoint has it: `stored`, unless it was scaled."""
    now, offset = norm.weight.detach().cpu().float(), norm.spec.offset
    return stored if torch.equal(now, stored.float() + offset) else (now - offset).to(stored.dtype)


class Part:
    """Of a source's tensors those that are at or below some names: of one layer, codes and all."""

    def __init__(self, source: Shards, names: set[str]) -> None:
        self._source = source
        paths = {name.removesuffix(".weight") for name in names}
        self.infos = {
            name: info
            for name, info in source.infos.items()
            if name in names or any(name.startswith(f"{path}.") for path in paths)
        }
        self.metadata = source.metadata
        self.key, self.read = source.key, source.read


def refuse_quantized(checkpoint: Checkpoint) -> None:
    source = open_source(checkpoint, MODELS.load(checkpoint.architecture).rename)
    stored = StoredConfig(
        config=checkpoint.config, side=checkpoint.side, tensors=source.infos, metadata=source.metadata
    )
    if checkpoint.is_dummy or not checkpoint.files:
        raise ValueError(f"{checkpoint.name} has no weights; give a checkpoint that has")
    if rules_of(stored) is not None:
        raise ValueError(
            f"{checkpoint.name} is quantized already; give the plain checkpoint that it was made of"
        )
