"""The whole engine on a GPU: the tokens of the CPU, whatever the steps, and never out of memory."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest
import torch

from pellucid import LLM, SamplingParams
from tests.llm.test_invariance import random_requests
from tests.spec import heads

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
SMALL = {"dtype": "float32", "block_size": 16, "check_invariants": True, "num_gpu_blocks_override": 4096}


def run(
    folder: Path, prompts: list[list[int]], params: list[SamplingParams], **options: object
) -> list[list[int]]:
    with LLM(str(folder), **(SMALL | options)) as llm:
        return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def on_cpu(tiny: Path) -> tuple[list[list[int]], list[SamplingParams], list[list[int]]]:
    """100 requests with every kind of sampling, and their tokens on a CPU."""
    prompts, params = random_requests(100, seed=3)
    return prompts, params, run(tiny, prompts, params, device="cpu")


COMPANIES = {
    "two plans in flight": {"depth": 2},
    "one plan": {"depth": 1},
    "no graphs": {"enforce_eager": True},
    "small chunks": {"depth": 3, "max_num_batched_tokens": 24},
    "a pool that runs dry": {"num_gpu_blocks_override": 16},
    "few slots": {"max_num_seqs": 3},
    "attention in plain torch": {"attention_backend": "torch"},
}


@pytest.mark.parametrize("options", COMPANIES.values(), ids=COMPANIES.keys())
def test_tokens_are_those_of_the_cpu(tiny: Path, on_cpu, options: dict) -> None:
    """Sums are ordered otherwise on a GPU, so near ties may fall the other way: in one request of 100."""
    prompts, params, expected = on_cpu
    tokens = run(tiny, prompts, params, device="cuda", **options)
    assert sum(a != b for a, b in zip(tokens, expected, strict=True)) <= 1


@pytest.mark.parametrize("options", [{"depth": 2}, {"enforce_eager": True}, {"max_num_batched_tokens": 24}])
def test_drafts_of_a_smaller_model_change_nothing(
    tiny: Path, tiny_draft: Path, on_cpu, options: dict
) -> None:
    prompts, params, expected = on_cpu
    drafts = {
        "speculative_config": {"model": str(tiny_draft), "num_speculative_tokens": 5, "adaptive": False}
    }
    tokens = run(tiny, prompts, params, device="cuda", **drafts, **options)
    assert sum(a != b for a, b in zip(tokens, expected, strict=True)) <= 1


@pytest.mark.parametrize("method", heads.METHODS)
def test_what_heads_draft_changes_nothing(tiny: Path, on_cpu, tmp_path: Path, method: str) -> None:
    """Recorded steps, kernel by kernel, small chunks: one of these for each head."""
    prompts, params, expected = on_cpu
    model, drafts = heads.drafts_of(method, tiny, tmp_path)
    options = ({}, {"enforce_eager": True}, {"max_num_batched_tokens": 24})[heads.METHODS.index(method) % 3]
    tokens = run(model, prompts, params, device="cuda", speculative_config=drafts, **options)
    assert sum(a != b for a, b in zip(tokens, expected, strict=True)) <= 1


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 24}, {"max_num_seqs": 600}])
@pytest.mark.parametrize("num_drafts", [3, 12])
def test_drafts_of_any_number_change_nothing(tiny: Path, on_cpu, num_drafts: int, options: dict) -> None:
    """Ragged steps are padded to what is recorded, and 12 drafts are chunks to attention."""
    prompts, params, expected = on_cpu
    drafts = {
        "method": "ngram",
        "num_speculative_tokens": num_drafts,
        "adaptive": False,
        "prompt_lookup_min": 1,
    }
    tokens = run(tiny, prompts, params, device="cuda", speculative_config=drafts, **options)
    assert sum(a != b for a, b in zip(tokens, expected, strict=True)) <= 1


def test_the_kv_cache_fills_the_memory_and_the_largest_steps_still_run() -> None:
    options = {
        "device": "cuda",
        "max_model_len": 8192,
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": 0.5,
    }
    with LLM("shape:qwen3-0.6b", **options) as llm:
        free, total = torch.cuda.mem_get_info()
        assert total - free > 0.4 * total, "the cache is smaller than it could be"
        prompts = [[(i * 31 + j) % 9000 for j in range(1000)] for i in range(300)]
        params = SamplingParams(max_tokens=4, top_p=0.9, presence_penalty=0.5, logprobs=20, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == 4 for output in outputs)
        assert torch.cuda.max_memory_reserved() <= 0.5 * total


def compiled() -> set[str]:
    """Files in Triton's cache."""
    triton = pytest.importorskip("triton")
    return {str(path) for path in Path(triton.knobs.cache.dir).rglob("*")}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_cache_dtype": "fp8"},
        {"quantization": "fp8"},
        {"enforce_eager": True},
        {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "adaptive": False,
                "prompt_lookup_min": 1,
            }
        },
        {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 12,
                "adaptive": False,
                "prompt_lookup_min": 1,
            }
        },
    ],
    ids=str,
)
def test_nothing_is_compiled_once_the_engine_is_ready(
    options: dict, caplog: pytest.LogCaptureFixture
) -> None:
    assert_nothing_is_compiled(options, caplog)


@pytest.mark.parametrize("method", ["dflash", "eagle", "eagle3", "medusa", "mtp"])
def test_nothing_is_compiled_with_a_head(
    method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = heads.dummy_of(method, tmp_path, "shape:qwen3-0.6b")
    assert_nothing_is_compiled({"load_format": "dummy", "speculative_config": config}, caplog)


def assert_nothing_is_compiled(options: dict, caplog: pytest.LogCaptureFixture) -> None:
    """Ragged prompts in small and large chunks, mixed steps, batches that grow and shrink, every option."""
    rng = random.Random(0)
    lengths = [
        rng.choice((rng.randrange(1, 12), rng.randrange(12, 200), rng.randrange(200, 1500)))
        for _ in range(90)
    ]
    prompts = [[rng.randrange(1000) for _ in range(length)] for length in lengths]
    _, params = random_requests(len(prompts), seed=8)
    limits = {"max_model_len": 4096, "max_num_batched_tokens": 1024, "max_num_seqs": 70}
    caplog.set_level(logging.INFO, logger="pellucid.kernels.compile.compilations")
    with LLM("shape:qwen3-0.6b", device="cuda", gpu_memory_utilization=0.3, **limits, **options) as llm:
        before = compiled()
        llm.generate(prompts, SamplingParams(temperature=0.7, max_tokens=20, ignore_eos=True), use_tqdm=False)
        llm.generate(prompts, params, use_tqdm=False)
        late = [message for message in caplog.messages if "mid-run" in message]
        assert (llm.llm_engine.stats.num_late_compilations, late) == (0, [])
        assert compiled() - before == set(), "kernels, or what launches them"


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
NGRAM = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "adaptive": False,
        "prompt_lookup_min": 1,
    }
}


@two_gpus
@pytest.mark.parametrize("parallel", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize(
    "options", [{}, {"enforce_eager": True}, {"num_gpu_blocks_override": 16}, {"depth": 4}, NGRAM], ids=str
)
def test_two_gpus_say_the_same(tiny: Path, on_cpu, parallel: str, options: dict) -> None:
    prompts, params, expected = on_cpu
    tokens = run(tiny, prompts, params, device="cuda", **{parallel: 2}, **options)
    assert sum(a != b for a, b in zip(tokens, expected, strict=True)) <= 1


def prompt_logprobs(model: str, **options: object) -> list[float]:
    """Of four prompts' tokens."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    prompts = [[(7 * i + 3 * j) % 300 + 1 for j in range(120)] for i in range(4)]
    with LLM(model, device="cuda", **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        next(iter(entry.values())).logprob
        for output in outputs
        for entry in output.prompt_logprobs or []
        if entry
    ]


@two_gpus
@pytest.mark.parametrize("parallel", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_gpus_give_the_logprobs_of_one(tiny: Path, parallel: str) -> None:
    expected = prompt_logprobs(str(tiny), **SMALL)
    assert prompt_logprobs(str(tiny), **SMALL, **{parallel: 2}) == pytest.approx(expected, abs=1e-3)


@two_gpus
def test_two_stages_measure_their_memory_and_give_the_logprobs_of_one() -> None:
    """In bfloat16, with dummy weights, which are the same on whichever stage they are."""
    options = {"max_model_len": 2048, "gpu_memory_utilization": 0.3}
    expected = prompt_logprobs("shape:qwen3-0.6b", **options)
    got = prompt_logprobs("shape:qwen3-0.6b", pipeline_parallel_size=2, **options)
    assert got == pytest.approx(expected, abs=0.05)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_engines_have_a_gpu_each(tiny: Path, on_cpu) -> None:
    prompts, params, expected = on_cpu
    free = [torch.cuda.mem_get_info(gpu)[0] for gpu in range(2)]
    with LLM(str(tiny), device="cuda", data_parallel_size=2, **SMALL) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        used = [before - torch.cuda.mem_get_info(gpu)[0] for gpu, before in enumerate(free)]
    assert sum(o.outputs[0].token_ids != e for o, e in zip(outputs, expected, strict=True)) <= 1
    assert min(used) > 100 << 20, "a GPU is not in use"
    assert abs(used[0] - used[1]) < 200 << 20, "an engine is on the other one's GPU, too"


@pytest.mark.skipif(torch.cuda.device_count() > 31, reason="needs less than 32 GPUs")
def test_more_engines_than_gpus_are_refused(tiny: Path) -> None:
    num = torch.cuda.device_count()
    with pytest.raises(ValueError, match=f"{num + 1} GPUs are asked for, but torch sees {num}"):
        LLM(str(tiny), device="cuda", data_parallel_size=num + 1, **SMALL)
