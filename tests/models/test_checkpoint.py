"""Opening checkpoints: what is found, what config.json means, and which refusals name the way out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pellucid.config import ModelConfig
from pellucid.models.checkpoint import Checkpoint
from pellucid.models.fields import Fields
from pellucid.models.mistral import Mistral
from pellucid.models.registry import MODELS
from pellucid.models.unserved import reason
from tests.models.conftest import CONFIG, Folder


def open_folder(folder: Folder) -> Checkpoint:
    return Checkpoint.open(ModelConfig(model=str(folder.write())))


def test_a_folder_says_what_it_holds(folder: Folder) -> None:
    checkpoint = open_folder(folder)
    assert checkpoint.architecture == "Qwen3ForCausalLM"
    assert checkpoint.dtype == "bfloat16"
    assert checkpoint.vocab_size == 50
    assert checkpoint.max_position_embeddings == 64
    assert [shard.name for shard in checkpoint.files] == ["model-1.safetensors", "model-2.safetensors"]
    assert checkpoint.tokenizer_path == folder.path
    assert not checkpoint.is_dummy


def test_eos_tokens_of_both_files_are_united(folder: Folder) -> None:
    (folder.path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 3], "top_k": 20}))
    checkpoint = open_folder(folder)
    assert checkpoint.eos_token_ids == (3, 7)
    assert checkpoint.generation_config["top_k"] == 20


def test_a_model_may_have_no_eos_token(folder: Folder) -> None:
    folder.config["eos_token_id"] = None
    assert open_folder(folder).eos_token_ids == ()


def test_the_dtype_is_read_from_either_spelling(folder: Folder) -> None:
    del folder.config["torch_dtype"]
    assert open_folder(folder).dtype == "float32"
    folder.config["dtype"] = "float16"
    assert open_folder(folder).dtype == "float16"


@pytest.mark.parametrize("dtype", ["auto", "bf16", "float64", "int8"])
def test_a_dtype_that_no_model_computes_in_is_refused_with_those_that_may_be_given(
    folder: Folder, dtype: str
) -> None:
    folder.config["torch_dtype"] = dtype
    with pytest.raises(ValueError, match=f"'{dtype}', which is not supported; give dtype=bfloat16 or"):
        assert open_folder(folder).dtype


def test_yarn_counts_toward_the_length(folder: Folder) -> None:
    folder.config["rope_scaling"] = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert open_folder(folder).max_position_embeddings == 128


def test_linear_scaling_counts_toward_the_longest_length_only(folder: Folder) -> None:
    folder.config["rope_scaling"] = {"type": "linear", "factor": 4.0}
    checkpoint = open_folder(folder)
    assert (checkpoint.max_position_embeddings, checkpoint.max_stretched_len) == (64, 256)


def test_an_empty_scaling_says_nothing(folder: Folder) -> None:
    folder.config |= {"rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 4.0}}
    assert open_folder(folder).max_stretched_len == 256


def test_rope_numbers_may_differ_by_layer_type(folder: Folder) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    folder.config["rope_parameters"] = {"full_attention": yarn, "sliding_attention": {"rope_type": "default"}}
    assert open_folder(folder).max_position_embeddings == 128


@pytest.mark.parametrize("shape", ["qwen3-0.6b", "qwen3-4b", "qwen3-8b", "Qwen3-8B", "qwen3-30b-a3b"])
def test_a_shape_has_neither_weights_nor_tokenizer(shape: str) -> None:
    checkpoint = Checkpoint.open(ModelConfig(model=f"shape:{shape}"))
    assert checkpoint.is_dummy
    assert checkpoint.files == () and checkpoint.tokenizer_path is None
    assert checkpoint.max_position_embeddings == 40960


def test_another_tokenizer_may_be_named(folder: Folder, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    model = ModelConfig(model=str(folder.write()), tokenizer=str(other))
    assert Checkpoint.open(model).tokenizer_path == other


def test_without_an_index_second_copies_of_the_weights_are_passed_over(folder: Folder) -> None:
    folder.write()
    (folder.path / "model.safetensors.index.json").unlink()
    (folder.path / "consolidated.safetensors").touch()
    shards = Checkpoint.open(ModelConfig(model=str(folder.path))).files
    assert [shard.name for shard in shards] == ["model-1.safetensors", "model-2.safetensors"]


def test_dummy_weights_need_no_files(folder: Folder) -> None:
    folder.write()
    for file in folder.path.glob("*.safetensors"):
        file.unlink()
    assert Checkpoint.open(ModelConfig(model=str(folder.path), load_format="dummy")).is_dummy


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"architectures": ["OPTForCausalLM"]},
            "unknown model architecture 'OPTForCausalLM'.*known: .*Llama",
        ),
        ({"architectures": ["BertModel"]}, "BertModel .* not served: its tokens see what follows them; take"),
        ({"architectures": ["XLMRobertaForSequenceClassification"]}, "its tokens see what follows them"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "it gives classes, and no tokens"),
        ({"architectures": ["ChatGLMModel"]}, "such as zai-org/glm-4-9b-chat-hf"),
        ({"architectures": ["Qwen3NextForCausalLM"]}, "it has layers that keep a state"),
        (
            {"architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True},
            "use_bidirectional_attention in config.json is True: its tokens see what follows them",
        ),
        ({"architectures": None}, "must name one .known: .*Llama"),
        ({"vision_config": {}}, "vision_config: it is a multimodal model.*known: .*Llama"),
        (
            {"text_config": {}, "architectures": ["Mistral3ForConditionalGeneration"]},
            "text_config: it is a multimodal model, Mistral3.* text, also of Gemma3ForConditionalGeneration",
        ),
        ({"is_causal": False}, "is_causal in config.json is false"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention in config.json is True"),
        ({"per_layer_config": {"1": {"head_dim": 4}}}, "per_layer_config .*: single layers have fields"),
    ],
)
def test_models_that_are_not_served_are_refused_with_those_that_are(
    folder: Folder, change: dict[str, object], words: str
) -> None:
    folder.config |= change
    with pytest.raises(ValueError, match=words):
        open_folder(folder)


def test_what_is_served_has_no_reason_not_to_be() -> None:
    assert [name for name in MODELS if reason(name) is not None] == []


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"type": "mrope", "mrope_section": [1, 1, 2]}, "multimodal rotary embedding"),
        ({"rope_type": "default", "mrope_section": [1, 1, 2]}, "multimodal rotary embedding"),
        ({"rope_type": "xpos"}, "unknown rotary embedding 'xpos'.*known: default, linear"),
        ({"rope_type": "linear"}, "config.json has no 'factor'"),
        ({"rope_type": "linear", "factor": "two"}, "factor in config.json is 'two', must be a number"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 0}, "is 0, must be at least 1"),
        ({"rope_type": "linear", "factor": 0}, "factor in config.json is 0.0, must be above 0"),
    ],
)
def test_rotary_embeddings_that_are_not_served_are_refused(
    folder: Folder, scaling: dict[str, object], words: str
) -> None:
    folder.config["rope_scaling"] = scaling
    with pytest.raises(ValueError, match=words):
        _ = open_folder(folder).max_position_embeddings


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("/nowhere/at/all", "no folder '/nowhere/at/all'; give a folder with config.json"),
        ("just-a-word", "no folder 'just-a-word'; give .* a hub id such as"),
        ("shape:gpt-9", "unknown shape 'shape:gpt-9' .known: .*qwen3-0.6b"),
    ],
)
def test_names_that_lead_nowhere_are_refused(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Checkpoint.open(ModelConfig(model=name))


def test_an_incomplete_folder_is_refused(folder: Folder) -> None:
    folder.write()
    (folder.path / "model-2.safetensors").unlink()
    with pytest.raises(ValueError, match="lacks model-2.safetensors"):
        Checkpoint.open(ModelConfig(model=str(folder.path)))
    (folder.path / "model.safetensors.index.json").unlink()
    (folder.path / "model-1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no \*.safetensors in .* load_format='dummy'"):
        Checkpoint.open(ModelConfig(model=str(folder.path)))
    (folder.path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        Checkpoint.open(ModelConfig(model=str(folder.path)))
    (folder.path / "config.json").unlink()
    with pytest.raises(ValueError, match="no config.json in"):
        Checkpoint.open(ModelConfig(model=str(folder.path)))


def test_an_index_that_lists_nothing_is_named(folder: Folder) -> None:
    index = folder.write() / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(ValueError, match="model.safetensors.index.json has no 'weight_map'"):
        Checkpoint.open(ModelConfig(model=str(folder.path)))


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("field", ["num_attention_heads", "num_key_value_heads", "sliding_window"])
def test_a_size_of_nothing_is_refused(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{field} in config.json is {value}, must be at least 1"):
        Mistral.declare(Fields({**CONFIG, field: value}))


def test_a_number_that_is_no_integer_is_refused() -> None:
    for value in (1.5, float("inf"), float("nan"), True, "8"):
        with pytest.raises(ValueError, match=f"head_dim in config.json is {value!r}, must be an integer"):
            Mistral.declare(Fields({**CONFIG, "head_dim": value}))


def test_an_unreachable_hub_is_a_refusal_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model = ModelConfig(model="nobody/no-model", download_dir=str(tmp_path))
    with pytest.raises(ValueError, match="no folder 'nobody/no-model', and the Hugging Face hub has not"):
        Checkpoint.open(model)


def test_modelscope_without_its_package_says_what_to_install() -> None:
    try:
        import modelscope  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        with pytest.raises(ValueError, match="pip install modelscope"):
            Checkpoint.open(ModelConfig(model="nobody/no-model", hub="modelscope"))
    else:
        pytest.skip("modelscope is installed")


def test_opening_imports_no_torch(folder: Folder) -> None:
    code = (
        "import sys\n"
        "from pellucid.config import ModelConfig\n"
        "from pellucid.models.checkpoint import Checkpoint\n"
        f"Checkpoint.open(ModelConfig(model={str(folder.write())!r})).max_position_embeddings\n"
        "sys.exit('torch' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], check=False, env=environment).returncode == 0
