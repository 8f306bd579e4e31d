"""Vectors, scores and ranks over HTTP, as OpenAI's client and rerankers' see them."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from pellucid import LLM, SamplingParams
from pellucid.server.options import ServeOptions
from pellucid.server.renderer import ModelFacts, Renderer
from pellucid.text.tokenizer import Tokenizer
from tests.patience import PATIENCE
from tests.server.conftest import Running

TEXTS = ["the quick brown fox", "a dog", "1 + 1 = 2"]


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    with LLM("sprout", device="cpu", cpu_kv_cache_gib=0.05, max_num_seqs=16, num_threads=1) as llm:
        return np.array([output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)])


def post(server: Running, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=PATIENCE)


def test_vectors_are_those_of_the_library(
    server: Running, client: openai.OpenAI, vectors: np.ndarray
) -> None:
    answer = client.embeddings.create(model="sprout", input=TEXTS, encoding_format="float")
    np.testing.assert_allclose([each.embedding for each in answer.data], vectors, atol=2e-2)
    assert [each.index for each in answer.data] == [0, 1, 2] and answer.usage.total_tokens > 3
    (one,) = client.embeddings.create(model="sprout", input=TEXTS[0]).data  # in base64, unasked
    np.testing.assert_allclose(one.embedding, vectors[0], atol=2e-2)
    tokens = post(server, "/tokenize", prompt=TEXTS[1]).json()["tokens"]
    (short,) = client.embeddings.create(model="sprout", input=tokens, dimensions=8).data
    assert np.array(short.embedding) == pytest.approx(
        vectors[1, :8] / np.linalg.norm(vectors[1, :8]), abs=2e-2
    )
    raw = post(server, "/v1/embeddings", input=TEXTS[2], encoding_format="base64").json()["data"][0]
    assert np.frombuffer(base64.b64decode(raw["embedding"]), "<f4") == pytest.approx(vectors[2], abs=2e-2)


def test_texts_are_cut_at_their_ends(server: Running) -> None:
    """And keep what a tokenizer puts behind them, whose state may be the vector."""
    tokens = post(server, "/tokenize", prompt=TEXTS[0]).json()["tokens"]
    cut, begins = (
        post(server, "/v1/embeddings", input=given, encoding_format="float", truncate_prompt_tokens=most)
        for given, most in ((TEXTS[0], 3), (tokens[:3], -1))
    )
    assert cut.json()["usage"]["prompt_tokens"] == 3 < len(tokens)
    assert cut.json()["data"][0]["embedding"] == pytest.approx(
        begins.json()["data"][0]["embedding"], abs=2e-2
    )


@pytest.mark.parametrize(
    ("most", "ids"),
    [(7, [1, 3, 4, 5, 6, 7, 2]), (6, [1, 3, 4, 5, 6, 2]), (3, [1, 3, 2]), (2, [1, 2]), (1, [1])],
)
def test_what_is_put_around_a_text_stays(most: int, ids: list[int], tmp_path: Path) -> None:
    words = {"<s>": 1, "</s>": 2} | {letter: 3 + i for i, letter in enumerate("abcde")}
    library = tokenizers.Tokenizer(WordLevel(words, unk_token="a"))
    library.pre_tokenizer = Whitespace()
    library.post_processor = TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    library.save(str(tmp_path / "tokenizer.json"))
    facts = ModelFacts(
        names=("a",), options=ServeOptions(), tokenizer_path=None, vocab_size=8, max_model_len=9,
        defaults=SamplingParams(),
    )  # fmt: skip
    short = Renderer(facts, Tokenizer.load(tmp_path)).shortened
    assert short({"prompt": "a b c d e"}, most, add_special_tokens=True)["prompt_token_ids"] == ids
    assert short({"prompt": "a b c"}, 2, add_special_tokens=False)["prompt_token_ids"] == [3, 4]
    assert short({"prompt_token_ids": [5, 6, 7]}, 2, add_special_tokens=True)["prompt_token_ids"] == [5, 6]


def test_scores_and_ranks_are_by_cosines(server: Running, vectors: np.ndarray) -> None:
    cosines = vectors @ vectors[0]
    scores = post(server, "/v1/score", model="sprout", text_1=TEXTS[0], text_2=TEXTS).json()
    assert [each["score"] for each in scores["data"]] == pytest.approx(cosines, abs=2e-2)
    documents = [TEXTS[1], {"text": TEXTS[2]}, TEXTS[0]]
    for path in ("/rerank", "/v2/rerank"):
        assert post(server, path, query="a", documents=["a"]).status_code == 200
    ranks = post(server, "/v1/rerank", query=TEXTS[0], documents=documents, top_n=2).json()["results"]
    assert len(ranks) == 2 and ranks[0]["index"] == 2 and ranks[0]["document"] == {"text": TEXTS[0]}
    assert ranks[0]["relevance_score"] == pytest.approx(1, abs=1e-2)
    assert ranks[1]["relevance_score"] == pytest.approx(max(cosines[1:]), abs=2e-2)


def test_scores_may_be_how_likely_a_word_is_against_another(server: Running) -> None:
    words = ["0", "1"]
    with LLM("sprout", device="cpu", cpu_kv_cache_gib=0.05, max_num_seqs=16, num_threads=1) as llm:
        scores = llm.score(TEXTS[0], TEXTS, use_tqdm=False, classifier_from_token=words)
    expected = [each.outputs.score for each in scores]
    asked = {"classifier_from_token": words}
    got = post(server, "/v1/score", text_1=TEXTS[0], text_2=TEXTS, **asked).json()["data"]
    assert [each["score"] for each in got] == pytest.approx(expected, abs=2e-2)
    ranks = post(server, "/v1/rerank", query=TEXTS[0], documents=TEXTS, **asked).json()["results"]
    assert [each["relevance_score"] for each in ranks] == pytest.approx(sorted(expected)[::-1], abs=2e-2)


@pytest.mark.parametrize(
    "path,body,words",
    [
        ("/v1/embeddings", {"input": []}, "input is empty"),
        ("/v1/embeddings", {"input": "a", "dimensions": 100_000}, "dimensions is 100000"),
        ("/v1/embeddings", {"input": [-1]}, "-1"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1 has 2 texts for 3"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents is empty"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "classifier_from_token": ["0"]}, "must be two words"),
    ],
)
def test_what_cannot_be_answered_is_refused(server: Running, path: str, body: dict, words: str) -> None:
    answer = post(server, path, **body)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]
