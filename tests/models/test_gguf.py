"""A GGUF file named as a model: the numbers of the folder that it was made of, and JSON files of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from pellucid.config import ModelConfig
from pellucid.models.checkpoint import Checkpoint
from pellucid.weights.gguf_families import FLAT, LAYER
from tests.models.conftest import Folder
from tests.models.harness import Harness, load
from tests.weights.gguf_file import Stored, write

F32 = 0
KEYS = {
    "general.architecture": "qwen3",
    "qwen3.block_count": 2,
    "qwen3.context_length": 64,
    "qwen3.embedding_length": 16,
    "qwen3.feed_forward_length": 24,
    "qwen3.attention.head_count": 2,
    "qwen3.attention.head_count_kv": 1,
    "qwen3.attention.key_length": 8,
    "qwen3.attention.layer_norm_rms_epsilon": 1e-6,
    "qwen3.rope.freq_base": 10000.0,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pellucid" / "gguf"


def stored_name(name: str) -> str:
    """The model's name as llama.cpp calls it."""
    stem = name.removesuffix(".weight")
    flat = {ours: theirs for theirs, ours in FLAT.items()}
    if stem in flat:
        return f"{flat[stem]}.weight"
    _, _, index, own = stem.split(".", 3)
    (theirs,) = (theirs for theirs, ours in LAYER.items() if ours == own)
    return f"blk.{index}.{theirs}.weight"


def write_gguf(path: Path, tensors: dict[str, Tensor]) -> Path:
    stored = {
        stored_name(name): Stored(tuple(tensor.shape), F32, tensor.float().numpy().tobytes())
        for name, tensor in tensors.items()
    }
    return write(path, KEYS, stored)


def logits(path: Path, load_format: str = "auto") -> Tensor:
    built = load(path, max_model_len=64, load_format=load_format)
    return Harness(built, num_seqs=1, max_len=16).step({0: [1, 2, 3, 7]})[0]


def test_a_file_computes_what_its_folder_does_named_by_itself_or_its_folder(folder: Folder) -> None:
    expected = logits(folder.write())
    alone = folder.path / "alone"
    alone.mkdir()
    file = write_gguf(alone / "model.gguf", folder.tensors)
    assert torch.equal(logits(file), expected)
    assert torch.equal(logits(alone), expected)
    folder.write()
    write_gguf(folder.path / "model.gguf", {**folder.tensors, "model.norm.weight": torch.zeros(16)})
    assert torch.equal(logits(folder.path), expected), "a folder's own files come first"
    assert not logits(folder.path, "gguf").any()


def test_configs_are_unpacked_once_and_anew_for_another_file(folder: Folder, cache: Path) -> None:
    file = write_gguf(folder.path / "model.gguf", folder.tensors)
    model = ModelConfig(model=str(file), skip_tokenizer_init=True)
    assert Checkpoint.open(model).path == Checkpoint.open(model).path
    assert len(list(cache.iterdir())) == 1
    write_gguf(file, {**folder.tensors, "model.norm.weight": torch.ones(16)}).touch()
    Checkpoint.open(model)
    assert len(list(cache.iterdir())) == 2


def test_a_cache_that_takes_no_files_is_done_without(folder: Folder, cache: Path) -> None:
    cache.parent.parent.mkdir(parents=True)
    cache.parent.write_text("no folder")
    file = write_gguf(folder.path / "model.gguf", folder.tensors)
    opened = Checkpoint.open(ModelConfig(model=str(file), skip_tokenizer_init=True))
    assert opened.architecture == "Qwen3ForCausalLM" and opened.files == (file,)


def test_a_file_without_a_tokenizer_says_so(folder: Folder) -> None:
    file = write_gguf(folder.path / "model.gguf", folder.tensors)
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.model.*tokenizer="):
        Checkpoint.open(ModelConfig(model=str(file)))


def test_of_several_models_in_a_folder_one_is_to_be_named(folder: Folder) -> None:
    for name in ("a.gguf", "b.gguf"):
        write_gguf(folder.path / name, folder.tensors)
    with pytest.raises(ValueError, match=r"has several models \(a\.gguf, b\.gguf\); name the file"):
        Checkpoint.open(ModelConfig(model=str(folder.path), skip_tokenizer_init=True))
