"""Steps with prompt chunks, padded to a recording's shape, give the tokens of steps as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from pellucid import LLM, SamplingParams
from pellucid.attention.base import AttentionLayer
from pellucid.attention.triton import TritonAttention
from pellucid.forward import ForwardInput
from pellucid.kernels import prefill_attention
from pellucid.kernels.gather_rows import Asked, Gathered, Held, gather_rows_ref
from pellucid.kernels.prefill_attention import prefill_tiles
from pellucid.kernels.prefill_plan import PromptTiles
from pellucid.models.decoder import Decoder, DecoderLayer
from pellucid.worker import chunks, graphs
from pellucid.worker.chunks import (
    Bounds,
    ChunkForward,
    ChunkRecording,
    ChunkShape,
    StaticChunks,
    TileMaps,
    chunk_shapes,
)
from pellucid.worker.device_step import DeviceStep
from pellucid.worker.graphs import EagerLauncher, GraphLauncher, StaticRows
from pellucid.worker.inputs import StepCounts
from pellucid.worker.results import Packed
from tests.worker.test_graphs import worker_of
from tests.worker.test_wanted import forward_of

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
FILTERED = [replace(sampling, top_k=20 * (i % 3)) for i, sampling in enumerate(PLAIN)]
SCORED = [replace(sampling, prompt_logprobs=1 if i == 3 else None) for i, sampling in enumerate(FILTERED)]
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
        self.forward = forward
        self.found: list[ChunkShape] = []
        self.whole: list[ChunkShape] = []
        self.num_over = 0  # decodes beyond those that a recording has room for
        self.find, self.step = forward.find, forward.step
        forward.find, forward.step = self._find, self._step  # type: ignore[method-assign]

    def _find(self, counts: StepCounts) -> tuple[ChunkRecording, int] | None:
        if (result := self.find(counts)) is not None:
            self.found.append(result[0].static.shape)
            self.num_over += max(0, int((counts.num_query > 1).argmax()) - result[1])
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
    runner = worker.runner
    runner.launcher = GraphLauncher(eager, static, runner.state, runner.features, lambda: run_again, forward)
    worker.runner.launcher.capture()
    return Seen(forward)


STANDARD = {"num_speculative_tokens": 2, "rejection_sample_method": "standard"}
SYNTHETIC = {
    "num_speculative_tokens": 2,
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_rates": [0.7, 0.4],
}


def gather_like_a_kernel(asked: Asked, held: Held) -> Gathered:
    """Of logits that have no token there is nothing but what was in the memory before."""
    gathered = gather_rows_ref(asked, held)
    row = torch.repeat_interleave(asked.cu_logits.diff(), output_size=asked.num_logits)
    from_end = asked.cu_logits[1:][row] - torch.arange(asked.num_logits)
    has_no_token = from_end > asked.cu_query.diff()[row]
    for column in (gathered.logit_slots, gathered.logit_inputs, gathered.logit_places):
        column[has_no_token] = -1_000_000
    return gathered


@pytest.mark.parametrize(
    "config", [None, NGRAM, STANDARD, SYNTHETIC], ids=["none", "ngram", "standard", "synthetic"]
)
def test_padded_chunks_give_the_same_tokens(
    tiny: Path, tiny_draft: Path, monkeypatch: pytest.MonkeyPatch, config: dict | None
) -> None:
    by_model = config in (STANDARD, SYNTHETIC)  # with them other drafts are other tokens
    wishes = (PLAIN,) if by_model else (PLAIN, FILTERED, SCORED)
    drafts = (
        {"speculative_config": config | ({"model": str(tiny_draft)} if by_model else {})} if config else {}
    )
    monkeypatch.setattr(graphs, "bucket_sizes", lambda max_rows: [max_rows])
    monkeypatch.setattr(chunks, "ROOMS", {0: (16, 32), 2: (21, 37)})
    with LLM(str(tiny), **OPTIONS, **(drafts if by_model else {})) as llm:
        expected = [tokens(llm, params) for params in wishes]
    with LLM(str(tiny), **OPTIONS, **drafts) as llm:
        monkeypatch.setattr(worker_of(llm).runner.inputs, "_gather", gather_like_a_kernel)
        seen = recorded(llm)
        assert [tokens(llm, params) for params in wishes] == expected
        spare = worker_of(llm).runner.slots.spare
        assert worker_of(llm).runner.slots.num_computed[spare] == 0, "padding has advanced"
    assert len(seen.whole) >= 2, seen.whole
    assert by_model or config or seen.num_over > 0, "decodes for which there was no place but among chunks"
    assert by_model or len(seen.found) > 1.5 * len(seen.whole), (seen.found, seen.whole)


def said(llm: LLM) -> tuple[list[list[int]], list[float]]:
    """Tokens of what may be replayed whole, and logprobs of what may not."""
    asked = [replace(sampling, logprobs=2) for sampling in PLAIN]
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, asked, use_tqdm=False)]
    logprobs = [
        each.logprob for one in outputs for token in one.logprobs or () for each in dict(token).values()
    ]
    return tokens(llm, PLAIN), logprobs


def test_the_last_layer_attends_where_somebody_reads(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tiles of 8 queries, and chunks of up to 24."""
    monkeypatch.setattr(graphs, "bucket_sizes", lambda max_rows: [max_rows])
    monkeypatch.setattr(chunks, "ROOMS", {0: (16, 32), 8: (21, 37)})
    monkeypatch.setattr(prefill_attention, "PACKED_ROWS", 16)
    options = OPTIONS | {"enable_prefix_caching": False}
    with LLM(str(tiny), **options) as llm:
        model = forward_of(llm).model
        assert isinstance(model, Decoder)
        attentions = [layer.attention for layer in model.layers if isinstance(layer, DecoderLayer)]
        assert [attention.is_last for attention in attentions] == [False, True]
        attentions[-1].is_last = False
        expected = said(llm)
    with LLM(str(tiny), **options) as llm:
        backend = forward_of(llm).backend
        assert isinstance(backend, TritonAttention)
        attend, seen = backend.prefill_attention, list[int]()
        forward = backend.forward

        def note(*args: Any, tiles: PromptTiles, **how: Any) -> Tensor:
            seen.append(len(tiles.tiles))
            return attend(*args, tiles=tiles, **how)

        def forward_into_nothing(qkv: Tensor, layer: AttentionLayer, fwd: ForwardInput) -> Tensor:
            """Of the last layer, what nobody has written would spoil whatever it goes into."""
            with monkeypatch.context() as patch:
                if layer.is_last:
                    patch.setattr(torch, "empty_like", lambda x: torch.full_like(x, torch.nan))
                return forward(qkv, layer, fwd)

        monkeypatch.setattr(backend, "prefill_attention", note)
        monkeypatch.setattr(backend, "forward", forward_into_nothing)
        for is_recorded in (False, True):
            replays = recorded(llm) if is_recorded else None
            seen.clear()
            again = said(llm)
            assert again[0] == expected[0] and again[1] == pytest.approx(expected[1], abs=1e-5)
            assert replays is None or len(replays.found) > len(replays.whole) > 0
            first, last = seen[::2], seen[1::2]
            assert len(first) == len(last) >= 4 and all(a > b for a, b in zip(first, last, strict=True))
            assert replays is not None or 0 in last, "a chunk of which nothing is sampled"


