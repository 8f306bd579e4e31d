"""The Triton backend: which rows take which kernel, and agreement with naive attention and TorchAttention."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from pellucid import LLM, SamplingParams
from pellucid.attention.base import AttentionBackend, AttentionSpec, QKNorm, choose_backend
from pellucid.attention.torch import TorchAttention
from pellucid.attention.triton import TritonAttention
from pellucid.kernels.attention.prefill_plan import PromptTiles
from pellucid.platform import Platform
from tests.attention.paged import Rows, make_rows
from tests.diagonal import diagonal
from tests.spec.toy import tree_config
from tests.tiny import write_latent_checkpoint

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CPU = Platform(device="cpu", name="CPU", memory_total=1, memory_free=1, num_cores=1)
GPU = Platform(device="cuda", name="GPU", memory_total=1, memory_free=1, num_cores=1, capability=(9, 0))
DECODES = [(1, 40), (1, 300), (3, 33)]
CHUNKS = [(9, 50), (40, 40), (4, 20)]


def attend(backend: AttentionBackend, rows: Rows) -> Tensor:
    rows.fwd.attn = (backend.metadata(rows.fwd, 0),)
    return backend.forward(rows.qkv, rows, rows.fwd)


@pytest.mark.parametrize("lens", [DECODES, CHUNKS, DECODES + CHUNKS])
@pytest.mark.parametrize("window", [None, 25])
def test_decodes_prompt_chunks_and_both_match_naive_attention(
    lens: list[tuple[int, int]], window: int | None
) -> None:
    rows = make_rows(lens, block_size=64, window=window, device=DEVICE)
    out = attend(TritonAttention(), rows).double().cpu()
    torch.testing.assert_close(out, rows.expected(), atol=3e-6, rtol=0)


@pytest.mark.parametrize("window", [None, 25])
def test_draft_trees_match_naive_attention(window: int | None) -> None:
    lens = [(1, 40), (6, 300), (3, 33), (12, 50), (40, 40)]
    rows = make_rows(lens, block_size=64, window=window, device=DEVICE)
    rows.plant((0, 0, 1, 1, 2, 3, 0, 7, 8, 8, 10), [0, 5, 2, 11, 0])
    out = attend(TritonAttention(), rows).double().cpu()
    torch.testing.assert_close(out, rows.expected(), atol=3e-6, rtol=0)


@pytest.mark.parametrize("window", [None, 25])
def test_queries_of_a_block_see_each_other(window: int | None) -> None:
    lens = [(4, 40), (8, 33), (16, 300)]
    rows = make_rows(lens, block_size=64, window=window, device=DEVICE).open()
    out = attend(TritonAttention(), rows).double().cpu()
    torch.testing.assert_close(out, rows.expected(), atol=3e-6, rtol=0)


def test_what_is_kept_alone_is_what_attending_keeps() -> None:
    ours, theirs = (make_rows(DECODES + CHUNKS, block_size=64, stale=0.0, device=DEVICE) for _ in range(2))
    for rows in (ours, theirs):
        weight = torch.linspace(0.5, 1.5, 6 * 16, device=DEVICE).view(6, 16)
        rows.qk_norm = QKNorm(weight, 1e-6)
    ours.fwd.attn = (TritonAttention().metadata(ours.fwd, 0),)
    TritonAttention().write(ours.qkv[:, 4 * 16 :], ours, ours.fwd)
    attend(TritonAttention(), theirs)
    assert torch.equal(ours.kv_cache, theirs.kv_cache)


@pytest.mark.skipif(DEVICE == "cuda", reason="test_tree.py has it on a GPU")
@pytest.mark.parametrize("over", ["heads", "latents"])
def test_draft_trees_through_the_engine_change_no_token(tiny: Path, tmp_path: Path, over: str) -> None:
    """One path of three is accepted now and then, and its keys and values move."""
    prompts, greedy = [[5, 6, 7], [9, 8]], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    options = {"device": "cpu", "dtype": "float32", "block_size": 16, "num_gpu_blocks_override": 32}
    folder = str(tiny if over == "heads" else write_latent_checkpoint(tmp_path, num_hidden_layers=1))
    with LLM(folder, **options) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, greedy, use_tqdm=False)]
    texts = [prompt + tokens for prompt, tokens in zip(prompts, expected, strict=True)]
    drafts = {"speculative_config": tree_config((0, 0, 2, 1), texts), "attention_backend": "triton"}
    with LLM(folder, **options, **drafts) as llm:
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
        assert llm.llm_engine.stats.num_accepted_tokens > 5
    assert [output.outputs[0].token_ids for output in outputs] == expected


class Attended:
    """The backend, which notes how many tiles of prompts it attends with; nobody has written its results."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.backend, self.num_tiles = TritonAttention(), list[int]()
        self.attend = self.backend.prefill_attention
        monkeypatch.setattr(self.backend, "prefill_attention", self._attend)
        monkeypatch.setattr(torch, "empty_like", lambda x: torch.full_like(x, torch.nan))

    def _attend(self, *args: Any, tiles: PromptTiles, **how: Any) -> Tensor:
        self.num_tiles.append(len(tiles.tiles))
        return self.attend(*args, tiles=tiles, **how)


