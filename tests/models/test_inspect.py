"""`pellucid inspect`: what headers say, without a weight being read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pellucid.cli.main import main
from tests.models.conftest import Folder
from tests.models.test_coded import write_coded


def inspected(capsys: pytest.CaptureFixture[str], *args: str) -> dict:
    assert main(["inspect", *args, "--json", "--device", "cpu"]) == 0
    return json.loads(capsys.readouterr().out)


def test_each_kind_of_matrix_is_told(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    coded, _ = write_coded(folder, "awq")
    rows = {row["names"]: row for row in inspected(capsys, str(coded), "--dtype", "float32")["matrices"]}
    qkv = rows["q_proj, k_proj, v_proj"]
    assert (qkv["num_matrices"], qkv["num_weights"]) == (6, 2 * 32 * 16)
    assert qkv["stored"] == "awq u4, a scale for each 1 x 8 weights"
    assert qkv["bits"] == 4 + (16 + 4) / 8  # codes, and a scale and a zero for eight of them
    assert qkv["kept_bytes"] == 4 * qkv["num_weights"]
    assert rows["embed_tokens"]["stored"] == "BF16" and rows["embed_tokens"]["bits"] == 16


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