def test_a_budget_below_every_room_has_no_recordings(tiny: Path) -> None:
    with LLM(str(tiny), **OPTIONS) as llm:
        seen = recorded(llm)
        assert seen.forward.shapes == [] and seen.forward.kept_bytes() == 0
        assert tokens(llm, PLAIN)
    assert not seen.found


def counts_of(num_decodes: int, chunks: list[tuple[int, int]], num_drafts: int = 0) -> StepCounts:
    """Decodes, and chunks of so many tokens that sample at so many places."""
    rows = [(1, 1)] * num_decodes + chunks
    num_query, num_sampled = np.array(rows).reshape(-1, 2).T
    return StepCounts(
        slots=np.arange(len(rows)),
        num_query=num_query,
        num_drafts=np.maximum(num_sampled - 1, 0),
        num_sampled=num_sampled,
        num_scores=np.zeros_like(num_query),
        num_propose=num_drafts,
    )


@pytest.mark.parametrize("tile", [1, 4, 64])
@pytest.mark.parametrize("num_drafts", [0, 10])
def test_maps_of_what_is_sampled_have_room_for_it_all(tile: int, num_drafts: int) -> None:
    maps = TileMaps(ChunkShape(128, 0, num_drafts), torch.device("cpu"))
    every, some = (maps.get(tile, prefill_tiles, all_wanted=all_wanted) for all_wanted in (True, False))
    assert len(some) <= len(every)
    queries, sampled = [30, 11, 20] + [5] * 13, [1, 1 + num_drafts, 0] + [min(5, 1 + num_drafts)] * 13
    maps.fill(queries, sampled)
    for found, wanted in ((every, queries), (some, sampled)):
        made = prefill_tiles(queries, tile, wanted).tolist()
        assert found.tolist() == made + [[16, 0]] * (len(found) - len(made))
    maps.fill([128], [0])
    assert some.tolist() == [[16, 0]] * len(some) and every.tolist()[-1] == [16, 0]


