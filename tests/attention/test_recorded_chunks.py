"""Steps with prompt chunks, padded to a recording's shape, give the tokens of steps as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from pellucid import LLM, SamplingParams
from pellucid.worker import chunks
from pellucid.worker.chunks import Bounds, ChunkForward, ChunkShape, Outputs, chunk_shapes
from pellucid.worker.inputs import StepCounts
from tests.worker.test_graphs import worker_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/llm/test_gpu has this for GPUs")
OPTIONS = {
    "dtype": "float32", "device": "cpu", "block_size": 16, "max_num_seqs": 5, "max_model_len": 96,
    "max_num_batched_tokens": 24, "attention_backend": "triton", "check_invariants": True,
    "cpu_kv_cache_gib": 0.01,
}  # fmt: skip
NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}}
PROMPTS = [[(7 * i + 3 * j) % 250 + 1 for j in range(length)] for i, length in enumerate((30, 1, 9, 11))]
PARAMS = [
    SamplingParams(
        temperature=0.0 if i % 2 else 0.8, seed=i, max_tokens=2 + i % 3, top_k=20 * (i % 3), ignore_eos=True
    )
    for i in range(len(PROMPTS))
]


def run_again(run: Callable[[], Outputs]) -> Callable[[], Outputs]:
    """As a CUDA graph is recorded: after one run, and replayed by running."""
    run()
    return run


def tokens(llm: LLM) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.mark.parametrize("drafts", [{}, NGRAM], ids=["no drafts", "drafts"])
def test_padded_chunks_give_the_same_tokens(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, drafts: dict
) -> None:
    with LLM(str(tiny), **OPTIONS) as llm:
        expected = tokens(llm)
    monkeypatch.setattr(chunks, "CHUNKED", (24, 32))
    monkeypatch.setattr(chunks, "DECODES", (0, 2, 8))
    with LLM(str(tiny), **OPTIONS, **drafts) as llm:
        step = worker_of(llm).runner.launcher.step
        recorded = step.forward = ChunkForward(step.forward, weight_bytes=1, max_tokens=32, max_rows=5)
        with torch.inference_mode():
            recorded.capture(run_again)
        found: list[ChunkShape] = []
        find = recorded.find

        def counting(counts: StepCounts) -> object:
            if (result := find(counts)) is not None:
                found.append(result[0].static.shape)
            return result

        recorded.find = counting  # type: ignore[method-assign]
        assert tokens(llm) == expected
    assert len(found) >= 2, found


def counts_of(*num_query: int, num_drafts: int = 0) -> StepCounts:
    queries = np.array(num_query)
    drafts = np.full_like(queries, num_drafts)
    none = np.zeros_like(queries)
    return StepCounts(slots=none, num_query=queries, num_drafts=drafts, num_sampled=none, num_scores=none)


def test_the_largest_comes_first_and_decodes_are_few() -> None:
    shapes = chunk_shapes(300, 70)
    assert shapes[0] == (256 + 70, 70) and shapes[-1] == (64, 0)
    assert all(shape.num_decodes <= shape.num_chunked for shape in shapes)
    assert {shape.num_decodes for shape in chunk_shapes(4096, 16)} == {0, 16}
    assert {shape.num_decodes for shape in chunk_shapes(4096, 256)} == {0, 64, 256}
    assert {shape.num_decodes for shape in chunk_shapes(4096, 300)} == {0, 64, 256}


def test_bounds_hold_for_any_chunks() -> None:
    bounds = Bounds.of(ChunkShape(64, 16), spare=3)
    assert bounds.num_tokens == 64 and bounds.num_query.max() == 48 and bounds.num_rows == 16 + 6 + 1
