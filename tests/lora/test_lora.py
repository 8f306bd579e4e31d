"""Adapters as peft writes them: tokens are those of the model with the adapter merged into it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from shutil import copytree

import pytest
import torch
from safetensors.torch import load_file, save_file

from pellucid import LLM, LoRARequest, SamplingParams
from pellucid.lora.content import content_of
from pellucid.lora.peft import read_adapter
from pellucid.lora.peft_config import read_config
from pellucid.lora.request import AdapterRef
from pellucid.quant.online import FORMATS
from pellucid.quant.rounding import rounded
from tests.models import parallel
from tests.tiny import write_checkpoint

pytestmark = pytest.mark.usefixtures("forked_members")

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False, "prompt_lookup_min": 1}
BASE: dict[str, object] = {"enable_lora": True, "max_loras": 2, "block_size": 16, "cpu_kv_cache_gib": 0.01}
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
PROMPTS = [[*range(5 + i, 40 + 3 * i)] for i in range(6)]


@pytest.fixture(scope="module")
def expected(tiny: Path, adapters: dict[str, Path]) -> dict[str | None, list[list[int]]]:
    models = {None: tiny} | {name: folder / "merged" for name, folder in adapters.items()}
    return {name: ask(LLM(str(model), cpu_kv_cache_gib=0.01), [None] * 6) for name, model in models.items()}


def ask(llm: LLM, wishes: list[LoRARequest | None]) -> list[list[int]]:
    with llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=wishes)
    return [output.outputs[0].token_ids for output in outputs]


def wish(adapters: dict[str, Path], name: str | None) -> LoRARequest | None:
    return None if name is None else LoRARequest(name, 1, str(adapters[name] / "adapter"))


COMPANIES = {
    "plain": {},
    "overlapped, small chunks": {"depth": 2, "max_num_batched_tokens": 24},
    "few slots": {"max_num_seqs": 2},
    "one at a time": {"max_loras": 1},
    "drafts": {"speculative_config": NGRAM, "depth": 2},
    "few blocks": {"num_gpu_blocks_override": 12, "depth": 2},
    "tp": {"tensor_parallel_size": 2},
    "pp": {"pipeline_parallel_size": 2},
    "in its own process": {"executor": "multiproc"},
}


@pytest.mark.parametrize("options", COMPANIES.values(), ids=COMPANIES.keys())
def test_each_request_has_its_own(tiny: Path, adapters, expected, options: dict) -> None:
    names = ["all", None, "some", "one", "some", "all"]
    tokens = ask(LLM(str(tiny), **{**BASE, **options}), [wish(adapters, name) for name in names])
    assert tokens == [expected[name][i] for i, name in enumerate(names)]
    assert expected["all"] != expected[None] != expected["one"], "the adapters change nothing"


def test_prefixes_are_not_shared_across_adapters(tiny: Path, adapters, expected) -> None:
    with LLM(str(tiny), **BASE) as llm:
        found = [
            llm.generate([PROMPTS[5]], GREEDY, use_tqdm=False, lora_request=wish(adapters, name))[0]
            for name in ("all", None, "all")
        ]
    assert [output.num_cached_tokens for output in found] == [0, 0, 32]
    assert [output.outputs[0].token_ids for output in found] == [
        expected[name][5] for name in ("all", None, "all")
    ]


def test_the_least_recently_used_give_way(tiny: Path, adapters, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device, and in host memory, where what the device has in use is in use, too."""
    read, asked = list[str](), ["all", "some", "all", "one", "all", "some", "all", "one"]

    def reading(folder: Path, *names: object) -> object:
        read.append(folder.parent.name)
        return read_adapter(folder, *names)  # type: ignore[arg-type]

    monkeypatch.setattr("pellucid.features.lora.worker.read_adapter", reading)
    placed = list[set[str]]()
    with LLM(str(tiny), **BASE, max_cpu_loras=2) as llm:
        features = llm.llm_engine.engine.executor.worker.runner.features._features  # type: ignore[union-attr]
        for name in asked:
            llm.generate(PROMPTS[:1], SamplingParams(max_tokens=1), lora_request=wish(adapters, name))
            placed.append({AdapterRef.decode(ref).name for ref in features["lora"]._adapters._places})
    assert placed[3:] == [{"all", "one"}] * 2 + [{"all", "some"}] * 2 + [{"all", "one"}]
    assert read == ["all", "some", "one", "some", "one"]


