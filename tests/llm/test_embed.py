"""Vectors of texts are transformers' hidden states behind their last tokens, in any company."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pellucid import LLM, SamplingParams
from pellucid.pooling import PoolingParams, recipe_of
from tests.llm.test_invariance import BASE, random_requests

pytestmark = pytest.mark.usefixtures("forked_members")
PLAIN = PoolingParams(normalize=False)


def vectors(folder: Path, prompts: list[list[int]], params: PoolingParams, **options: object) -> np.ndarray:
    with LLM(str(folder), **(BASE | options)) as llm:
        outputs = llm.embed(prompts, use_tqdm=False, pooling_params=params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    return np.array([output.outputs.embedding for output in outputs])


def expected(folder: Path, prompts: list[list[int]]) -> np.ndarray:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        states = [model(torch.tensor([prompt])).last_hidden_state[0, -1] for prompt in prompts]
    return torch.stack(states).numpy()


COMPANIES = {
    "all at once": {},
    "prefix hits and small chunks": {"max_num_batched_tokens": 24, "depth": 2},
    "two ranks": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
}


def some(*others: str) -> list[Any]:
    """The companies; the others when the layouts of ranks, or the matrix, are asked for."""
    marks = {name: [pytest.mark.parallel if "two" in name else pytest.mark.matrix] for name in others}
    return [pytest.param(each, id=name, marks=marks.get(name, ())) for name, each in COMPANIES.items()]


@pytest.mark.parametrize("options", some("two stages"))
def test_vectors_are_those_of_transformers(tiny: Path, options: dict) -> None:
    prompts, _ = random_requests(9, seed=6)
    np.testing.assert_allclose(vectors(tiny, prompts, PLAIN, **options), expected(tiny, prompts), atol=1e-4)


def test_they_are_cut_and_normalized(tiny: Path) -> None:
    prompts, _ = random_requests(3, seed=7)
    true = expected(tiny, prompts)[:, :10]
    true /= np.linalg.norm(true, axis=1, keepdims=True)
    np.testing.assert_allclose(vectors(tiny, prompts, PoolingParams(dimensions=10)), true, atol=1e-5)
    with pytest.raises(ValueError, match=r"dimensions is 49, must be in \[1, 48\]"):
        vectors(tiny, prompts, PoolingParams(dimensions=49))


def test_a_checkpoint_without_a_head_has_names_without_a_model(tiny: Path, tmp_path: Path) -> None:
    from transformers import AutoModel

    prompts, _ = random_requests(3, seed=8)
    model = AutoModel.from_pretrained(tiny, dtype=torch.float32)
    for name in ("Qwen3Model", "Qwen3ForCausalLM"):  # as it is saved, and as the hub has it
        model.config.tie_word_embeddings = name != "Qwen3Model"
        model.save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
        got = vectors(tmp_path, prompts, PLAIN, skip_tokenizer_init=True)
        np.testing.assert_allclose(got, expected(tiny, prompts), atol=1e-4)


def test_scores_are_cosines_and_texts_are_completed_beside_them(tiny: Path) -> None:
    with LLM(str(tiny), **BASE) as llm:
        alone = llm.generate(["the fox"], SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
        scores = [each.outputs.score for each in llm.score("a dog", ["a dog", "the fox"], use_tqdm=False)]
        pairs = llm.score(["a dog", "a dog"], ["a dog", "the fox"], use_tqdm=False)
        again = llm.generate(["the fox"], SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
        with pytest.raises(ValueError, match="data_1 has 2 texts for 3"):
            llm.score(["a", "b"], ["a", "b", "c"])
    assert scores[0] == pytest.approx(1, abs=1e-5) and abs(scores[1]) < 1
    assert [pair.outputs.score for pair in pairs] == pytest.approx(scores, abs=1e-5)
    assert alone[0].outputs[0].token_ids == again[0].outputs[0].token_ids


def test_a_score_may_be_how_likely_yes_is_against_no(tiny: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    query, documents = "the fox", ["a dog", "quick brown", "lazy " * 12]
    with LLM(str(tiny), **BASE) as llm:
        scores = llm.score(query, documents, use_tqdm=False, classifier_from_token=["a", "b"])
        tokenizer = llm.get_tokenizer()
        for words in (["a"], "no", ["fox jumps", "a"]):
            with pytest.raises(ValueError, match="classifier_from_token"):
                llm.score("a", "b", classifier_from_token=words)
    pair = [tokenizer.encode("a")[0], tokenizer.encode("b")[0]]
    for document, score in zip(documents, scores, strict=True):
        tokens = tokenizer.encode(query) + tokenizer.encode(document)
        assert score.prompt_token_ids == tokens
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -1, pair]
        assert score.outputs.score == pytest.approx(float(logits.softmax(-1)[1]), abs=1e-5)


def pooled(tiny: Path, folder: Path, mode: str) -> Path:
    """The same checkpoint, which says how its vectors are made, as sentence-transformers writes it.

    mode: a flag, as before version 6, or a word.
    """
    folder.mkdir(exist_ok=True)
    for file in tiny.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "1_Pooling").mkdir()
    said: dict[str, object] = {"embedding_dimension": 48, "pooling_mode": mode, "include_prompt": True}
    if mode.startswith("pooling_mode_"):
        said = {"word_embedding_dimension": 48, "pooling_mode_cls_token": False, mode: True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(said))
    return folder


@pytest.mark.parametrize("options", some("two ranks", "all at once"))
def test_means_of_all_tokens_are_those_of_transformers(tiny: Path, tmp_path: Path, options: dict) -> None:
    from transformers import AutoModel

    prompts, _ = random_requests(8, seed=9)
    prompts += [[7], prompts[0]]
    model = AutoModel.from_pretrained(tiny, dtype=torch.float32).eval()
    with torch.no_grad():
        means = [model(torch.tensor([prompt])).last_hidden_state[0].mean(0).numpy() for prompt in prompts]
    folder = pooled(tiny, tmp_path, "pooling_mode_mean_tokens")
    np.testing.assert_allclose(vectors(folder, prompts, PLAIN, **options), np.stack(means), atol=1e-4)


def test_means_survive_preemption(tiny: Path, tmp_path: Path) -> None:
    prompts = [[(7 * i + j) % 300 + 1 for i in range(60)] for j in range(12)]
    folder = pooled(tiny, tmp_path, "mean")
    small = {"num_gpu_blocks_override": 17, "max_num_batched_tokens": 24, "depth": 2}
    np.testing.assert_allclose(
        vectors(folder, prompts, PLAIN, **small), vectors(folder, prompts, PLAIN), atol=1e-4
    )


def with_steps(tiny: Path, folder: Path, *steps: str) -> Path:
    """A checkpoint as sentence-transformers writes it, whose texts go through these after pooling."""
    pooled(tiny, folder, "mean").joinpath("1_Pooling").rename(folder / "pool")
    paths = {"Transformer": "", "Pooling": "pool"} | {step: f"2_{step}" for step in steps}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (name, path) in enumerate(paths.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


def test_vectors_have_length_1_where_the_checkpoint_normalizes(tiny: Path, tmp_path: Path) -> None:
    prompts = random_requests(2, seed=3)[0]
    true = vectors(pooled(tiny, tmp_path / "mean", "mean"), prompts, PLAIN)
    lengths = np.linalg.norm(true, axis=1, keepdims=True)
    for steps, made in (((), true), (("Dropout", "Normalize"), true / lengths)):
        folder = with_steps(tiny, tmp_path / str(len(steps)), *steps)
        with LLM(str(folder), **BASE) as llm:
            got = [output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False)]
            (score,) = llm.score(*([prompt] for prompt in prompts), use_tqdm=False)
        np.testing.assert_allclose(got, made, atol=1e-5)
        assert score.outputs.score == pytest.approx(float(np.prod(true / lengths, axis=0).sum()), abs=1e-5)


def test_what_a_text_goes_through_beside_is_refused(tiny: Path, tmp_path: Path) -> None:
    folder = with_steps(tiny, tmp_path, "Dense", "Normalize")
    with pytest.raises(ValueError, match="has texts go through Dense, too, which is not served"):
        recipe_of(folder)
    (folder / "modules.json").write_text("[7]")
    with pytest.raises(ValueError, match="must be a list of objects with type and path"):
        recipe_of(folder)


def test_a_checkpoint_that_means_another_vector_is_refused(tiny: Path, tmp_path: Path) -> None:
    for number, mode in enumerate(("pooling_mode_max_tokens", "max")):
        folder = pooled(tiny, tmp_path / str(number), mode)
        with LLM(str(folder), **BASE) as llm, pytest.raises(ValueError, match="asks for max; only"):
            llm.embed(["a"])
