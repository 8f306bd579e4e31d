"""Steps with prompt chunks, padded to a recording's shape, give the tokens of steps as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from pellucid import LLM, SamplingParams
from pellucid.worker import chunks, graphs
from pellucid.worker.chunks import Bounds, ChunkForward, ChunkRecording, ChunkShape, chunk_shapes
from pellucid.worker.device_step import DeviceStep
from pellucid.worker.graphs import EagerLauncher, GraphLauncher, StaticRows
from pellucid.worker.inputs import StepCounts
from pellucid.worker.results import Packed
from tests.worker.test_graphs import worker_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/llm/test_gpu has this for GPUs")
OPTIONS = {
    "dtype": "float32", "device": "cpu", "block_size": 16, "max_num_seqs": 5, "max_model_len": 96,
    "max_num_batched_tokens": 24, "attention_backend": "triton", "check_invariants": True,
    "cpu_kv_cache_gib": 0.01,
}  # fmt: skip
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}
PROMPTS = [[(7 * i + 3 * j) % 250 + 1 for j in range(length)] for i, length in enumerate((30, 1, 9, 11))]
PLAIN = [
    SamplingParams(temperature=0.0 if i % 2 else 0.8, seed=i, max_tokens=2 + i % 3, ignore_eos=True)
    for i in range(len(PROMPTS))
]
PARAMS = [
    replace(sampling, top_k=20 * (i % 3), prompt_logprobs=1 if i == 3 else None)
    for i, sampling in enumerate(PLAIN)
]
T = TypeVar("T")


def run_again(run: Callable[[], T]) -> Callable[[], T]:
    """As a CUDA graph is recorded: after one run, and replayed by running."""
    run()
    return run


def tokens(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


class Seen:
    """Which recordings were found, and which of them were replayed whole."""

    def __init__(self, forward: ChunkForward) -> None:
        self.found: list[ChunkShape] = []
        self.whole: list[ChunkShape] = []
        self.find, self.step = forward.find, forward.step
        forward.find, forward.step = self._find, self._step  # type: ignore[method-assign]

    def _find(self, counts: StepCounts) -> tuple[ChunkRecording, int] | None:
        if (result := self.find(counts)) is not None:
            self.found.append(result[0].static.shape)
        return result

    def _step(self, counts: StepCounts) -> Packed | None:
        if (packed := self.step(counts)) is not None:
            self.whole.append(self.found[-1])
        return packed


def recorded(llm: LLM) -> Seen:
    """Put recordings of steps with chunks in place, and one of decodes, that run the step again."""
    worker = worker_of(llm)
    eager, num_drafts = worker.runner.launcher, worker.resolved.num_spec
    assert isinstance(eager, EagerLauncher) and isinstance(eager.step, DeviceStep)
    forward = eager.step.forward = ChunkForward(
        eager.step.forward, weight_bytes=1, max_tokens=32, max_rows=5, num_drafts=num_drafts
    )
    static = StaticRows(5, 1 + num_drafts, eager.inputs.slots.spare, torch.device("cpu"))
    worker.runner.launcher = GraphLauncher(eager, static, worker.runner.state, lambda: run_again, forward)
    worker.runner.launcher.capture()
    return Seen(forward)


@pytest.mark.parametrize("drafter", ["none", "ngram", "model", "model, standard"])
def test_padded_chunks_give_the_same_tokens(
    tiny: Path, tiny_draft: Path, monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    model = {"method": "draft_model", "model": str(tiny_draft), "num_speculative_tokens": 2}
    standard = model | {"rejection_sample_method": "standard"}
    config = {"none": None, "ngram": NGRAM, "model": model, "model, standard": standard}[drafter]
    drafts = {"speculative_config": config} if config else {}
    plainly = drafts if config is standard else {}  # other drafts are other tokens there
    monkeypatch.setattr(graphs, "bucket_sizes", lambda max_rows: [max_rows])
    monkeypatch.setattr(chunks, "ROOMS", dict.fromkeys((0, 2, 8), (16, 24, 32)))
    with LLM(str(tiny), **OPTIONS, **plainly) as llm:
        expected = tokens(llm, PLAIN), tokens(llm, PARAMS)
    with LLM(str(tiny), **OPTIONS, **drafts) as llm:
        seen = recorded(llm)
        assert (tokens(llm, PLAIN), tokens(llm, PARAMS)) == expected
        spare = worker_of(llm).runner.slots.spare
        assert worker_of(llm).runner.slots.num_computed[spare] == 0, "padding has advanced"
    assert len(seen.whole) >= 2 and len(seen.found) > 1.5 * len(seen.whole), (seen.found, seen.whole)


def counts_of(*num_query: int, num_drafts: int = 0) -> StepCounts:
    queries = np.array(num_query)
    drafts = np.full_like(queries, num_drafts)
    none = np.zeros_like(queries)
    return StepCounts(slots=none, num_query=queries, num_drafts=drafts, num_sampled=none, num_scores=none)


def test_the_largest_comes_first_and_decodes_are_few() -> None:
    shapes = chunk_shapes(300, 70)
    assert shapes[0] == (256 + 70, 70, 0) and shapes[-1] == (64, 0, 0)
    assert all(shape.num_decodes <= shape.num_chunked for shape in chunk_shapes(4096, 256))
    assert {shape.num_decodes for shape in chunk_shapes(4096, 16)} == {0, 16}
    assert {shape.num_decodes for shape in chunk_shapes(4096, 256)} == {0, 64, 256}
    assert {shape.num_decodes for shape in chunk_shapes(4096, 300)} == {0, 64, 256}
    assert {shape.num_decodes for shape in chunk_shapes(4096, 300, num_drafts=3)} == {0}


def test_bounds_hold_for_any_chunks() -> None:
    bounds = Bounds.of(ChunkShape(64, 16), spare=3)
    assert bounds.num_tokens == 64 and bounds.num_query.max() == 48 and bounds.num_rows == 16 + 6 + 1
