"""`pellucid inspect`: what headers say, without a weight being read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pellucid.cli.main import main
from pellucid.config import ModelConfig
from pellucid.layers.leaf import FUSED, PLAIN, Leaf
from pellucid.models.build import design
from pellucid.models.checkpoint import Checkpoint
from pellucid.models.inspect import inspect
from pellucid.models.kinds import ROUTER, kinds_of
from pellucid.models.loader import torch_module, weights_of
from pellucid.quant.products import plain_product
from pellucid.quant.quantization import KEPT
from pellucid.quant.unquantized import can_pack, multiplies_bfloat16
from pellucid.weights.source import Shards
from tests.models.conftest import Folder
from tests.models.harness import CPU
from tests.models.test_coded import write_coded
from tests.models.test_loader import OPTIONS


def inspected(capsys: pytest.CaptureFixture[str], *args: str) -> dict:
    assert main(["inspect", *args, "--json", "--device", "cpu"]) == 0
    return json.loads(capsys.readouterr().out)


def test_each_kind_of_matrix_is_told(
    folder: Folder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    coded, _ = write_coded(folder, "awq")
    read = list[str]()
    monkeypatch.setattr(Shards, "read", lambda _, name: read.append(name))
    found = inspected(capsys, str(coded), "--dtype", "float32")
    assert read == []
    assert (found["dtype"], found["activations"]) == ("float32", "bfloat16, float16, float32")
    assert (found["device"], found["min_capability"]) == ("CPU", "8.0")
    rows = {row["names"]: row for row in found["matrices"]}
    qkv = rows["q_proj, k_proj, v_proj"]
    assert (qkv["num_matrices"], qkv["num_weights"]) == (6, 2 * 32 * 16)
    assert qkv["stored"] == "awq u4, a scale for each 1 x 8 weights"
    assert qkv["bits"] == 4 + (16 + 4) / 8  # codes, and a scale and a zero for eight of them
    assert qkv["kept_bytes"] == 4 * qkv["num_weights"]
    assert qkv["served"] == f"float32: torch's product, for {KEPT}"
    assert rows["embed_tokens"]["stored"] == "BF16" and rows["embed_tokens"]["bits"] == 16


@pytest.mark.parametrize("shape", ["deepseek-v2-lite", "gpt-oss-20b"])
def test_no_matrix_is_left_out(shape: str) -> None:
    checkpoint = Checkpoint.open(ModelConfig(model=f"shape:{shape}", load_format="dummy"))
    model = design(checkpoint, CPU, replace(OPTIONS, dtype=torch.bfloat16)).model
    whole = sum(weight.numel() for weight in weights_of(model) if weight.dim() > 1)
    biases = sum(weight.numel() for weight in weights_of(model) if weight.sources[0].endswith("_bias"))
    kinds = inspect(checkpoint, CPU, dtype=torch.bfloat16)
    assert sum(kind.num_weights for kind in kinds) == whole - biases


@pytest.mark.parametrize(("leaf", "served"), [(PLAIN, "torch's product"), (FUSED, ROUTER)])
def test_a_router_that_has_a_kernel_is_said_to_have_one(leaf: Leaf, served: str) -> None:
    checkpoint = Checkpoint.open(ModelConfig(model="shape:deepseek-v2-lite", load_format="dummy"))
    options = replace(OPTIONS, dtype=torch.bfloat16, leaf=leaf)
    model = torch_module(design(checkpoint, CPU, options).model)
    found = {kind.names: kind.served for kind in kinds_of(model, {}, {}, options.dtype)}
    assert found["gate"] == f"float32: {served}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_head_has_memory_of_its_own_where_the_table_is_laid_out_anew(
    folder: Folder, dtype: torch.dtype
) -> None:
    folder.config["tie_word_embeddings"] = True
    checkpoint = Checkpoint.open(ModelConfig(model=str(folder.write())))
    *_, head = inspect(checkpoint, CPU, dtype=dtype)
    assert (head.names, head.stored) == ("head", "tied to the table of embeddings")
    product = plain_product(dtype, CPU, packs=can_pack(), native=multiplies_bfloat16())
    assert head.served == str(product)
    assert head.kept_bytes == (2 * 50 * 16 if product.copies else 0)


def test_a_table_is_shown(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder.write()), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "Qwen3ForCausalLM" in out and "down_proj" in out


def test_what_is_not_served_is_told_in_a_line(
    tmp_path: Path, folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.config["quantization_config"] = {"quant_method": "aqlm"}
    assert main(["inspect", str(folder.write())]) == 2
    assert "'aqlm', which is not served: its codebooks" in capsys.readouterr().err
