"""GGUF files that are made: our reader and the gguf package find what was meant, and the tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pellucid.config import ModelConfig
from pellucid.models.checkpoint import Checkpoint
from pellucid.models.loader import torch_module
from pellucid.quant.codes import Codes
from pellucid.quantize import output, run
from pellucid.quantize.ggml import WRITTEN, ggml_codes
from pellucid.quantize.gguf import tokenizer_keys
from pellucid.text.tokenizer import Tokenizer
from pellucid.weights.gguf_folder import folder_of
from tests.models.harness import Harness, load
from tests.quantize.conftest import quantizer
from tests.tiny import TEXT, write_checkpoint

OFF = {"Q8_0": 0.006, "Q6_K": 0.02, "Q5_K": 0.04, "Q4_K": 0.08, "Q4_0": 0.09}  # of the standard deviation


def made_of(folder: Path, architecture: str) -> Path:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}
    return write_checkpoint(folder, architectures=[architecture], **sizes)


@pytest.mark.parametrize("type", WRITTEN)
def test_codes_of_blocks_are_near(type: str) -> None:
    weight = torch.randn(32, 512, generator=torch.Generator().manual_seed(0)) / 30
    numbers = ggml_codes(weight, type).dequantized()
    assert float((numbers - weight).square().mean().sqrt() / weight.std()) < OFF[type]
    zeros = ggml_codes(torch.zeros(4, 512), type).dequantized()
    assert not zeros.any()


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "LlamaForCausalLM"])
@pytest.mark.parametrize("name", ["Q4_K_M", "Q5_K_M", "Q8_0", "Q4_0"])
def test_readers_find_the_numbers_that_were_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, architecture: str
) -> None:
    gguf = pytest.importorskip("gguf")
    meant: list[Tensor] = []

    def note(codes: Codes) -> Tensor:
        meant.append(codes.dequantized())
        return meant[-1]

    monkeypatch.setattr(run, "numbers_of", note)
    out = tmp_path / "out"
    report = quantizer(made_of(tmp_path / "plain", architecture), out, method=f"gguf:{name}").run()
    file = out / f"model-{name}.gguf"
    assert {path.name for path in out.iterdir()} == {file.name, "quantization.json"}
    fed = [each.path for each in report.matrices if each.error is not None]  # all but embedding and head
    found = dict(zip(fed, meant, strict=True))
    read = dict(torch_module(load(file, max_model_len=32).model).named_parameters())
    layer = "model.layers.1.mlp"
    gate_up = torch.cat([found[f"{layer}.gate_proj"], found[f"{layer}.up_proj"]])
    attention = "model.layers.0.self_attn"
    qkv = torch.cat([found[f"{attention}.{part}_proj"] for part in "qkv"])
    assert torch.equal(read["layers.1.mlp.gate_up.weight"], gate_up)
    assert torch.equal(read["layers.0.attend.qkv.weight"], qkv)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    for key, ours in (
        ("blk.0.ffn_down", found["model.layers.0.mlp.down_proj"]),
        ("token_embd", read["embed.weight"]),
        ("output", read["head.weight"]),
    ):
        tensor = theirs[f"{key}.weight"]
        assert torch.equal(torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type)), ours), key
    coded = [tensor for tensor in theirs.values() if len(tensor.shape) > 1]
    num_weights = sum(int(tensor.n_elements) for tensor in coded)
    assert report.bits == pytest.approx(8 * sum(int(tensor.n_bytes) for tensor in coded) / num_weights)


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "LlamaForCausalLM"])
@pytest.mark.parametrize("name", ["Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0"])
def test_llama_cpp_computes_with_it_what_we_do(tmp_path: Path, name: str, architecture: str) -> None:
    """Where llama-cpp-python is; it rounds activations to 8 bits."""
    llama_cpp = pytest.importorskip("llama_cpp")
    plain, prompt = made_of(tmp_path / "plain", architecture), [3, 14, 15, 92, 65, 35]
    quantizer(plain, tmp_path / "out", method=f"gguf:{name}").run()
    file = tmp_path / "out" / f"model-{name}.gguf"
    ours = Harness(load(file, max_model_len=32), num_seqs=1, max_len=16).step({0: prompt})[0]
    options = {"n_ctx": 64, "n_threads": 1, "n_threads_batch": 1, "logits_all": True, "verbose": False}
    model = llama_cpp.Llama(str(file), **options)
    model.eval(prompt)
    theirs = torch.tensor(model.scores[: len(prompt)].copy())
    assert (theirs - ours).norm() < 0.06 * ours.norm()
    tokenizer = Tokenizer.load(plain)
    for text in TEXT:
        assert model.tokenize(text.encode(), add_bos=False, special=True) == tokenizer.encode(text)
    model.close()


def test_the_tokenizer_goes_with_it(tmp_path: Path) -> None:
    plain, out = made_of(tmp_path / "plain", "Qwen3ForCausalLM"), tmp_path / "out"
    quantizer(plain, out, method="gguf:Q8_0").run()
    ours, theirs = (Tokenizer.load(path) for path in (plain, folder_of(out / "model-Q8_0.gguf")))
    for text in TEXT:
        assert theirs.encode(text) == ours.encode(text)
    assert theirs.chat_template(tools=False) == ours.chat_template(tools=False)
    assert theirs.encode("<|im_start|>") == ours.encode("<|im_start|>")


def test_a_file_whose_shards_were_being_removed_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, out = made_of(tmp_path / "plain", "Qwen3ForCausalLM"), tmp_path / "out"

    def cut(self: output.Output) -> None:
        next(iter(self.shards(1))).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(output.Output, "remove_shards", cut)
        with pytest.raises(KeyboardInterrupt):
            quantizer(plain, out, method="gguf:Q8_0").run()
    assert output.Report.read(out).bits_per_byte is not None
    with pytest.raises(ValueError, match="model-Q8_0.gguf in .* is finished; name another folder"):
        quantizer(plain, out, method="gguf:Q8_0").run(resume=True)
    assert {file.name for file in out.iterdir()} == {"model-Q8_0.gguf", "quantization.json"}


def test_tokens_that_the_model_has_no_row_for_are_left_out_or_refused(tmp_path: Path) -> None:
    plain, out = made_of(tmp_path / "plain", "Qwen3ForCausalLM"), tmp_path / "out"
    tokenizer = json.loads((plain / "tokenizer.json").read_text())
    size = json.loads((plain / "config.json").read_text())["vocab_size"]
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | {"id": size, "content": "<|beyond|>"})
    (plain / "tokenizer.json").write_text(json.dumps(tokenizer))
    keys = tokenizer_keys(Checkpoint.open(ModelConfig(model=str(plain))))
    assert "<|beyond|>" not in keys["tokenizer.ggml.tokens"]  # pyright: ignore[reportOperatorIssue]
    tokenizer["model"]["vocab"]["beyond"] = size
    (plain / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match=f"has the token {size}, but vocab_size in config.json is {size}"):
        quantizer(plain, out, method="gguf:Q8_0")


@pytest.mark.parametrize(
    ("method", "changes", "words"),
    [
        ("gguf:IQ2_XS", {}, "gguf:IQ2_XS is not made here; there are gguf:Q4_0, gguf:Q8_0"),
        ("gguf:Q8_0", {"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM is not written as GGUF"),
    ],
)
def test_what_is_not_made_is_refused(
    tmp_path: Path, method: str, changes: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        quantizer(write_checkpoint(tmp_path / "plain", **changes), tmp_path / "out", method=method)


def test_rows_of_parts_of_blocks_are_refused(tmp_path: Path) -> None:
    plain = write_checkpoint(tmp_path / "plain", hidden_size=64)
    with pytest.raises(ValueError, match="64 inputs are not whole blocks of 256 of Q4_K; use gguf:Q8_0"):
        quantizer(plain, tmp_path / "out", method="gguf:Q4_K_M").run()
