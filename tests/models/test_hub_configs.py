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


@every_file
def test_both_spellings_declare_the_same(file: Path, tmp_path: Path) -> None:
    config = json.loads(file.read_text())
    (tmp_path / "config.json").write_text(file.read_text())
    transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    rewritten = json.loads((tmp_path / "config.json").read_text())
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


def declared(name: str, **changes: object) -> DecoderConfig:
    """What is read of a hub's file with some fields changed; Ellipsis takes one away."""
    config = json.loads((HERE / "configs" / f"{name}.json").read_text()) | changes
    fields = Fields({key: value for key, value in config.items() if value is not ...})
    model = MODELS.load(str(config["architectures"][0]))
    assert issubclass(model, Decoder)
    return model.declare(fields)


def test_what_is_silent_is_the_familys() -> None:
    """As transformers has it: GPT-OSS stretches positions unless it is told not to, null shares the width."""
    assert declared("gpt-oss-120b", rope_scaling=...) == declared("gpt-oss-120b")
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