STEPS = {
    "all of it": (ChunkShape(64 + 16, 16), 16, [(8, 1)] * 8),
    "one chunk": (ChunkShape(64 + 16, 16), 0, [(64, 0)]),
    "decodes, and some that end": (ChunkShape(64 + 16, 16), 5, [(30, 1), (7, 0), (1, 1)]),
    "nobody samples": (ChunkShape(64 + 16, 16), 0, [(9, 0), (3, 0)]),
    "no decodes": (ChunkShape(64, 0), 0, [(64, 1)]),
    "verifications": (ChunkShape(64, 0, 2), 0, [(3, 3), (2, 2), (40, 1), (5, 0)]),
}


@pytest.mark.parametrize(("shape", "num_decodes", "rows"), STEPS.values(), ids=STEPS.keys())
def test_rows_lie_among_padding_as_they_would_alone(
    shape: ChunkShape, num_decodes: int, rows: list[tuple[int, int]]
) -> None:
    spare = 99
    static = StaticChunks(shape, spare, torch.device("cpu"))
    static.load(counts_of(0, [(3, 1)]), np.array([shape.num_decodes]))  # what a step before has left
    counts = counts_of(num_decodes, rows, shape.num_drafts)
    places = static.places(counts, num_decodes)
    static.load(counts, places)
    view, at = static.view(), torch.from_numpy(places)
    assert view.cu_query[-1] == shape.num_tokens and view.cu_logits[-1] == shape.num_logits
    assert len(view.logits_index) == len(static.logit_slots) == shape.num_logits
    assert view.slots[at].tolist() == list(range(counts.num_rows))
    for column in ("num_query", "num_drafts", "num_sampled"):
        assert getattr(view, column)[at].tolist() == getattr(counts, column).tolist()
    assert static.samples[at].tolist() == (counts.num_sampled > 0).tolist()
    assert view.cu_query.diff()[at].tolist() == counts.num_query.tolist()
    assert view.cu_logits.diff()[at].tolist() == counts.num_sampled.tolist()
    last = [
        range(end - n, end) for end, n in zip(view.cu_query[1:][at].tolist(), counts.num_sampled, strict=True)
    ]
    wanted = [token for tokens in last for token in tokens]
    assert view.logits_index[: len(wanted)].tolist() == wanted
    assert static.logit_slots[: len(wanted)].tolist() == np.repeat(counts.slots, counts.num_sampled).tolist()
    padding = torch.ones(shape.num_rows, dtype=torch.bool).index_fill_(0, at, False)
    assert set(view.slots[padding].tolist()) | set(static.logit_slots[len(wanted) :].tolist()) <= {spare}
    assert not view.num_query[padding].any() and not static.samples[padding].any(), "padding advances"
    assert view.logits_index.min() >= 0 and view.logits_index.max() < shape.num_tokens


def test_the_largest_comes_first_and_decodes_are_few() -> None:
    shapes = chunk_shapes(300, 70)
    assert shapes[0] == (256, 64, 0) and shapes[-1] == (64, 0, 0)
    assert all(shape.num_chunked <= 300 for shape in shapes)
    assert all(shape.num_decodes <= shape.num_chunked for shape in chunk_shapes(4096, 256))
    assert {shape.num_decodes for shape in chunk_shapes(4096, 16)} == {0, 16}
    assert {shape.num_decodes for shape in chunk_shapes(4096, 256)} == {0, 32, 64, 256}
    assert {shape.num_decodes for shape in chunk_shapes(4096, 300)} == {0, 32, 64, 256}
    assert {shape.num_decodes for shape in chunk_shapes(4096, 300, num_drafts=3)} == {0}


def test_bounds_hold_for_any_chunks() -> None:
    bounds = Bounds.of(ChunkShape(64, 16), spare=3)
    assert bounds.num_tokens == 64 and bounds.num_query.max() == 48 and bounds.num_rows == 16 + 6 + 1
