"""Sliding windows beside full attention: the same tokens in any company, from the pages of a window."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pellucid import LLM, SamplingParams
from pellucid.engine.core import Engine
from pellucid.kv.kinds import Full, Window
from tests.llm.test_invariance import BASE, random_requests, run
from tests.patience import eventually
from tests.tiny import write_checkpoint

WINDOW = 20  # tokens: not a whole number of blocks
ALTERNATING = ["full_attention", "sliding_attention"] * 2
MOSTLY = ["sliding_attention"] * 3 + ["full_attention"]
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "adaptive": False,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def write(folder: Path, layer_types: list[str], **changes: object) -> Path:
    windows = {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": layer_types}
    return write_checkpoint(folder, num_hidden_layers=len(layer_types), **windows, **changes)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("hybrid"), ALTERNATING)


@pytest.fixture(scope="module")
def mostly(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A block is a page of its full layer and three of its others."""
    return write(tmp_path_factory.mktemp("mostly"), MOSTLY)


def of_transformers(folder: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return [
        model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=num_tokens,
            do_sample=False, eos_token_id=None, pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]  # fmt: skip


@pytest.mark.parametrize(
    "layer_types",
    [ALTERNATING, pytest.param(MOSTLY, marks=pytest.mark.matrix), ["sliding_attention"] * 2],
)
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, layer_types: list[str]) -> None:
    folder = write(tmp_path, layer_types)
    prompts, _ = random_requests(6, seed=2)
    prompts.append([(7 * i) % 300 + 1 for i in range(150)])
    expected = of_transformers(folder, prompts, 40)
    assert run(folder, prompts, [GREEDY] * 7) == expected
    assert run(folder, prompts, [GREEDY] * 7, max_num_batched_tokens=24, depth=2) == expected


@pytest.fixture(scope="module")
def alone(mostly: Path) -> tuple[list[list[int]], list[SamplingParams], list[list[int]]]:
    """Requests, each run by itself."""
    prompts, params = random_requests(18, seed=4)
    with LLM(str(mostly), **BASE, enable_prefix_caching=False) as llm:
        tokens = [
            llm.generate([prompt], sampling, use_tqdm=False)[0].outputs[0].token_ids
            for prompt, sampling in zip(prompts, params, strict=True)
        ]
    return prompts, params, tokens


SMALL = {"num_gpu_blocks_override": 30, "max_num_batched_tokens": 24, "depth": 2, "max_model_len": 160}
COMPANIES = {
    "all at once": {},
    "three plans in flight, small chunks": {"depth": 3, "max_num_batched_tokens": 24},
    "a pool that runs dry": SMALL,
    "large blocks": {"block_size": 64},
    "drafts from the text": {"speculative_config": NGRAM, "depth": 2},
    "drafts on a pool that runs dry": {"speculative_config": NGRAM, **SMALL},
}


MATRIX = ("three plans in flight, small chunks", "drafts from the text")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.matrix) if name in MATRIX else name for name in COMPANIES]
)
def test_tokens_do_not_depend_on_company(mostly: Path, alone, name: str) -> None:
    prompts, params, expected = alone
    with LLM(str(mostly), **(BASE | COMPANIES[name])) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        eventually(lambda: not llm.llm_engine.step() and llm.llm_engine.stats.kv_usage == 0)
        stats = llm.llm_engine.stats
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert (stats.num_preemptions > 0) == ("runs dry" in name)
    assert stats.num_cached_tokens > 0 or "large blocks" in name


