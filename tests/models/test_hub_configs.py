"""A config.json as the hub has it is read to the right numbers, and means what transformers makes of it.

The files are as they were published, but for the factors of longrope and what nothing here reads.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import pellucid
from pellucid.models.checkpoint import Checkpoint
from pellucid.models.decoder import Decoder
from pellucid.models.decoder_config import GQA, DecoderConfig
from pellucid.models.fields import Fields
from pellucid.models.registry import MODELS
from pellucid.models.rope import rope_config
from pellucid.models.text_config import text_config
from tests.models.facts import read

transformers = pytest.importorskip("transformers")
HERE = Path(__file__).parent
FILES = [
    *(HERE / "configs").glob("*.json"),
    *(Path(pellucid.__file__).parent / "assets" / "shapes").glob("*.json"),
]
FACTS = json.loads((HERE / "facts.json").read_text())
every_file = pytest.mark.parametrize("file", sorted(FILES), ids=lambda file: file.stem)


def checkpoint_of(config: dict[str, object], **generation: object) -> Checkpoint:
    return Checkpoint(name="", path=HERE, config=text_config(config), generation_config=generation)


def family_of(config: dict[str, object]) -> type[Decoder]:
    family = MODELS.load(checkpoint_of(config).architecture)
    assert issubclass(family, Decoder)
    return family


@every_file
def test_every_number_is_read(file: Path) -> None:
    assert json.loads(json.dumps(read(file))) == FACTS[file.stem]


def test_nothing_is_told_of_files_that_are_gone() -> None:
    assert FACTS.keys() == {file.stem for file in FILES}


def rewritten_by_transformers(config: dict[str, object], folder: Path) -> dict[str, object]:
    (folder / "config.json").write_text(json.dumps(config))
    transformers.AutoConfig.from_pretrained(folder).save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


@every_file
def test_both_spellings_declare_the_same(file: Path, tmp_path: Path) -> None:
    config = json.loads(file.read_text())
    rewritten = rewritten_by_transformers(config, tmp_path)
    assert rewritten.keys() != config.keys(), "the same spelling"
    family, hub, saved = family_of(config), checkpoint_of(config), checkpoint_of(rewritten)
    assert family.declare(Fields(saved.config)) == family.declare(Fields(hub.config))
    for name in (
        "architecture",
        "dtype",
        "vocab_size",
        "num_layers",
        "max_position_embeddings",
        "dense_reach",
    ):
        assert getattr(saved, name) == getattr(hub, name), name
    assert saved.eos_token_ids == hub.eos_token_ids


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_longrope_has_had_other_names(name: str) -> None:
    config = json.loads((HERE / "configs" / "phi-3-mini-128k-instruct.json").read_text())
    expected = rope_config(Fields(config), 96)
    config["rope_scaling"]["type"] = name
    assert rope_config(Fields(config), 96) == expected and expected.kind == "longrope"


def changed(name: str, changes: dict[str, object]) -> dict[str, object]:
    """A hub's file with some fields changed; Ellipsis takes one away."""
    config = json.loads((HERE / "configs" / f"{name}.json").read_text()) | changes
    return {key: value for key, value in config.items() if value is not ...}


def declared(name: str, **changes: object) -> DecoderConfig:
    """What is read of such a file."""
    config = changed(name, changes)
    return family_of(config).declare(Fields(config))


