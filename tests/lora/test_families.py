"""Adapters of every family, as peft runs them: served, and merged into a checkpoint of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from pellucid import LLM, LoRARequest, SamplingParams
from pellucid.config import ModelConfig
from pellucid.lora.merge import merge
from pellucid.models.checkpoint import Checkpoint
from tests.models.test_parity import CASES, Case, Reference

FIRST = {case.family: case for case in reversed(CASES)}
UNSERVED = "kv_b_proj"  # what it makes is never there
UNREAD = ".indexer."
NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)


def linear_layers(model: nn.Module) -> list[str]:
    """Of all layers, embedding and head; where there are experts, of layers those of attention alone."""
    names = [name for name, _ in model.named_modules()]
    linear = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    paths = [name for name in linear if ".layers." in name and UNREAD not in name]
    paths = [path for path in paths if not path.endswith(UNSERVED)]
    has_experts = any(name.endswith(".experts") for name, _ in model.named_modules())
    paths = [path for path in paths if not has_experts or ".self_attn." in path]
    ends = [name for name in names if name.endswith(("embed_tokens", "lm_head"))]
    return paths + ends


def tokens_of(folder: Path, prompt: list[int], **options: object) -> list[int]:
    adapter = options.pop("adapter", None)
    wish = None if adapter is None else LoRARequest("a", 1, str(adapter))
    with LLM(
        str(folder), dtype="float32", device="cpu", cpu_kv_cache_gib=0.01, max_model_len=96,
        skip_tokenizer_init=True, enable_lora=wish is not None, **options,
    ) as llm:  # fmt: skip
        (output,) = llm.generate([prompt], GREEDY, use_tqdm=False, lora_request=wish)
    assert output.error is None, output.error
    return list(output.outputs[0].token_ids)


@pytest.mark.parametrize("case", FIRST.values(), ids=FIRST.keys())
def test_tokens_are_pefts(case: Case, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    reference = Reference(case, tmp_path / "base")
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=linear_layers(reference.model), init_lora_weights=False
    )
    tuned = get_peft_model(reference.model, config)
    tuned.save_pretrained(str(tmp_path / "adapter"))
    prompt = reference.prompts[0]
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            ids = torch.cat([ids, tuned(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
        with tuned.disable_adapter():
            plain = int(tuned(torch.tensor([prompt]), use_cache=False).logits[0, -1].argmax())
    expected = ids[0, len(prompt) :].tolist()
    base = Checkpoint.open(ModelConfig(model=str(tmp_path / "base"), skip_tokenizer_init=True))
    merge(base, tmp_path / "adapter", tmp_path / "merged")
    assert tokens_of(tmp_path / "merged", prompt) == expected
    assert tokens_of(tmp_path / "base", prompt, adapter=tmp_path / "adapter") == expected
    assert expected[0] != plain or len(set(expected)) > 1


@pytest.mark.parametrize("spelling", ["model.language_model.", "language_model.model."])
def test_adapters_of_multimodal_checkpoints_have_their_names(spelling: str, tmp_path: Path) -> None:
    """As transformers has had them, before and since version 4.52."""
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file, save_file

    reference = Reference(FIRST["Gemma3Text:Gemma3"], tmp_path / "base")
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    get_peft_model(reference.model, config).save_pretrained(str(tmp_path / "adapter"))
    prompt = reference.prompts[0]
    expected = tokens_of(tmp_path / "base", prompt, adapter=tmp_path / "adapter")
    assert expected != tokens_of(tmp_path / "base", prompt)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    inside = "base_model.model."
    tensors = {key.replace(f"{inside}model.", inside + spelling): t for key, t in load_file(file).items()}
    images = f"{inside}{spelling.replace('language_model', 'vision_tower')}layers.0.q_proj"  # passed over
    shapes = {"lora_A": (4, 8), "lora_B": (8, 4)}
    save_file(tensors | {f"{images}.{name}.weight": torch.ones(s) for name, s in shapes.items()}, file)
    assert tokens_of(tmp_path / "base", prompt, adapter=tmp_path / "adapter") == expected


def test_what_is_not_computed_is_not_changed_silently(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    reference = Reference(FIRST["DeepseekV2"], tmp_path / "base")
    config = LoraConfig(r=4, target_modules=[UNSERVED], init_lora_weights=False)
    get_peft_model(reference.model, config).save_pretrained(str(tmp_path / "adapter"))
    with pytest.raises(AssertionError, match="kv_b_proj; adapters of linear layers alone are served"):
        tokens_of(tmp_path / "base", [1, 2], adapter=tmp_path / "adapter")
