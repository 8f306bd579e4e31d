"""One decoder layer at a time: a pipeline's stage, built alone, through which all samples are run.

Embedding comes with the first one, the last norm and the head with the last.  What a stage gives waits in
host memory for the next.  Computes in float32, with attention in plain torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pellucid.attention.base import choose_backend
from pellucid.dist.mesh import Stage
from pellucid.forward import ForwardInput
from pellucid.layers.norm import RMSNorm
from pellucid.layers.weight import Weight
from pellucid.models.build import BuildOptions, Design, design
from pellucid.models.checkpoint import Checkpoint
from pellucid.models.loader import load_weights, torch_module, weights_of
from pellucid.models.registry import Model
from pellucid.platform import Platform
from pellucid.quant.layouts.base import LayerFormat
from pellucid.weights.source import TensorSource

BLOCK_SIZE = 64  # tokens, of a KV cache that lives as long as a chunk
CHUNK = 8192  # most tokens that run at once, unless one sample is longer


class Machine(NamedTuple):
    """Where samples run."""

    platform: Platform
    device: torch.device

    def home(self, num_features: int) -> torch.device:
        """Where samples wait between layers: on the device, if they take an eighth of its memory at most."""
        if 4 * num_features * 8 < self.platform.memory_free:
            return self.device
        return torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Samples that run together, one behind the other."""

    samples: tuple[tuple[int, ...], ...]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.samples))


def in_chunks(samples: Sequence[Sequence[int]], most: int = CHUNK) -> list[Chunk]:
    """Neighbours together, up to `most` tokens."""
    chunks: list[list[tuple[int, ...]]] = []
    room = 0
    for sample in samples:
        if len(sample) > room:
            chunks.append([])
            room = most
        chunks[-1].append(tuple(sample))
        room -= len(sample)
    return [Chunk(tuple(chunk)) for chunk in chunks]


class Layer:
    """The stage with layer number `index` of a checkpoint's model, once `load` has brought its weights."""

    def __init__(self, checkpoint: Checkpoint, index: int, machine: Machine, max_len: int) -> None:
        """Raises ValueError for a model that is not served.  max_len: tokens of the longest sample."""
        self.checkpoint, self.machine, self.index = checkpoint, machine, index
        self.model, self.builder, self.source = self._design(checkpoint, max_len)
        self.backend = choose_backend("torch", self.builder.attention_needs(), machine.platform)
        self.builder.bind(self.backend)
        # By the checkpoint's names, which a norm forgets when it widens its weight.
        norms = (part for part in self.module.modules() if isinstance(part, RMSNorm))
        self.norms = {norm.weight.sources[0]: norm for norm in norms if isinstance(norm.weight, Weight)}

    def _design(self, checkpoint: Checkpoint, max_len: int) -> Design:
        options = BuildOptions(
            dtype=torch.float32,
            device=self.machine.device,
            block_size=BLOCK_SIZE,
            max_model_len=max_len,
            stage=Stage(self.index, tuple(range(1, checkpoint.num_layers))),
            show_progress=False,
        )
        return design(checkpoint, self.machine.platform, options)

    @property
    def is_last(self) -> bool:
        return self.index == self.checkpoint.num_layers - 1

    @property
    def module(self) -> nn.Module:
        return torch_module(self.model)

    @property
    def names(self) -> set[str]:
        """Of its tensors, as the model calls them."""
        return {name for weight in weights_of(self.model) for name in weight.sources}

    def load(self, source: TensorSource, formats: Mapping[str, LayerFormat]) -> None:
        """Fill its weights.  formats: of the matrices that `source` has in codes."""
        load_weights(
            *(self.model, self.checkpoint, source, formats),
            elsewhere=self.builder.context.elsewhere,
            show_progress=False,
        )

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk], streams: Sequence[Tensor] | None) -> Iterator[Tensor]:
        """What comes out for each chunk, [T, D] on the device.

        streams: what the layer before gave for it; None where this is the first.
        """
        for i, chunk in enumerate(chunks):
            inlet = self.builder.context.inlet
            if inlet is not None:
                assert streams is not None, "a layer behind others needs what they give"
                inlet.stream = streams[i].to(self.machine.device, copy=True)  # norms add to it in place
            with tensor_cores():
                out = self.model(self._input(chunk))
            yield out

    def _input(self, chunk: Chunk) -> ForwardInput:
        device = self.machine.device
        lengths = [len(sample) for sample in chunk.samples]
        most = -(-max(lengths) // BLOCK_SIZE)
        table = torch.arange(len(lengths) * most, dtype=torch.int32).view(len(lengths), most)
        positions = torch.cat([torch.arange(n) for n in lengths])
        first = torch.arange(len(lengths)).mul(most * BLOCK_SIZE)
        slots = positions + first.repeat_interleave(torch.tensor(lengths))
        for layer in self.builder.attention_layers:
            shape = self.backend.kv_layout(layer.spec, table.numel())
            layer.kv_cache = torch.zeros(shape, dtype=layer.spec.kv_dtype, device=device)
        fwd = ForwardInput(
            input_ids=torch.tensor(
                [t for sample in chunk.samples for t in sample], dtype=torch.int32, device=device
            ),
            positions=positions.to(device),
            slots=torch.arange(len(lengths), device=device),
            cu_seqlens_q=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
            block_tables=(table.to(device),),
            slot_mappings=(slots.to(device),),
            logits_index=torch.arange(chunk.num_tokens, device=device),
            query_lens=lengths,
            num_sampled=lengths,
            max_query=max(lengths),
        )
        fwd.attn = (self.backend.metadata(fwd, 0),)
        return fwd


@contextmanager
def tensor_cores() -> Iterator[None]:
    """On a GPU, float32 products of numbers rounded to 10 bits behind the first: bfloat16 has 7."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def bits(layer: Layer, chunk: Chunk, hidden: Tensor) -> Tensor:
    """-log2 p of all tokens of a chunk but each sample's first, summed.  hidden: of the last layer."""
    total = torch.zeros((), dtype=torch.float64)
    for sample, states in zip(chunk.samples, hidden.split([len(s) for s in chunk.samples]), strict=True):
        logits = logits_of(layer.model, states[:-1]).float()
        targets = torch.tensor(sample[1:], device=logits.device)
        total += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").double().cpu()
    return total / torch.log(torch.tensor(2.0, dtype=torch.float64))


@torch.inference_mode()
def logits_of(model: Model, hidden: Tensor) -> Tensor:
    return model.logits(hidden)