@pytest.mark.parametrize("window", [None, pytest.param(WINDOW, marks=pytest.mark.matrix), 9])
def test_nor_on_what_a_smaller_model_drafts_with_windows_of_its_own(
    mostly: Path, tmp_path: Path, alone, window: int | None
) -> None:
    """window: of all the draft model's layers."""
    prompts, params, expected = (each[:10] for each in alone)
    changes = {"use_sliding_window": window is not None, "sliding_window": window or WINDOW}
    changes |= {"layer_types": ["sliding_attention" if window else "full_attention"]}
    draft = write_checkpoint(tmp_path, num_hidden_layers=1, **changes)
    drafts = {"speculative_config": {"model": str(draft), "num_speculative_tokens": 5, "adaptive": False}}
    with LLM(str(mostly), **BASE, **drafts, **SMALL) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        stats = llm.llm_engine.stats
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert stats.num_accepted_tokens > 0


def test_a_prefix_hit_brings_what_the_next_token_sees(hybrid: Path) -> None:
    prompt, other = [(5 * i) % 300 + 1 for i in range(100)], [7] * 30
    prompts = [prompt, prompt[:64] + other, prompt + other]
    expected = run(hybrid, prompts, [GREEDY] * 3, enable_prefix_caching=False)
    with LLM(str(hybrid), **BASE) as llm:
        outputs = [llm.generate([p], GREEDY, use_tqdm=False)[0] for p in [*prompts, prompt]]
    assert [output.outputs[0].token_ids for output in outputs] == [*expected, expected[0]]
    assert [output.num_cached_tokens for output in outputs] == [0, 64, 96, 96]


def test_what_is_left_of_a_prefix_is_hit_only_where_its_window_is_whole(hybrid: Path) -> None:
    prompt = [(5 * i) % 300 + 1 for i in range(100)]
    (expected,) = run(hybrid, [prompt], [GREEDY])
    with LLM(str(hybrid), **BASE) as llm:
        llm.generate([prompt], GREEDY, use_tqdm=False)
        engine = llm.llm_engine.engine
        assert isinstance(engine, Engine)
        pool = engine.scheduler.kv.pool
        assert len(pool.index(0)) == len(pool.index(1)) == 139 // 16
        gone = list(pool.index(1).values())[4]  # the window's tokens 64 to 80
        pool._cached.move_to_end(gone[0], last=False)
        pool.drop(pool.take(len(pool.free) + 1)[:, None])
        output = llm.generate([prompt], GREEDY, use_tqdm=False)[0]
        assert output.num_cached_tokens == 64 and output.outputs[0].token_ids == expected


def test_ten_windows_of_text_hold_the_pages_of_one(mostly: Path) -> None:
    """And a long prompt no more, for each chunk beside it."""
    chunk, prompt = 24, [(5 * i) % 300 + 1 for i in range(100)]
    sampling = SamplingParams(temperature=0, max_tokens=140, ignore_eos=True)
    options = BASE | {"max_num_batched_tokens": chunk, "depth": 2, "max_num_seqs": 2}
    with LLM(str(mostly), **options) as llm:
        engine = llm.llm_engine.engine
        assert isinstance(engine, Engine)
        kv, most = engine.scheduler.kv, np.zeros(2, dtype=int)
        assert kv.kinds == (Full(16, 1), Window(16, 3, WINDOW))
        llm.llm_engine.add_request(prompt, sampling)
        while not llm.llm_engine.is_finished():
            llm.llm_engine.step()
            (seq,) = engine.scheduler.running() or [None]
            if seq is not None:
                table = kv.pages[seq.slot, : kv.capacity[seq.slot] // 16]
                most = np.maximum(most, (table[:, :2] > 0).sum(axis=0))
    bound = kv.kinds[1].most_blocks(240, chunk)
    assert most[0] == 240 // 16 > 2 * bound and most[1] <= bound


def test_pages_of_ten_whole_blocks_hold_a_text_of_sixteen(mostly: Path) -> None:
    with LLM(str(mostly), **BASE, num_gpu_blocks_override=40, max_num_batched_tokens=16) as llm:
        assert llm.llm_engine.capacity.max_model_len == 256
        prompt = [(5 * i) % 300 + 1 for i in range(200)]
        (expected,) = of_transformers(mostly, [prompt], 40)
        assert llm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected
