"""Runs a built model by hand: block tables, inputs and KV cache without worker or scheduler.

Each sequence owns the blocks that it will ever need, scattered over the cache; `step` computes any number of
tokens of any of them.
"""

from __future__ import annotations

import gc
import random
from pathlib import Path

import torch
from torch import Tensor

from pellucid.config import ModelConfig
from pellucid.forward import ForwardInput
from pellucid.kernels.packed.packed_weight import GroupCodes
from pellucid.layers.leaf import Leaf
from pellucid.models.build import BuildOptions, BuiltModel, build
from pellucid.models.checkpoint import Checkpoint
from pellucid.platform import Platform

CPU = Platform(device="cpu", name="CPU", memory_total=1 << 33, memory_free=1 << 33, num_cores=1)


def num_codes() -> int:
    """Matrices of codes that are in memory as they were read, of whoever holds them."""
    gc.collect()
    return sum(isinstance(each, GroupCodes) for each in gc.get_objects())


def load(
    folder: Path | str,
    *,
    max_model_len: int,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    block_size: int = 16,
    backend: str = "torch",
    leaf: Leaf | None = None,
    quantization: str | None = None,
    load_format: str = "auto",
    show_progress: bool = False,
) -> BuiltModel:
    """The checkpoint in `folder`, built for the CPU through the real loader."""
    checkpoint = Checkpoint.open(
        ModelConfig(model=str(folder), load_format=load_format, skip_tokenizer_init=True)
    )
    options = BuildOptions(
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=torch.device("cpu"),
        block_size=block_size,
        max_model_len=max_model_len,
        leaf=leaf,
        quantization=quantization,
        show_progress=show_progress,
    )
    return build(checkpoint, CPU, options, backend)


class Harness:
    """Sequences of tokens on a built model with one block table."""

    def __init__(self, built: BuiltModel, *, num_seqs: int, max_len: int) -> None:
        self.built = built
        self.block_size = built.attention_layers[0].spec.block_size
        blocks_each = -(-max_len // self.block_size)
        blocks = list(range(1, num_seqs * blocks_each + 1))
        random.Random(0).shuffle(blocks)
        self.block_table = torch.tensor(blocks, dtype=torch.int32).view(num_seqs, blocks_each)
        self.num_computed = [0] * num_seqs
        for layer in built.attention_layers:
            shape, dtype = built.backend.kv_layout(layer.spec, len(blocks) + 1), layer.spec.kv_dtype
            layer.kv_cache = torch.full(shape, float("nan"), dtype=dtype)

    @torch.inference_mode()
    def step(self, work: dict[int, list[int]]) -> list[Tensor]:
        """Compute the next tokens of some sequences, given by number.  Returns logits [n, V] for each."""
        hidden = self.built.model(self.inputs(work))
        logits = self.built.model.logits(hidden)
        return list(logits.split([len(tokens) for tokens in work.values()]))

    def inputs(self, work: dict[int, list[int]]) -> ForwardInput:
        """The step's `fwd`; the sequences are then as long as it makes them."""
        positions: list[int] = []
        slot_mapping: list[int] = []
        for seq, tokens in work.items():
            start = self.num_computed[seq]
            self.num_computed[seq] += len(tokens)
            positions += range(start, self.num_computed[seq])
        rows = [seq for seq, tokens in work.items() for _ in tokens]
        for seq, position in zip(rows, positions, strict=True):
            block = int(self.block_table[seq, position // self.block_size])
            slot_mapping.append(block * self.block_size + position % self.block_size)
        query_lens = [len(tokens) for tokens in work.values()]
        fwd = ForwardInput(
            input_ids=torch.tensor([t for tokens in work.values() for t in tokens], dtype=torch.int32),
            positions=torch.tensor(positions),
            slots=torch.tensor(list(work)),
            cu_seqlens_q=torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32),
            seq_lens=torch.tensor([self.num_computed[seq] for seq in work], dtype=torch.int32),
            block_tables=(self.block_table[list(work)],),
            slot_mappings=(torch.tensor(slot_mapping),),
            logits_index=torch.arange(len(rows)),
            query_lens=query_lens,
            max_query=max(query_lens),
        )
        fwd.attn = (self.built.backend.metadata(fwd, 0),)
        return fwd

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """Greedy tokens after each prompt, all sequences together."""
        logits = self.step(dict(enumerate(prompts)))
        outputs: list[list[int]] = [[] for _ in prompts]
        for _ in range(num_tokens):
            for output, scores in zip(outputs, logits, strict=True):
                output.append(int(scores[-1].argmax()))
            logits = self.step({seq: output[-1:] for seq, output in enumerate(outputs)})
        return outputs
