"""GGUF's headers and tensors: files of llama.cpp's tools, and files written here, whole and damaged."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path

import pytest
import torch

from pellucid.quant.layouts import layout_of
from pellucid.quant.layouts.base import LayerFormat, MatrixShape
from pellucid.weights.gguf import Gguf, parts_of
from tests.weights.gguf_file import Stored, write

DATA = Path(__file__).parent / "data"
F32, F16, Q8_0 = 0, 1, 8
KEYS = {
    "general.architecture": "toy",
    "a.number": 7,
    "a.large.number": 1 << 40,
    "a.fraction": 1e-6,
    "a.truth": True,
    "names": ["eins", "zwei", ""],
    "numbers": [1, 2, 3],
    "lists": [[1, 2], [3]],
    "none": [],
}


def floats(*shape: int) -> Stored:
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float32)
    return Stored(shape, F32, numbers.numpy().tobytes())


def test_a_file_of_llama_cpps_tools_is_read() -> None:
    file = Gguf(DATA / "qwen3.gguf")
    assert file.metadata["general.architecture"] == "qwen3"
    assert file.metadata["qwen3.block_count"] == 2
    assert file.metadata["qwen3.attention.layer_norm_rms_epsilon"] == 1e-6
    assert file.metadata["tokenizer.ggml.add_bos_token"] is False
    tokens = file.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list) and tokens[:3] == ["!", '"', "#"] and len(tokens) == 64
    info = file.infos["blk.0.attn_v.weight"]
    assert info.shape == (128, 256) and info.type == "Q3_K"
    assert file.infos["output_norm.weight"].shape == (256,)
    (want,) = json.loads((DATA / "qwen3.json").read_text()).values()
    format = LayerFormat(layout="ggml/Q3_K")
    raw = {"weight": file.read("blk.0.attn_v.weight")}
    weights = layout_of(format).decode(raw, format, MatrixShape(*info.shape)).dequantized()
    assert [float(f"{value:.9g}") for value in weights[1, :8].tolist()] == want["row1_first8"]
    assert float(weights.double().sum()) == pytest.approx(want["sum"], abs=2e-8 * want["abs_sum"])


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [32, 64])
def test_what_is_written_is_read(tmp_path: Path, version: int, alignment: int) -> None:
    keys = {**KEYS, "general.alignment": alignment}
    tensors = {"odd": floats(3), "matrix": floats(4, 6), "stack": floats(2, 3, 4)}
    file = Gguf(write(tmp_path / "a.gguf", keys, tensors, version=version))
    assert file.metadata == keys
    for name, stored in tensors.items():
        expected = torch.arange(torch.Size(stored.shape).numel(), dtype=torch.float32).view(stored.shape)
        assert torch.equal(file.read(name), expected)


def test_blocks_are_rows_of_bytes(tmp_path: Path) -> None:
    content = bytes(range(204))
    file = Gguf(write(tmp_path / "a.gguf", {}, {"w": Stored((3, 64), Q8_0, content)}))
    assert file.infos["w"].nbytes == 204
    assert torch.equal(file.read("w"), torch.tensor(list(content), dtype=torch.uint8).view(3, 68))


def test_writing_to_what_was_read_changes_no_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", {}, {"w": floats(4)})
    before = path.read_bytes()
    Gguf(path).read("w").zero_()
    assert path.read_bytes() == before
    assert torch.equal(Gguf(path).read("w"), torch.arange(4.0))


def test_parts_are_one_model(tmp_path: Path) -> None:
    names = [f"big-{i:05}-of-00003.gguf" for i in (1, 2, 3)]
    for i, name in enumerate(names):
        write(tmp_path / name, {"split.no": i, **(KEYS if i == 0 else {})}, {f"t{i}": floats(2, i + 1)})
    file = Gguf(tmp_path / names[1])
    assert file.metadata["split.no"] == 0 and file.metadata["a.number"] == 7
    shapes = {name: info.shape for name, info in file.infos.items()}
    assert shapes == {"t0": (2, 1), "t1": (2, 2), "t2": (2, 3)}
    assert torch.equal(file.read("t2"), torch.arange(6.0).view(2, 3))
    assert parts_of(tmp_path / "alone.gguf") == [tmp_path / "alone.gguf"]
    (tmp_path / names[2]).unlink()
    with pytest.raises(ValueError, match="lacks big-00003-of-00003.gguf of 3 parts; download them all"):
        Gguf(tmp_path / names[0])
    write(tmp_path / names[2], {}, {"t0": floats(1)})
    with pytest.raises(ValueError, match="has t0 once more"):
        Gguf(tmp_path / names[0])


def test_large_vocabularies_are_quick(tmp_path: Path) -> None:
    tokens = [f"token {i}" for i in range(200_000)]
    keys = {"tokens": tokens, "types": [1] * len(tokens)}
    path = write(tmp_path / "a.gguf", keys, {})
    start = time.perf_counter()
    file = Gguf(path)
    elapsed = time.perf_counter() - start
    assert file.metadata["tokens"] == tokens
    assert elapsed < 2, f"{elapsed:.2f} s"  # takes 0.1 s


@pytest.mark.parametrize("tensors", [{"w": floats(8, 8)}, {}])
def test_a_file_cut_anywhere_is_an_error(tmp_path: Path, tensors: dict[str, Stored]) -> None:
    keys = {**KEYS, "at.the.end": ["long enough to be cut"]}
    whole = write(tmp_path / "a.gguf", keys, tensors).read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in range(1, len(whole.rstrip(b"\0")), 3):
        cut.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"is no GGUF file|download it again"):
            Gguf(cut)


def damaged(whole: bytes, at: int, value: int, format: str) -> bytes:
    return whole[:at] + struct.pack(format, value) + whole[at + struct.calcsize(format) :]


@pytest.mark.parametrize(
    "at,value,format,message",
    [
        (4, 1, "<I", "of version 1, and versions 2 and 3 are read"),
        (4, 3, ">I", "for machines that store the highest byte first"),
        (8, 1 << 60, "<Q", "damaged or cut short"),
        (16, 1 << 60, "<Q", "damaged or cut short"),
        (24, 1 << 62, "<Q", "damaged or cut short"),
    ],
)
def test_lies_in_headers_are_refused(tmp_path: Path, at: int, value: int, format: str, message: str) -> None:
    path = write(tmp_path / "a.gguf", KEYS, {"w": floats(2)})
    path.write_bytes(damaged(path.read_bytes(), at, value, format))
    with pytest.raises(ValueError, match=message):
        Gguf(path)


def test_lies_about_tensors_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    write(path, {}, {"w": Stored((2, 2), 99, b"")})
    with pytest.raises(ValueError, match="w in .* has ggml's type 99, which is not known here"):
        Gguf(path)
    write(path, {}, {"w": Stored((2, 40), Q8_0, bytes(99))})
    with pytest.raises(ValueError, match="has rows of 40, not whole blocks of 32"):
        Gguf(path)
    write(path, {}, {"w": Stored((1 << 40, 32), Q8_0, bytes(34))})
    with pytest.raises(ValueError, match=r"has [\d,]+ bytes, and w ends at 37,\d+.*download it again"):
        Gguf(path)
    write(path, {"general.alignment": 32}, {})
    path.write_bytes(path.read_bytes().replace(struct.pack("<II", 4, 32), struct.pack("<II", 4, 0)))
    with pytest.raises(ValueError, match="general.alignment in .* is 0, must be a number of bytes"):
        Gguf(path)
    path.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(ValueError, match="is no GGUF file"):
        Gguf(path)


def test_empty_tensors_are_read(tmp_path: Path) -> None:
    file = Gguf(write(tmp_path / "a.gguf", {}, {"none": floats(0, 4), "one": floats(1)}))
    assert file.read("none").shape == (0, 4) and torch.equal(file.read("one"), torch.zeros(1))