YARN: dict[str, object] = {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.2}
LINEAR = {"rope_type": "linear", "type": "linear", "factor": 8.0}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("olmo-3-1025-7b", {"rope_theta": 10000.0}),
        ("gemma-3-1b-it", {"rope_scaling": LINEAR, "rope_theta": ..., "rope_local_base_freq": 500.0}),
        ("mixtral-8x22b-v0.1", {"rope_theta": ...}),
        ("phi-3-mini-128k-instruct", {"original_max_position_embeddings": ...}),
        ("qwen2.5-7b-instruct", {"num_key_value_heads": None}),
        ("qwen2.5-7b-instruct", {"use_sliding_window": True, "max_window_layers": 3, "sliding_window": None}),
        ("ernie-4.5-0.3b-pt", {"num_key_value_heads": ...}),
        ("ernie-4.5-0.3b-pt", {"architectures": ["Ernie4_5_ForCausalLM"]}),
        ("exaone-4.0-32b", {"num_key_value_heads": ...}),
    ],
)
def test_odd_fields_mean_what_transformers_reads(
    name: str, changes: dict[str, object], tmp_path: Path
) -> None:
    config = changed(name, changes)
    rewritten = rewritten_by_transformers(config, tmp_path)
    assert family_of(config).declare(Fields(config)) == family_of(config).declare(Fields(rewritten))


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [("deepseek-v2-chat", "n_shared_experts", 0), ("glm-4.5", "n_shared_experts", 0)]
    + [("deepseek-v3", "norm_topk_prob", False), ("deepseek-v3", "rope_interleave", False)]
    + [("glm-4-9b-chat-hf", "partial_rotary_factor", 1.0)],
)
def test_null_is_not_the_familys_default(name: str, field: str, value: object) -> None:
    assert declared(name, **{field: None}) == declared(name, **{field: value}) != declared(name)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("olmo-3-1025-7b", {"rope_scaling": {"type": "yarn", "factor": 8.0}}, "named by 'rope_type'"),
        ("olmo-3-1025-7b", {"rope_scaling": YARN | {"truncate": False}}, "truncate .* is false"),
        ("gemma-3-1b-it", {"rope_scaling": ..., "rope_parameters": LINEAR}, "one object for each of"),
        ("gemma-2-2b", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping .* must be above 0"),
        ("granite-3.3-8b-instruct", {"logits_scaling": 0}, "logits_scaling .* is 0.0, must be above 0"),
        ("qwen2.5-0.5b-instruct", {"layer_types": ["chunked_attention"] * 24}, "24 of .'chunked_attention'"),
        ("deepseek-v2-chat", {"topk_method": "noaux_tc"}, "topk_method .* is 'noaux_tc', must be 'greedy'"),
        ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq .* is 2, must be 1"),
        ("deepseek-v3", {"mlp_layer_types": ["dense"]}, "mlp_layer_types .* 61 times"),
        ("olmoe-1b-7b", {"clip_qkv": 8.0}, "clip_qkv .* is 8.0, which is not supported"),
        (
            "granite-4.0-micro",
            {"layer_types": ["attention", "mamba"] * 20},
            "has mamba: such layers keep a state",
        ),
        ("granite-4.0-micro", {"layer_types": ...}, "has mamba: such layers keep a state"),
        ("granite-4.0-micro", {"num_local_experts": 64}, "num_local_experts .* is 64, must be 0 in"),
        ("smollm3-3b", {"no_rope_layers": [1, 0]}, "no_rope_layers .* has 2 entries for 36 layers"),
    ],
)
def test_what_nobody_computes_is_refused(name: str, changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        declared(name, **changes)


def test_what_is_silent_is_the_familys() -> None:
    """As transformers has it: GPT-OSS stretches positions unless it is told not to, null shares the width."""
    assert declared("gpt-oss-120b", rope_scaling=...) == declared("gpt-oss-120b")
    assert declared("gpt-oss-120b", rope_scaling={}) == declared("gpt-oss-120b")
    assert declared("gpt-oss-120b", rope_scaling={"rope_type": "default"}) != declared("gpt-oss-120b")
    for name, shared, own in [
        ("seed-oss-36b-instruct", 64, 128),
        ("ernie-4.5-0.3b-pt", 64, 128),
        ("gpt-oss-120b", 45, 64),
    ]:
        for said, expected in ((None, shared), (..., own)):
            mixer = declared(name, head_dim=said).layers[0].mixer
            assert isinstance(mixer, GQA) and mixer.heads.dim == expected, name


def test_a_token_cannot_take_more_experts_than_its_groups_have() -> None:
    with pytest.raises(ValueError, match="take 8 experts.*among 4: of 256 in 64 groups those of the best 1"):
        declared("deepseek-v3", n_group=64, topk_group=1)


@pytest.mark.parametrize(
    ("name", "generation", "ids"),
    [
        ("qwen3-30b-a3b", [151645, 151643], (151645, 151643)),
        ("qwen2.5-7b-instruct", [151645, 151643], (151645, 151643)),
        ("llama-3.1-8b-instruct", [128001, 128008, 128009], (128001, 128008, 128009)),
        ("gemma-2-2b", 1, (1,)),
        ("gemma3-4b", [1, 106], (1, 106)),
        ("phi-3-mini-4k-instruct", [32000, 32001, 32007], (32000, 32001, 32007)),
        ("phi-4-mini-instruct", [200020, 199999], (199999, 200020)),
        ("gpt-oss-20b", [200002, 199999, 200012], (200002, 199999, 200012)),
        ("glm-4.5-air", [151329, 151336, 151338], (151329, 151336, 151338)),
        ("deepseek-v3", 1, (1,)),
        ("mistral-7b-v0.1", None, (2,)),
    ],
)
def test_a_text_ends_by_either_file(name: str, generation: object, ids: tuple[int, ...]) -> None:
    (file,) = (file for file in FILES if file.stem == name)
    assert checkpoint_of(json.loads(file.read_text()), eos_token_id=generation).eos_token_ids == ids
