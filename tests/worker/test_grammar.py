"""A grammar's masks come late, and hold: launched eagerly or replayed in halves, on one rank or several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pellucid import LLM
from pellucid.engine.core import Engine
from pellucid.features.base import AskingRow, HostFeature, RowKind
from pellucid.features.grammar.host import Masks
from pellucid.features.grammar.worker import TokenMasks
from pellucid.features.host import HostFeatures
from pellucid.types import Request
from tests.graphs.test_graphs import OPTIONS, graphed, worker_of
from tests.llm.test_invariance import random_requests

Texts = dict[str, list[int]]


class EveryThird(HostFeature):
    """Of the token at place n, n and the token's number leave the same remainder by three."""

    rows, is_watched, is_host_bound = RowKind.SAMPLING, True, True

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.num_asked = vocab_size, 0

    def asks(self, request: Request) -> bool:
        return request.grammar is not None

    def late(self, rows: Sequence[AskingRow]) -> Masks:
        self.num_asked += 1
        return Masks({row.index: self.mask(len(row.token_ids), row.num_draft).data for row in rows})

    def mask(self, length: int, num_drafts: int) -> np.ndarray:
        may_come = np.zeros((1 + num_drafts, -(-self.vocab_size // 32) * 32), dtype=np.uint8)
        for node in range(1 + num_drafts):
            may_come[node, (length + node) % 3 :: 3] = 1
        return np.packbits(may_come, axis=1, bitorder="little").view(np.int32)


def replace_feature(engine: Engine, name: str, feature: HostFeature) -> None:
    """All others stay, and its bit is the same."""
    features = {**engine.scheduler.features._features, name: feature}
    engine._features = engine.scheduler.features = HostFeatures(features)


def run(llm: LLM, *, every: int) -> Texts:
    """30 requests with all kinds of sampling, of which each `every`th has the grammar."""
    engine = llm.llm_engine.engine
    assert isinstance(engine, Engine)
    grammar = EveryThird(llm.llm_engine.vocab_size)
    replace_feature(engine, "grammar", grammar)
    prompts, params = random_requests(30, seed=7)
    texts: Texts = {}
    for index, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
        texts[str(index)] = []
        bound = "every third" if index % every == 0 else None
        engine.add(
            Request(id=str(index), prompt_token_ids=prompt, sampling=sampling, seed=index, grammar=bound)
        )
    while engine.has_work:
        for update in engine.step():
            assert update.error is None, update.error
            texts[update.request_id] += update.new_token_ids
    for index, prompt in enumerate(prompts[::every]):
        for place, token in enumerate(texts[str(index * every)], start=len(prompt)):
            assert token % 3 == place % 3, (index, place, token)
    assert grammar.num_asked > 10
    return texts


@pytest.fixture(scope="module")
def expected(tiny: Path) -> dict[int, Texts]:
    """Launched kernel by kernel; by how many requests have a grammar."""
    with LLM(str(tiny), **OPTIONS) as llm:
        return {every: run(llm, every=every) for every in (1, 3)}


def test_what_has_no_grammar_does_not_see_its_neighbours(expected: dict[int, Texts]) -> None:
    bound, mixed = expected[1], expected[3]
    assert all(mixed[str(index)] == bound[str(index)] for index in range(0, 30, 3))
    assert any(mixed[str(index)] != bound[str(index)] for index in range(1, 30, 3))


@pytest.mark.parametrize("every", [1, 3])
def test_replayed_halves_give_the_same_tokens(tiny: Path, expected: dict[int, Texts], every: int) -> None:
    with LLM(str(tiny), **OPTIONS) as llm:
        graphed(worker_of(llm))
        assert run(llm, every=every) == expected[every]


@pytest.mark.parametrize(
    "options",
    [
        {"executor": "multiproc", "depth": 2},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"depth": 3, "num_gpu_blocks_override": 24},
    ],
    ids=str,
)
def test_wherever_the_workers_are(tiny: Path, expected: dict[int, Texts], options: dict) -> None:
    with LLM(str(tiny), **(OPTIONS | options)) as llm:
        assert run(llm, every=3) == expected[3]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}], ids=str)
def test_on_a_gpu(tiny: Path, expected: dict[int, Texts], options: dict) -> None:
    """Sums are ordered otherwise, so near ties may fall the other way."""
    with LLM(str(tiny), **(OPTIONS | {"device": "cuda", "num_gpu_blocks_override": 4096} | options)) as llm:
        texts = run(llm, every=3)
    assert sum(texts[name] != expected[3][name] for name in texts) <= 1


def test_masks_lie_where_their_rows_sample(tiny: Path) -> None:
    with LLM(str(tiny), **OPTIONS) as llm:
        features = worker_of(llm).runner.features._features
    masks = features["grammar"]
    assert isinstance(masks, TokenMasks)
    words = masks._num_words
    mask = np.arange(2 * words, dtype=np.int32).reshape(2, words)
    counts: Any = SimpleNamespace(num_sampled=np.array([1, 0, 2, 1]))
    masks.fill(counts, Masks({2: mask.data}))
    anything = [-1] * words
    assert masks._bits.tolist() == [anything, *mask.tolist(), anything]
    masks.make_room(6)
    masks.fill(counts, Masks({2: mask.data}))
    assert masks._bits.tolist() == [anything, *mask.tolist(), anything, anything, anything]
    masks.clear(counts)
    assert masks._bits.tolist() == [anything] * 6, "what is recorded reads them, asked for or not"
