"""Ranks whose shares of an MLP are not alike: the last ones are filled up with zeros, and logits stay."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pellucid.config import ModelConfig
from pellucid.dist.collectives import Group
from pellucid.kernels.ranks.all_reduce import Mailbox
from pellucid.models.build import BuildOptions, build
from pellucid.models.checkpoint import Checkpoint
from pellucid.quant.codes import LUT4
from pellucid.quant.codes import Group as Inputs
from pellucid.quant.layouts.base import LayerFormat
from pellucid.quant.online import FORMATS
from pellucid.quant.rounding import rounded as codes_of
from tests.models.harness import CPU, Harness, load
from tests.models.test_coded import CHECKPOINTS, encoded
from tests.models.test_experts import INT8, rewrite, save_model

transformers = pytest.importorskip("transformers")
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
RANKS = 3
NF4_FORMAT = LayerFormat(layout="bnb4", code=LUT4, group=Inputs(1, 16), options=frozenset({"nf4"}))
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
STORED = {**CHECKPOINTS, "nf4": (NF4, NF4_FORMAT, lambda weight: codes_of(weight, NF4_FORMAT))}


class Table:
    """Where ranks that are threads lay down what they have, and see what the others have."""

    def __init__(self) -> None:
        self.barrier, self.places = threading.Barrier(RANKS, timeout=60), [torch.empty(0)] * RANKS

    def gather(self, rank: int, x: Tensor) -> list[Tensor]:
        self.places[rank] = x.clone()
        self.barrier.wait()
        found = list(self.places)
        self.barrier.wait()
        return found


class Seat:
    """A rank's group.  See `Group`."""

    size = RANKS
    mailbox: Mailbox | None = None

    def __init__(self, rank: int, table: Table) -> None:
        self.rank, self.table = rank, table

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.copy_(torch.stack(self.table.gather(self.rank, x)).sum(0))

    def gather(self, x: Tensor) -> Tensor:
        return torch.stack(self.table.gather(self.rank, x))

    def scatter_sum(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def minimum(self, value: int) -> int:
        return min(int(each) for each in self.table.gather(self.rank, torch.tensor(value)))


def logits_of(path: Path, group: Group) -> Tensor:
    checkpoint = Checkpoint.open(ModelConfig(model=str(path), skip_tokenizer_init=True))
    options = BuildOptions(
        dtype=torch.float32, kv_dtype=None, device=torch.device("cpu"), block_size=16, max_model_len=32,
        group=group,
    )  # fmt: skip
    return Harness(build(checkpoint, CPU, options, "torch"), num_seqs=1, max_len=32).step({0: TOKENS})[0]


def together(path: Path) -> Tensor:
    """The logits of all ranks, side by side."""
    table, shares = Table(), dict[int, Tensor]()

    def run(rank: int) -> None:
        try:
            shares[rank] = logits_of(path, Seat(rank, table))
        except BaseException:
            table.barrier.abort()
            raise

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return torch.cat([shares[rank] for rank in range(RANKS)], 1)


def save_dense(folder: Path) -> dict[str, Tensor]:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=70, hidden_size=48, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=3,
        head_dim=16, intermediate_size=80, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", [None, *STORED])
def test_dense_models(tmp_path: Path, name: str | None) -> None:
    """80 hidden features of 3 ranks are 32, 32 and 16."""
    tensors = save_dense(tmp_path)
    if name is not None:
        quantization, format, quantize = STORED[name]
        for key in [key for key in tensors if key.endswith("_proj.weight")]:
            parts = encoded(quantize(tensors.pop(key)), format)
            path = key.removesuffix("weight")
            tensors |= {f"{path}{suffix}": part.contiguous() for suffix, part in parts.items()}
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
        save_file(tensors, tmp_path / "model.safetensors")
    expected = Harness(load(tmp_path, max_model_len=32), num_seqs=1, max_len=32).step({0: TOKENS})[0]
    torch.testing.assert_close(together(tmp_path)[:, :70], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stored", ["a tensor each", "one tensor", "codes"])
def test_experts(tmp_path: Path, stored: str) -> None:
    """40 hidden features of 3 ranks are 32, 8 and none."""
    tensors = save_model(tmp_path, one_by_one=stored != "one tensor", hidden=40, heads=(3, 3))
    if stored == "codes":
        for name in [name for name in tensors if ".experts." in name]:
            format = FORMATS["int8"](0)
            parts = encoded(codes_of(tensors.pop(name), format), format)
            tensors |= {name.replace("weight", suffix): part for suffix, part in parts.items()}
        rewrite(tmp_path, tensors, INT8)
    expected = Harness(load(tmp_path, max_model_len=32), num_seqs=1, max_len=32).step({0: TOKENS})[0]
    torch.testing.assert_close(together(tmp_path)[:, :50], expected, rtol=1e-5, atol=1e-5)