def put(source: Path, folder: Path) -> None:
    """Write an adapter there, dated as every other."""
    for file in sorted(source.iterdir()):
        (folder / file.name).write_bytes(file.read_bytes())
        os.utime(folder / file.name, ns=(10**18, 10**18))


def test_an_adapter_is_what_its_files_hold(tiny: Path, adapters, expected, tmp_path: Path) -> None:
    """Other numbers by the same name find nothing of the old ones, the old ones come back from any tier."""
    folder, tiers = (
        tmp_path / "adapter",
        {"kv_offloading_size": 0.01, "kv_offloading_path": str(tmp_path / "kv")},
    )
    folder.mkdir()
    for names in (("all", "some", "all"), ("some", "one")):
        with LLM(str(tiny), **BASE, **tiers) as llm:
            for name in names:
                put(adapters[name] / "adapter", folder)
                wished = LoRARequest("mine", 1, str(folder))
                found = llm.generate([PROMPTS[5]], GREEDY, use_tqdm=False, lora_request=wished)[0]
                assert found.outputs[0].token_ids == expected[name][5], f"{name} of {names}"
        assert found.num_cached_tokens == {"all": 32, "one": 0}[name]
    with LLM(str(tiny), **BASE, **tiers) as llm:
        wished = LoRARequest("another name", 2, str(adapters["some"] / "adapter"))
        found = llm.generate([PROMPTS[5]], GREEDY, use_tqdm=False, lora_request=wished)[0]
    assert found.num_cached_tokens == 32 and found.outputs[0].token_ids == expected["some"][5]


def test_the_same_matrices_in_another_scale_are_another_adapter(adapters, tmp_path: Path) -> None:
    copies = [copytree(adapters["one"] / "adapter", tmp_path / name) for name in ("same", "other")]
    config = json.loads((copies[1] / "adapter_config.json").read_text())
    (copies[1] / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 99}))
    same, other = map(content_of, copies)
    assert same == content_of(adapters["one"] / "adapter") != other


def scores(model: Path, options: dict, lora: LoRARequest | None = None) -> list[float]:
    """Log-probabilities of the first prompt's tokens."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with LLM(str(model), **options) as llm:
        (output,) = llm.generate(PROMPTS[:1], params, use_tqdm=False, lora_request=lora)
    assert output.prompt_logprobs is not None, output.error
    known = zip(output.prompt_logprobs[1:], PROMPTS[0][1:], strict=True)
    return [each[token].logprob for each, token in known if each]


def test_prompts_are_scored_by_the_head_with_its_adapter(tiny: Path, adapters) -> None:
    merged = scores(adapters["some"] / "merged", {"cpu_kv_cache_gib": 0.01})
    assert scores(tiny, BASE, wish(adapters, "some")) == pytest.approx(merged, abs=1e-4)
    assert scores(tiny, BASE) != pytest.approx(merged, abs=1e-4)


@pytest.mark.parametrize(
    ("quantization", "dtype", "most"), [("int8", "bfloat16", 0.3), ("fp8", "float32", 2.0)]
)
def test_adapters_are_added_to_quantized_layers(
    tiny: Path, adapters, quantization: str, dtype: str, most: float
) -> None:
    """Whose products differ by some rounding, and what adapters change by much more.

    In 16 bits native code would gate in the pass in which it multiplies.
    """
    coded = BASE | {"quantization": quantization, "dtype": dtype}
    adapted = scores(tiny, coded, wish(adapters, "all"))
    assert adapted == pytest.approx(scores(tiny, BASE, wish(adapters, "all")), abs=most)
    assert adapted != pytest.approx(scores(tiny, coded), abs=3 * most)


@pytest.mark.parametrize("way", ["nf4", pytest.param("int4", marks=pytest.mark.matrix)])
def test_adapters_are_added_to_codes(tiny: Path, adapters, tmp_path: Path, way: str) -> None:
    """As to plain weights that are the codes' numbers."""
    numbers = copytree(tiny, tmp_path / "numbers")
    weights = load_file(tiny / "model.safetensors")
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        weights[name] = rounded(weights[name].bfloat16(), FORMATS[way](weights[name].shape[1])).dequantized()
    save_file(weights, numbers / "model.safetensors")
    expected = scores(numbers, BASE, wish(adapters, "all"))
    coded = BASE | {"quantization": way, "dtype": "bfloat16"}
    assert scores(tiny, coded, wish(adapters, "all")) == pytest.approx(expected, abs=0.3)
    assert scores(numbers, BASE) != pytest.approx(expected, abs=0.9)


