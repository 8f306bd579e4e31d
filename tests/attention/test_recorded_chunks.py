"""Steps with prompt chunks, padded to a recording's shape, give the tokens of steps as they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from pellucid import LLM, SamplingParams
from pellucid.attention.base import AttentionLayer
from pellucid.attention.triton import TritonAttention
from pellucid.attention.triton_latent import TritonLatent
from pellucid.forward import ForwardInput
from pellucid.graphs import shapes
from pellucid.graphs.launch import GraphLauncher
from pellucid.graphs.recordings import has_room
from pellucid.graphs.shapes import StepShape, chunk_shapes
from pellucid.graphs.static_rows import RecordedTiles, StaticRows
from pellucid.kernels.attention import prefill_attention
from pellucid.kernels.attention.prefill_attention import prefill_tiles
from pellucid.kernels.attention.prefill_plan import PromptTiles
from pellucid.layers.attention import Attention
from pellucid.models.decoder import Decoder
from pellucid.worker.inputs import StepCounts
from tests.graphs.test_graphs import Seen, graphed, recorded_shapes, worker_of
from tests.tiny import write_latent_checkpoint
from tests.worker.test_wanted import forward_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/llm/test_gpu has this for GPUs")
OPTIONS = {
    "dtype": "float32", "device": "cpu", "block_size": 16, "max_num_seqs": 5, "max_model_len": 96,
    "max_num_batched_tokens": 24, "attention_backend": "triton", "check_invariants": True,
    "cpu_kv_cache_gib": 0.01,
}  # fmt: skip
QUICK = {"attention_backend": "torch"}  # for what is expected: the interpreter takes far longer
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "adaptive": False, "prompt_lookup_min": 1}
PROMPTS = [[(7 * i + 3 * j) % 250 + 1 for j in range(length)] for i, length in enumerate((30, 1, 9, 11))]
PLAIN = [
    SamplingParams(temperature=0.0 if i % 2 else 0.8, seed=i, max_tokens=2 + i % 3, ignore_eos=True)
    for i in range(len(PROMPTS))
]
FILTERED = [replace(sampling, top_k=20 * (i % 3)) for i, sampling in enumerate(PLAIN)]
SCORED = [replace(sampling, prompt_logprobs=1 if i == 3 else None) for i, sampling in enumerate(FILTERED)]


def tokens(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


class SeenChunks(Seen):
    """Of steps with chunks: which recordings were found, and how often one was replayed whole."""

    def __init__(self, launcher: GraphLauncher) -> None:
        super().__init__(launcher)
        self.num_whole = 0
        among = launcher.eager.step.among

        def count(yielded: Any, places: np.ndarray) -> Any:
            self.num_whole += 1
            return among(yielded, places)

        launcher.eager.step.among = count

    @property
    def chunks(self) -> list[tuple[StepShape, StepCounts]]:
        return [(shape, counts) for shape, counts in self.found if counts.has_chunks]

    @property
    def num_over(self) -> int:
        """Steps with more decodes than a recording has room for."""
        return sum(counts.num_leading(1) > shape.num_short for shape, counts in self.chunks)


def recorded(llm: LLM, max_keys: int | None = None) -> SeenChunks:
    """Put recordings in place, of steps with chunks, too, that run the step again."""
    worker = worker_of(llm)
    all_shapes = recorded_shapes(worker, max_rows=5)
    all_shapes |= dict.fromkeys(chunk_shapes(32, 5, 1 + worker.resolved.num_spec, max_short=8), True)
    return SeenChunks(graphed(worker, shapes.bounded(all_shapes, max_keys)))


STANDARD = {"num_speculative_tokens": 2, "adaptive": False, "rejection_sample_method": "standard"}
SYNTHETIC = {
    "num_speculative_tokens": 2,
    "adaptive": False,
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_rates": [0.7, 0.4],
}


@pytest.mark.parametrize(
    "config",
    [None, NGRAM, STANDARD, pytest.param(SYNTHETIC, marks=pytest.mark.matrix)],
    ids=["none", "ngram", "standard", "synthetic"],
)
def test_padded_chunks_give_the_same_tokens(
    tiny: Path, tiny_draft: Path, monkeypatch: pytest.MonkeyPatch, config: dict | None
) -> None:
    by_model = config in (STANDARD, SYNTHETIC)  # with them other drafts are other tokens
    wishes = (PLAIN,) if by_model else (PLAIN, FILTERED, SCORED)
    drafts = (
        {"speculative_config": config | ({"model": str(tiny_draft)} if by_model else {})} if config else {}
    )
    monkeypatch.setattr(shapes, "bucket_sizes", lambda max_rows: [max_rows])
    monkeypatch.setattr(shapes, "ROOMS", {0: (16, 32), 2: (21, 37)})
    with LLM(str(tiny), **OPTIONS | QUICK, **(drafts if by_model else {})) as llm:
        expected = [tokens(llm, params) for params in wishes]
    with LLM(str(tiny), **OPTIONS, **drafts) as llm:
        seen = recorded(llm)
        assert [tokens(llm, params) for params in wishes] == expected
        spare = worker_of(llm).runner.slots.spare
        assert worker_of(llm).runner.slots.num_computed[spare] == 0, "padding has advanced"
    assert seen.num_whole >= 2
    assert by_model or config or seen.num_over > 0, "decodes for which there was no place but among chunks"
    assert by_model or len(seen.chunks) > 1.5 * seen.num_whole, (seen.chunks, seen.num_whole)


def test_so_they_do_over_latents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(write_latent_checkpoint(tmp_path, num_hidden_layers=1))
    monkeypatch.setattr(shapes, "bucket_sizes", lambda max_rows: [max_rows])
    monkeypatch.setattr(shapes, "ROOMS", {0: (32,), 2: (21, 37)})
    monkeypatch.setattr(TritonLatent, "max_graph_keys", 40)
    with LLM(folder, **OPTIONS | QUICK) as llm:
        expected = tokens(llm, PLAIN)
    with LLM(folder, **OPTIONS, speculative_config=NGRAM) as llm:
        seen = recorded(llm, max_keys=40)
        assert tokens(llm, PLAIN) == expected
        assert tokens(llm, PLAIN) == expected, "with prefixes"
    assert len(seen.chunks) >= 2
    for shape, counts in seen.chunks:
        assert counts.num_keys(min(counts.num_leading(3), shape.num_short)) <= 40
    assert seen.num_eager > 0, "steps with more keys than a recording has room for"


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
    monkeypatch.setattr(shapes, "bucket_sizes", lambda max_rows: [max_rows])
    monkeypatch.setattr(shapes, "ROOMS", {0: (16, 32), 8: (21, 37)})
    monkeypatch.setattr(prefill_attention, "PACKED_ROWS", 16)
    options = OPTIONS | {"enable_prefix_caching": False}
    with LLM(str(tiny), **options | QUICK) as llm:
        model = forward_of(llm).model
        assert isinstance(model, Decoder)
        attentions = [layer for layer in model.modules() if isinstance(layer, Attention)]
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
            assert replays is None or len(replays.chunks) > replays.num_whole > 0
            first, last = seen[::2], seen[1::2]
            assert len(first) == len(last) >= 4 and all(a > b for a, b in zip(first, last, strict=True))
            assert replays is not None or 0 in last, "a chunk of which nothing is sampled"


def test_a_budget_below_every_room_has_no_recordings(tiny: Path) -> None:
    with LLM(str(tiny), **OPTIONS) as llm:
        seen = recorded(llm)
        assert tokens(llm, PLAIN)
    assert not seen.chunks


def counts_of(rows: list[tuple[int, int]]) -> StepCounts:
    """Rows of so many tokens that sample at so many places."""
    num_query, num_sampled = np.array(rows).reshape(-1, 2).T
    return StepCounts(
        slots=np.arange(len(rows)),
        num_query=num_query,
        num_drafts=np.maximum(num_sampled - 1, 0),
        num_sampled=num_sampled,
        num_scores=np.zeros_like(num_query),
    )


@pytest.mark.parametrize("tile", [1, 4, 64])
@pytest.mark.parametrize("num_drafts", [0, 10])
def test_maps_of_what_is_sampled_have_room_for_it_all(tile: int, num_drafts: int) -> None:
    maps = RecordedTiles(StepShape(128, 0, 16, 1 + num_drafts), torch.device("cpu"))
    every, some = (maps.get(tile, prefill_tiles, all_wanted=all_wanted) for all_wanted in (True, False))
    assert len(some) <= len(every)
    queries, sampled = [30, 11, 20] + [5] * 13, [1, 1 + num_drafts, 0] + [min(5, 1 + num_drafts)] * 13
    maps.fill(queries, sampled)
    for found, wanted in ((every, queries), (some, sampled)):
        made = prefill_tiles(queries, tile, wanted).tolist()
        assert found.tolist() == made + [[16, 0]] * (len(found) - len(made))
    maps.fill([128], [0])
    assert some.tolist() == [[16, 0]] * len(some) and every.tolist()[-1] == [16, 0]


# Shape, and rows: queries, and logits that are sampled.
STEPS = {
    "all of it": (StepShape(80, 16, 8, 1, 24), [(1, 1)] * 16 + [(8, 1)] * 8),
    "one chunk": (StepShape(80, 16, 8, 1, 24), [(64, 0)]),
    "decodes, and some that end": (StepShape(80, 16, 8, 1, 24), [(1, 1)] * 5 + [(30, 1), (7, 0), (1, 1)]),
    "nobody samples": (StepShape(80, 16, 8, 1, 24), [(9, 0), (3, 0)]),
    "no decodes": (StepShape(64, 0, 8, 1, 8), [(64, 1)]),
    "verifications": (StepShape(64, 2, 7, 3, 16), [(3, 3), (2, 2), (3, 3), (40, 1), (5, 0)]),
    "verifications alone": (StepShape(20, 4, 0, 5, 20), [(3, 3), (1, 1), (5, 5)]),
    "long ones": (StepShape(40, 0, 4, 10, 40), [(10, 10), (3, 3)]),
    "decodes alone": (StepShape(4, 4, 0, 1, 4), [(1, 1)] * 3),
}


@pytest.mark.parametrize(("shape", "rows"), STEPS.values(), ids=STEPS.keys())
def test_rows_lie_before_padding_as_they_would_alone(shape: StepShape, rows: list[tuple[int, int]]) -> None:
    spare = 99
    static = StaticRows(shape, spare, torch.device("cpu"))
    static.load(counts_of([(1, 1)]))  # what a step before has left
    counts = counts_of(rows)
    assert has_room(shape, counts)
    places = static.places(counts)
    static.load(counts)
    view, at = static.view(), torch.from_numpy(places)
    assert view.num_tokens == shape.num_tokens and len(view.logits_index) == shape.num_logits
    assert view.slots[at].tolist() == list(range(counts.num_rows))
    for column in ("num_query", "num_drafts", "num_sampled"):
        assert getattr(view, column)[at].tolist() == getattr(counts, column).tolist()
    assert view.cu_query.diff()[at].tolist() == counts.num_query.tolist()
    assert view.cu_logits.diff()[at].tolist() == counts.num_sampled.tolist()
    last = [
        range(end - n, end) for end, n in zip(view.cu_query[1:][at].tolist(), counts.num_sampled, strict=True)
    ]
    wanted = [token for tokens in last for token in tokens]
    assert view.logits_index[: len(wanted)].tolist() == wanted
    padding = torch.ones(shape.num_rows, dtype=torch.bool).index_fill_(0, at, False)
    assert set(view.slots[padding].tolist()) <= {spare}
    assert shape.is_plain or not view.num_query[padding].any(), "padding advances"
    assert view.logits_index.min() >= 0 and view.logits_index.max() < shape.num_tokens
    bounds = view.counts
    assert bounds.num_rows == shape.num_rows and bounds.has_chunks == (not shape.samples_all)
    assert (counts.num_query <= bounds.num_query[places]).all()
    assert (counts.num_sampled <= bounds.num_sampled[places]).all()
    if shape.samples_all:
        known = static.view(counts).counts
        assert known.num_logits == counts.num_logits and known.num_rows == shape.num_rows


def test_decodes_are_few_beside_chunks() -> None:
    found = chunk_shapes(300, 70, 1, max_short=8)
    assert found[-1][:2] == (256, 64) and found[0][:2] == (64, 0)
    assert all(0 < shape.num_tokens - shape.num_short <= 300 for shape in found)
    assert {shape.num_short for shape in chunk_shapes(4096, 16, 1, max_short=8)} == {0, 16}
    assert {shape.num_short for shape in chunk_shapes(4096, 256, 1, max_short=8)} == {0, 32, 64, 256}
    assert {shape.num_short for shape in chunk_shapes(4096, 300, 1, max_short=8)} == {0, 32, 64, 256}
    assert {shape.num_short for shape in chunk_shapes(4096, 300, 4, max_short=8)} == {32}
    assert {shape.num_short for shape in chunk_shapes(4096, 300, 12, max_short=8)} == {0}
    found = [shape for queries in (1, 4, 12) for shape in chunk_shapes(4096, 300, queries, max_short=8)]
    assert not any(shape.samples_all for shape in found)