WANTED = {  # rows, wanted queries of each, and tiles of 64 queries
    "a chunk alone": ([(150, 200)], [1], 1),
    "nothing is sampled": ([(150, 200)], [0], 0),
    "with decodes": ([(1, 40), (3, 33), (150, 200), (70, 70), (9, 50)], [1, 3, 0, 1, 1], 2),
    "long verifications": ([(11, 50), (70, 90), (80, 80)], [11, 70, 66], 5),
}


@diagonal({"lens,wanted,num_tiles": list(WANTED.values()), "window": [None, 25]})
def test_the_last_layer_attends_where_somebody_reads(
    lens: list[tuple[int, int]], wanted: list[int], num_tiles: int, window: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    attended = Attended(monkeypatch)
    rows = make_rows(lens, block_size=64, window=window, device=DEVICE)
    rows.fwd.num_sampled = wanted
    rows.fwd.all_wanted, rows.is_last = False, True
    out = attend(attended.backend, rows).cpu()
    ends = torch.tensor([q for q, _ in lens]).cumsum(0).tolist()
    read = [at for end, num in zip(ends, wanted, strict=True) for at in range(end - num, end)]
    torch.testing.assert_close(out[read].double(), rows.expected()[read], atol=3e-6, rtol=0)
    assert not out[0].isnan().any(), "of recordings' padding it is read whoever it is"
    assert attended.num_tiles == [num_tiles]
    rows.is_last = False
    everything = attend(attended.backend, rows).double().cpu()
    torch.testing.assert_close(everything, rows.expected(), atol=3e-6, rtol=0)
    assert attended.num_tiles == [num_tiles, sum(-(-q // 64) for q, _ in lens if q > 8)]


def test_the_last_layer_attends_with_all_queries_if_all_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    attended = Attended(monkeypatch)
    rows = make_rows(DECODES + CHUNKS, block_size=64, device=DEVICE)
    rows.is_last = True
    out = attend(attended.backend, rows).double().cpu()
    torch.testing.assert_close(out, rows.expected(), atol=3e-6, rtol=0)


def test_it_agrees_with_the_torch_backend_and_leaves_the_same_cache() -> None:
    ours, theirs = (make_rows(DECODES + CHUNKS, block_size=64, stale=0.0, device=DEVICE) for _ in range(2))
    torch.testing.assert_close(
        attend(TritonAttention(), ours), attend(TorchAttention(), theirs), atol=3e-6, rtol=0
    )
    assert torch.equal(ours.kv_cache, theirs.kv_cache)


def test_padding_rows_of_a_graph_leave_the_others_alone() -> None:
    rows = make_rows(DECODES, num_padding=2, device=DEVICE)
    out = attend(TritonAttention(), rows).double().cpu()
    torch.testing.assert_close(out, rows.expected(), atol=3e-6, rtol=0)


def test_the_leading_short_rows_take_the_decode_kernel() -> None:
    step = TritonAttention().metadata(make_rows(DECODES + CHUNKS, device=DEVICE).fwd, 0)
    assert (step.short.num_rows, step.short.max_query) == (3, 8)
    assert step.long_query_lens == [9, 40, 4]


def test_a_step_of_decodes_holds_views_of_the_persistent_buffers() -> None:
    fwd = make_rows([(1, 40), (1, 7)], device=DEVICE).fwd
    step = TritonAttention().metadata(fwd, 0)
    assert step.short.seq_lens.data_ptr() == fwd.seq_lens.data_ptr()
    assert step.short.block_table.data_ptr() == fwd.block_tables[0].data_ptr()
    assert step.short.cu_seqlens_q.data_ptr() == fwd.cu_seqlens_q.data_ptr()
    assert step.slot_mapping.data_ptr() == fwd.slot_mappings[0].data_ptr()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter does not round to FP8 as GPUs do")
def test_an_fp8_cache_is_attention_over_rounded_keys_and_values() -> None:
    rows = make_rows(DECODES + CHUNKS, block_size=64, stale=0.0, device=DEVICE)
    exact = rows.expected()
    rows.k_scale, rows.v_scale = 0.02, 0.01
    rounded = rows.kv_cache / torch.tensor([0.02, 0.01], device=rows.kv_cache.device).view(1, 2, 1, 1, 1)
    rows.kv_cache = rounded.to(torch.float8_e4m3fn)
    out = attend(TritonAttention(), rows).double().cpu()
    rows.history = [round_to_fp8(kv, rows) for kv in rows.history]
    torch.testing.assert_close(out, rows.expected(), atol=1e-5, rtol=0)
    assert 0.005 < (out - exact).abs().max() < 0.3


def round_to_fp8(kv: Tensor, rows: Rows) -> Tensor:
    """Keys and values [S, 2, K, H] as an FP8 cache gives them back."""
    scales = torch.tensor([rows.k_scale, rows.v_scale]).view(1, 2, 1, 1)
    return (kv / scales).to(torch.float8_e4m3fn).float() * scales


def spec(**changes: object) -> AttentionSpec:
    asked = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": torch.bfloat16, "block_size": 64}
    return AttentionSpec(**(asked | changes))  # type: ignore[arg-type]


def test_a_gpu_gets_this_backend() -> None:
    assert isinstance(choose_backend(None, [spec()], GPU), TritonAttention)


@pytest.mark.parametrize(
    "asked",
    [
        {"tree_depth": 9, "window": 8},
        {"dtype": torch.int8},
        {"num_kv_heads": 3},
        {"block_size": 24},
        {"head_dim": 512},
    ],
)
def test_what_it_cannot_do_it_refuses_with_a_reason(asked: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="backend triton cannot serve this model here: "):
        choose_backend("triton", [spec(**asked)], GPU)


def test_an_fp8_cache_needs_a_gpu_that_knows_fp8() -> None:
    asked = spec(kv_dtype=torch.float8_e4m3fn)
    ampere = replace(GPU, capability=(8, 0))
    assert TritonAttention.supports(asked, GPU) is None
    assert "8.9 or newer" in str(TritonAttention.supports(asked, ampere))
    with pytest.raises(ValueError, match="8.9 or newer; use attention_backend='torch', which is slower"):
        choose_backend(None, [asked], ampere)
    assert isinstance(choose_backend("torch", [asked], ampere), TorchAttention)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({}, "Triton's kernels, Hopper's for prompts"),
        ({"num_heads": 40, "num_kv_heads": 8, "head_dim": 128}, "Triton's kernels, Hopper's for prompts"),
        (
            {"kv_dtype": torch.float8_e4m3fn},
            "with a cache of float8_e4m3fn, prompts take the one for any",
        ),
        ({"window": 500}, "Triton's kernels, Hopper's for prompts"),
        ({"softcap": 50.0}, "with scores capped at 50, prompts take"),
        ({"head_dim": 80}, "with a head dim of 80"),
        ({"block_size": 16}, "with blocks of 16 tokens"),
        ({"dtype": torch.float32}, "with heads of float32"),
    ],
)
def test_the_log_says_who_attends_to_prompts_on_hopper(asked: dict[str, object], words: str) -> None:
    half = {"dtype": torch.bfloat16, "block_size": 64, "head_dim": 128}
    assert words in TritonAttention.describe(spec(**(half | asked)), GPU)
    assert (
        TritonAttention.describe(spec(**(half | asked)), replace(GPU, capability=(8, 0)))
        == "Triton's kernels"
    )


def test_large_heads_are_refused_where_there_is_little_shared_memory() -> None:
    large, l4 = replace(spec(), head_dim=256), replace(GPU, capability=(8, 9), shared_memory=101_376)
    assert TritonAttention.supports(large, replace(GPU, shared_memory=166_912)) is None  # an A100's
    assert TritonAttention.supports(replace(spec(), head_dim=128), l4) is None
    assert "is over 128, the most" in str(TritonAttention.supports(large, l4))


def test_a_cpu_is_refused_unless_the_interpreter_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert TritonAttention.supports(spec(), CPU) is None
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "needs a CUDA device" in str(TritonAttention.supports(spec(), CPU))


@pytest.mark.parametrize("window", [None, 25])
@pytest.mark.parametrize("height", [-50.0, 0.0, 50.0])
def test_sinks_take_weight_from_the_keys(window: int | None, height: float) -> None:
    lens = [(1, 1), (1, 700), *DECODES, *CHUNKS]  # whole rows, one that is cut, verifications, prompts
    rows = make_rows(lens, block_size=64, window=window, device=DEVICE)
    rows.sinks = height + torch.linspace(-1, 1, rows.num_heads, device=DEVICE)
    out = attend(TritonAttention(), rows).double().cpu()
    torch.testing.assert_close(out, rows.expected(), atol=3e-6, rtol=0)


def test_sinks_of_decodes_that_are_cut_are_counted_once() -> None:
    rows = make_rows([(1, 2000), (1, 300)], block_size=64, device=DEVICE)
    rows.sinks = torch.linspace(1, 9, rows.num_heads, device=DEVICE)
    out = attend(TritonAttention(), rows).double().cpu()
    torch.testing.assert_close(out, rows.expected(), atol=3e-6, rtol=0)


@pytest.mark.parametrize("window", [None, 25])
@pytest.mark.parametrize("sink", [None, 0.5])
def test_capped_scores_are_those_of_naive_attention(sink: float | None, window: int | None) -> None:
    rows = make_rows([(1, 20), (8, 700), (3, 40), (30, 30), (40, 90)], window=window, device=DEVICE)
    rows.softcap = 0.7
    rows.sinks = None if sink is None else sink + torch.linspace(-1, 1, rows.num_heads, device=DEVICE)
    out = attend(TritonAttention(), rows).double().cpu()
    torch.testing.assert_close(out, rows.expected(), atol=1e-5, rtol=0)