def test_a_model_that_does_not_ask_for_adapters_of_its_ends_has_those_of_its_layers(
    adapters, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path, architectures=[parallel.ARCHITECTURE])
    with LLM(str(folder), **BASE) as llm:
        wishes = [wish(adapters, "some"), wish(adapters, "all")]
        ends, layers = llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False, lora_request=wishes)
    assert "changes lm_head; adapters of linear layers" in (ends.error or "")
    assert layers.error is None and len(layers.outputs[0].token_ids) == 16


def test_whole_modules_are_refused_unless_they_are_the_models_own(tiny: Path, adapters, tmp_path) -> None:
    folder = tmp_path / "whole"
    copytree(adapters["some"] / "adapter", folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    copies = [name for name in tensors if name.endswith("base_layer.weight")]
    assert copies, "peft has saved no copies of what it adapts"
    tensors[copies[0]][0, 0] += 1
    save_file(tensors, folder / "adapter_model.safetensors")
    with LLM(str(tiny), **BASE) as llm:
        wishes = [LoRARequest("whole", 1, str(folder)), wish(adapters, "some")]
        changed, same = llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False, lora_request=wishes)
    path = copies[0].removeprefix("base_model.model.").replace(".base_layer", "")
    assert f"a {path} of its own" in (changed.error or "")
    assert same.error is None


def test_an_adapter_that_does_not_fit_ends_its_request_alone(
    tiny: Path, adapters, expected, tmp_path
) -> None:
    wider = write_checkpoint(tmp_path / "wider", hidden_size=64, num_hidden_layers=1)
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(wider, dtype=torch.float32)
    get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    with LLM(str(tiny), **BASE) as llm:
        wrong = LoRARequest("wider", 1, str(tmp_path / "adapter"))
        outputs = llm.generate(
            PROMPTS[:2], GREEDY, use_tqdm=False, lora_request=[wrong, wish(adapters, "all")]
        )
    assert "q_proj" in (outputs[0].error or "") and outputs[0].outputs[0].finish_reason == "error"
    assert outputs[1].outputs[0].token_ids == expected["all"][1]


def test_numbers_that_are_none_are_refused(tiny: Path, adapters, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    copytree(adapters["one"] / "adapter", folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    name = next(name for name in tensors if "lora_B" in name)
    tensors[name][0, 0] = torch.inf
    save_file(tensors, folder / "adapter_model.safetensors")
    with LLM(str(tiny), **BASE) as llm:
        (output,) = llm.generate(
            PROMPTS[:1], GREEDY, use_tqdm=False, lora_request=LoRARequest("broken", 1, str(folder))
        )
    assert "k_proj: lora_B has numbers that are not finite" in (output.error or "")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "lm_head"),
        ({"r": 0}, "r is 0"),
    ],
    ids=["dora", "another kind", "biases", "whole modules", "no rank"],
)
def test_what_is_not_served_is_refused_by_name(tmp_path: Path, change: dict, says: str) -> None:
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, **change}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=says):
        read_config(tmp_path)


def test_refusals_before_anything_runs(tiny: Path, adapters) -> None:
    with LLM(str(tiny), **(BASE | {"max_lora_rank": 4})) as llm:
        with pytest.raises(ValueError, match="rank 8, above max_lora_rank 4"):
            llm.generate([[1, 2]], GREEDY, lora_request=wish(adapters, "some"))
        with pytest.raises(ValueError, match="no LoRA adapter"):
            llm.generate([[1, 2]], GREEDY, lora_request=LoRARequest("x", 1, "/nowhere"))
    with LLM(str(tiny), cpu_kv_cache_gib=0.01) as llm, pytest.raises(ValueError, match="enable_lora"):
        llm.generate([[1, 2]], GREEDY, lora_request=wish(adapters, "all"))
