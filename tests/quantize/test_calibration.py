"""Where samples come from: a file, whose last tenth measures, or what the model writes itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pellucid.cli.main import main
from pellucid.quantize.calibration import of_file
from pellucid.quantize.output import Report
from pellucid.text.tokenizer import Tokenizer
from tests.tiny import TEXT

LENGTH = 12
CPU = ("--device", "cpu", "--cpu-kv-cache-gib", "0.01")


@pytest.fixture
def tokenizer(plain: Path) -> Tokenizer:
    return Tokenizer.load(plain)


def test_the_last_tenth_of_a_text_is_held_out(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    lines = [f"line {i} has words\n" for i in range(40)]
    file.write_text("".join(lines))
    found = of_file(file, tokenizer, num=1000, length=LENGTH)
    parts = (found.learned, found.heldout)
    learned, heldout = ("".join(tokenizer.decode(ids) for ids in part) for part in parts)
    assert learned + heldout == "".join(lines) and learned.endswith("\n")
    assert 0.05 < len(heldout) / len(learned) < 0.2 and found.heldout_bytes == len(heldout)
    assert max(map(len, found.learned)) == LENGTH
    few = of_file(file, tokenizer, num=3, length=LENGTH)
    assert few.learned == found.learned[:3] and few.heldout == found.heldout[:3]


def test_lines_have_texts_or_messages(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    chat = {"messages": [{"role": "user", "content": "the fox"}]}
    lines = [{"text": f"{text} {i}"} for i in range(5) for text in TEXT[:2]]
    file.write_text("\n".join(map(json.dumps, [chat, *lines[1:]])))
    found = of_file(file, tokenizer, num=100, length=LENGTH)
    whole = "".join(tokenizer.decode(ids, skip_special_tokens=False) for ids in found.learned)
    assert whole.startswith("<|im_start|>user\nthe fox<|im_end|>") and lines[-2]["text"] in whole
    assert list(found.heldout) == [tokenizer.encode(lines[-1]["text"])[:LENGTH]]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", '{"text": "a"}\n\n{"words": 1}', r'a.jsonl, line 3 has words, must have {"text": ...}'),
        ("a.jsonl", "{", "a.jsonl, line 1 is not JSON"),
        ("a.txt", "", "there is no text to calibrate with; give one with --calibration FILE"),
        ("a.txt", None, "--calibration .*a.txt cannot be read"),
    ],
)
def test_what_is_neither_is_refused(
    tokenizer: Tokenizer, tmp_path: Path, name: str, content: str | None, words: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=words):
        of_file(tmp_path / name, tokenizer, num=4, length=LENGTH)


def test_a_model_writes_what_it_learns_from_and_work_is_taken_up(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["quantize", str(plain), str(out), "--method", "gptq", "--group-size", "32", *CPU]
    few = ["--num-samples", "4", "--sample-length", str(LENGTH)]
    assert main([*words, *few]) == 0
    said = capsys.readouterr().out
    assert "bits a weight" in said and "bits per byte of held-out text" in said and "outputs are off" in said
    report = Report.read(out)
    assert report.calibration.startswith("text of the model's own") and f"{4 * LENGTH}" in report.calibration
    assert report.bits_per_byte is not None and report.num_layers_done == 2
    second = out / "model-00002-of-00002.safetensors"
    made = second.read_bytes()
    second.unlink()  # as if it had been stopped behind the first layer
    replace(report, num_layers_done=1, matrices=report.matrices[:7], bits_per_byte=None).write(out)
    assert main([*words, *few]) == 2 and "go on in it with --resume" in capsys.readouterr().err
    assert main([*words, *few, "--resume"]) == 0
    again = Report.read(out)
    assert second.read_bytes() == made
    assert (again.matrices, again.bits_per_byte) == (report.matrices, report.bits_per_byte)


def test_an_error_that_is_too_large_is_an_exit(plain: Path, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("the quick brown fox\n" * 20)
    how = ["--method", "int4", "--group-size", "32", "--calibration", str(file), *CPU]
    assert main(["quantize", str(plain), str(tmp_path / "a"), *how, "--max-error", "1e-6"]) == 1
    assert main(["quantize", str(plain), str(tmp_path / "b"), *how, "--max-error", "1"]) == 0
    assert Report.read(tmp_path / "b").calibration.startswith("text.txt")
