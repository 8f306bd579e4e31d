"""Every family against transformers, through our loader: the same float32 logits, the same greedy tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pellucid.models.loader import torch_module
from tests.models.cases import CASES, MOE, VOCAB, Case, Reference, llama3, longrope, rope
from tests.models.harness import Harness, load
from tests.models.margins import LEAST_MARGIN, noted_margins

TOLERANCE = 1e-4
NUM_TOKENS = 32
MAX_LEN = 128


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name.replace(" ", "-"))
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    case = request.param
    return Reference(case, tmp_path_factory.mktemp("reference"))


@pytest.fixture
def harness(reference: Reference) -> Harness:
    return Harness(load(reference.folder, max_model_len=MAX_LEN), num_seqs=3, max_len=MAX_LEN)


def test_logits_of_ragged_prompts_are_those_of_transformers(reference: Reference, harness: Harness) -> None:
    ours = harness.step(dict(enumerate(reference.prompts)))
    for prompt, logits in zip(reference.prompts, ours, strict=True):
        assert_close(logits, reference.logits(prompt))


def test_logits_of_prompts_in_chunks_are_those_of_transformers(
    reference: Reference, harness: Harness
) -> None:
    long, _, other = reference.prompts
    steps = [
        {0: long[:5]},
        {0: long[5:21], 2: other[:1]},
        {2: other[1:17], 0: long[21:36]},
        {0: long[36:], 2: other[17:]},
    ]
    chunks: dict[int, list[Tensor]] = {0: [], 2: []}
    for work in steps:
        for seq, logits in zip(work, harness.step(work), strict=True):
            chunks[seq].append(logits)
    assert_close(torch.cat(chunks[0]), reference.logits(long))
    assert_close(torch.cat(chunks[2]), reference.logits(other))


def test_greedy_tokens_are_those_of_transformers(reference: Reference, harness: Harness) -> None:
    with noted_margins(torch_module(harness.built.model)) as margins:
        outputs = harness.generate(reference.prompts, NUM_TOKENS)
    assert min(margins, default=1.0) > LEAST_MARGIN, "routers are near a tie: take another seed"
    for prompt, output in zip(reference.prompts, outputs, strict=True):
        # Each token is the best one after those before it, so greedy decoding would have chosen the same.
        expected = reference.logits(prompt + output)[len(prompt) - 1 : -1].argmax(-1)
        assert output == expected.tolist()


def test_dynamic_scaling_is_that_of_the_longest_sequence(tmp_path: Path) -> None:
    options = rope("dynamic", factor=3.0) | {"max_position_embeddings": 32}
    reference = Reference(Case("dynamic", "Llama", options), tmp_path)
    tokens = torch.randint(VOCAB, (80,)).tolist()
    harness = Harness(load(tmp_path, max_model_len=80), num_seqs=1, max_len=80)
    (logits,) = harness.step({0: tokens})
    assert_close(logits, reference.logits(tokens))


def test_longrope_is_long_if_the_engine_admits_long_sequences(tmp_path: Path) -> None:
    case = Case("long", "Phi3", longrope(original=32) | {"tie_word_embeddings": True})
    reference = Reference(case, tmp_path)
    harness = Harness(load(tmp_path, max_model_len=MAX_LEN), num_seqs=1, max_len=MAX_LEN)
    (logits,) = harness.step({0: reference.prompts[0]})  # of 37 tokens
    assert_close(logits, reference.logits(reference.prompts[0]))


def test_a_config_as_transformers_4_writes_it_means_the_same(tmp_path: Path) -> None:
    reference = Reference(Case("llama3", "Llama", llama3()), tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    scaling = config.pop("rope_parameters")
    config |= {"rope_theta": scaling.pop("rope_theta"), "torch_dtype": config.pop("dtype")}
    config["rope_scaling"] = {"type": scaling.pop("rope_type"), **scaling}
    file.write_text(json.dumps(config))
    harness = Harness(load(tmp_path, max_model_len=MAX_LEN), num_seqs=1, max_len=MAX_LEN)
    (logits,) = harness.step({0: reference.prompts[0]})
    assert_close(logits, reference.logits(reference.prompts[0]))


def test_bfloat16_logits_are_near_those_in_float32(tmp_path: Path) -> None:
    reference = Reference(Case("bfloat16", "Qwen3", {"head_dim": 32, "attention_bias": True}), tmp_path)
    built = load(tmp_path, max_model_len=MAX_LEN, dtype=torch.bfloat16)
    (logits,) = Harness(built, num_seqs=1, max_len=MAX_LEN).step({0: reference.prompts[0]})
    expected = reference.logits(reference.prompts[0])
    assert (logits.float() - expected).norm() / expected.norm() < 0.03


def assert_close(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours.float(), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral", "GraniteMoe"])
def test_experts_in_one_tensor_are_those_of_many(family: str, tmp_path: Path) -> None:
    reference = Reference(Case("one", family, MOE | {"num_local_experts": 6}), tmp_path)
    (one_by_one,) = Harness(load(tmp_path, max_model_len=MAX_LEN), num_seqs=1, max_len=MAX_LEN).step(
        {0: reference.prompts[0]}
    )
    reference.model.save_pretrained(tmp_path, save_original_format=False)
    built = load(tmp_path, max_model_len=MAX_LEN)
    (all_in_one,) = Harness(built, num_seqs=1, max_len=MAX_LEN).step({0: reference.prompts[0]})
    assert torch.equal(one_by_one, all_in_one)
