"""What peft can put into an adapter beside linear layers, merged: heads, embeddings, DoRA, biases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pellucid.cli.main import main
from pellucid.config import ModelConfig
from pellucid.lora.merge import merge
from pellucid.lora.peft import read_adapter
from pellucid.models.checkpoint import Checkpoint
from tests.tiny import write_checkpoint

LINEAR = ["q_proj", "down_proj"]
SERVED = ("head", "embedding", "patterns")
KINDS: dict[str, dict[str, Any]] = {
    "dora": {"target_modules": LINEAR, "use_dora": True},
    "head": {"target_modules": [*LINEAR, "lm_head"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "whole head": {"target_modules": LINEAR, "modules_to_save": ["lm_head"]},
    "whole embedding": {"target_modules": LINEAR, "modules_to_save": ["embed_tokens"]},
    "biases": {"target_modules": ["q_proj"], "bias": "lora_only"},
    "patterns": {"target_modules": LINEAR, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 3}},
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_pefts(tmp_path: Path, kind: str, tied: bool) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    base = write_checkpoint(tmp_path / "base", tie_word_embeddings=tied, attention_bias=kind == "biases")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if kind == "biases":  # of which the tiny checkpoint has none
        model.save_pretrained(base)
    config = LoraConfig(r=4, lora_alpha=12, init_lora_weights=False, **KINDS[kind])
    tuned = get_peft_model(model, config)
    for name, parameter in tuned.named_parameters():
        if parameter.requires_grad and ("modules_to_save" in name or name.endswith(".bias")):
            torch.nn.init.normal_(parameter, std=0.1)
        if "magnitude" in name:
            parameter.data *= torch.rand_like(parameter) + 0.5
    tuned.save_pretrained(str(tmp_path / "adapter"))
    ids = torch.tensor([[*range(3, 40)]])
    with torch.no_grad():
        expected = tuned(ids).logits
        with tuned.disable_adapter():
            plain = tuned(ids).logits
    merged = merge(open_folder(base), tmp_path / "adapter", tmp_path / "merged")
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)(ids).logits
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    assert (found - plain).abs().max() > 1e-3, "the adapter changes nothing"
    assert merged.is_untied == (tied and ("head" in kind or "embedding" in kind))
    assert json.loads((tmp_path / "merged/config.json").read_text())["tie_word_embeddings"] == (
        tied and not merged.is_untied
    )
    own = load_file(base / "model.safetensors")
    if tied:
        own["lm_head.weight"] = own["model.embed_tokens.weight"]
    if kind not in SERVED:
        with pytest.raises(ValueError, match="served"):
            read_adapter(tmp_path / "adapter", own.get)
    else:
        assert read_adapter(tmp_path / "adapter", own.get)


def open_folder(folder: Path) -> Checkpoint:
    return Checkpoint.open(ModelConfig(model=str(folder), skip_tokenizer_init=True))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_head_of_a_multimodal_checkpoint_is_found_and_untied(tmp_path: Path, tied: bool) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    plain, base = write_checkpoint(tmp_path / "plain"), tmp_path / "base"
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    config = LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
    get_peft_model(model, config).save_pretrained(str(tmp_path / "adapter"))
    base.mkdir()
    weights = {
        f"language_model.{name}": value for name, value in load_file(plain / "model.safetensors").items()
    }
    head = "language_model.lm_head.weight"
    if tied:
        del weights[head]
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((plain / "config.json").read_text()) | {"tie_word_embeddings": tied}
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    (base / "config.json").write_text(json.dumps(whole))
    assert merge(open_folder(base), tmp_path / "adapter", tmp_path / "out").is_untied == tied
    found = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        found |= load_file(file)
    heads = [name for name in found if name.endswith("lm_head.weight")]
    assert heads == ["lm_head.weight" if tied else head], "one head, by the name that it has"
    changed = sorted(name for name, value in weights.items() if not torch.equal(found[name], value))
    assert changed == ([] if tied else [head])
    said = json.loads((tmp_path / "out/config.json").read_text())["text_config"]
    assert said["tie_word_embeddings"] is False


def test_what_cannot_be_merged_is_refused(tmp_path: Path, tiny: Path, adapters: dict[str, Path]) -> None:
    wider = write_checkpoint(tmp_path / "wider", hidden_size=64)
    with pytest.raises(ValueError, match="make"):
        merge(open_folder(wider), adapters["all"] / "adapter", tmp_path / "out")
    shallow = write_checkpoint(tmp_path / "shallow", num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"changes model.layers.1.*is it another model's"):
        merge(open_folder(shallow), adapters["all"] / "adapter", tmp_path / "out2")
    config = json.loads((tiny / "config.json").read_text())
    coded = tmp_path / "coded"
    coded.mkdir()
    for file in tiny.iterdir():
        (coded / file.name).write_bytes(file.read_bytes())
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    (coded / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    with pytest.raises(ValueError, match=r"quantized \(gptq\).*--enable-lora"):
        merge(open_folder(coded), adapters["all"] / "adapter", tmp_path / "out3")


def test_the_command_says_what_it_did(
    tmp_path: Path, tiny: Path, adapters: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["merge", str(tiny), str(adapters["all"] / "adapter"), str(tmp_path / "out")]
    assert main(words) == 0
    assert "14 matrices changed" in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "out/tokenizer.json").is_file()
    assert main(words) == 2 and "is not empty" in capsys.readouterr().err
