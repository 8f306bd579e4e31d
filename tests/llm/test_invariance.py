"""A request's tokens are its own: the same alone or in company, in any steps, on any pool."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pellucid import LLM, SamplingParams
from tests.patience import eventually
from tests.spec import heads

VOCAB = 320
BASE = {"dtype": "float32", "device": "cpu", "block_size": 16, "check_invariants": True, "max_num_seqs": 128}


def random_requests(num: int, seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that share beginnings, with every kind of sampling."""
    rng = random.Random(seed)
    shared = [rng.randrange(1, VOCAB) for _ in range(40)]
    prompts = [
        shared[: rng.choice([0, 16, 40])] + [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 50))]
        for _ in range(num)
    ]
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 1.2, "top_k": 20, "top_p": 0.9},
        {"temperature": 0.8, "top_p": 0.7},
        {"temperature": 0.8, "min_p": 0.1, "logprobs": 3},
        {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        {"temperature": 0.9, "logit_bias": {5: 4.0, 7: -100.0}, "prompt_logprobs": 1},
        {"temperature": 0.9, "allowed_token_ids": list(range(50, 90)), "min_tokens": 6},
    ]
    params = [
        SamplingParams(**rng.choice(kinds), seed=rng.randrange(1 << 40), max_tokens=rng.randint(6, 40))
        for _ in range(num)
    ]
    return prompts, params


def run(
    folder: Path, prompts: list[list[int]], params: list[SamplingParams], **options: object
) -> list[list[int]]:
    with LLM(str(folder), **(BASE | options)) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        eventually(lambda: not llm.llm_engine.step() and llm.llm_engine.stats.kv_usage == 0)  # saves end
    return [output.outputs[0].token_ids for output in outputs]


ROUNDING = 1e-4  # of log-probabilities: between two as near as this, the shape of a step may decide


def assert_same(
    folder: Path, prompts: list[list[int]], params: list[SamplingParams],
    tokens: list[list[int]], expected: list[list[int]],
) -> None:  # fmt: skip
    """To the token, but for what is greedy and parts at a tie, of which a run has one at most."""
    parted = [i for i, (ours, alone) in enumerate(zip(tokens, expected, strict=True)) if ours != alone]
    assert len(parted) < 2, f"{len(parted)} of {len(tokens)} texts differ"
    for i in parted:
        place = next(n for n, (a, b) in enumerate(zip(tokens[i], expected[i], strict=False)) if a != b)
        assert params[i].temperature == 0, f"{tokens[i]} instead of {expected[i]}"
        with LLM(str(folder), **BASE) as llm:
            next_one = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
            (output,) = llm.generate([prompts[i] + expected[i][:place]], next_one, use_tqdm=False)
        assert output.outputs[0].logprobs is not None
        logprobs = output.outputs[0].logprobs[0]
        pair = [logprobs[text[place]].logprob for text in (tokens[i], expected[i])]
        assert abs(pair[0] - pair[1]) < ROUNDING, f"{tokens[i]} instead of {expected[i]}"


@pytest.fixture(scope="module", params=[30, pytest.param(100, marks=pytest.mark.matrix)])
def alone(
    tiny: Path, request: pytest.FixtureRequest
) -> tuple[list[list[int]], list[SamplingParams], list[list[int]]]:
    """Requests, each run by itself."""
    prompts, params = random_requests(request.param, seed=1)
    with LLM(str(tiny), **BASE, enable_prefix_caching=False) as llm:
        tokens = [
            llm.generate([prompt], sampling, use_tqdm=False)[0].outputs[0].token_ids
            for prompt, sampling in zip(prompts, params, strict=True)
        ]
    return prompts, params, tokens


NGRAM = {
    "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3,
    "adaptive": False,
}  # fmt: skip
COMPANIES = {
    "all at once": {},
    "two plans in flight": {"depth": 2},
    "three plans in flight, small chunks": {"depth": 3, "max_num_batched_tokens": 24},
    "no prefix cache": {"enable_prefix_caching": False},
    "a pool that runs dry": {"num_gpu_blocks_override": 16, "depth": 2},
    "a pool that runs dry, and host memory behind it": {
        "num_gpu_blocks_override": 16,
        "depth": 2,
        "kv_offloading_size": 0.01,
    },
    "few slots": {"max_num_seqs": 3},
    "large blocks": {"block_size": 64},
    "drafts from the text": {"speculative_config": NGRAM},
    "drafts, two plans in flight": {"speculative_config": NGRAM, "depth": 2, "max_num_batched_tokens": 24},
    "drafts on a pool that runs dry": {
        "speculative_config": NGRAM,
        "depth": 2,
        "num_gpu_blocks_override": 16,
    },
    "drafts from finished texts": {
        "speculative_config": {"method": "suffix", "num_speculative_tokens": 4, "adaptive": False},
        "depth": 2,
        "num_gpu_blocks_override": 20,
    },
    "priorities": {"scheduling_policy": "priority", "num_gpu_blocks_override": 20},
}


@pytest.mark.parametrize("options", COMPANIES.values(), ids=COMPANIES.keys())
def test_tokens_do_not_depend_on_company(tiny: Path, alone, options: dict) -> None:
    prompts, params, expected = alone
    assert_same(tiny, prompts, params, run(tiny, prompts, params, **options), expected)


DRAFTER_COMPANIES = {
    "two plans in flight": {"depth": 2},
    "three plans in flight, small chunks": {"depth": 3, "max_num_batched_tokens": 24},
    "no prefix cache": {"enable_prefix_caching": False, "depth": 2},
    "a pool that runs dry": {"num_gpu_blocks_override": 17, "depth": 2},
    "few slots, large blocks, priorities": {
        "max_num_seqs": 3,
        "block_size": 64,
        "scheduling_policy": "priority",
    },
}


@pytest.mark.parametrize("options", DRAFTER_COMPANIES.values(), ids=DRAFTER_COMPANIES.keys())
def test_nor_on_what_a_smaller_model_drafts(tiny: Path, tiny_draft: Path, alone, options: dict) -> None:
    prompts, params, expected = alone
    drafts = {
        "speculative_config": {"model": str(tiny_draft), "num_speculative_tokens": 5, "adaptive": False}
    }
    assert_same(tiny, prompts, params, run(tiny, prompts, params, **drafts, **options), expected)


HEAD_COMPANIES = {
    "dflash": {"num_gpu_blocks_override": 17, "depth": 2},
    "eagle": {"num_gpu_blocks_override": 17, "depth": 2},
    "eagle3": {"depth": 3, "max_num_batched_tokens": 24},
    "eagle3, trees": {"depth": 3, "max_num_batched_tokens": 40, "num_gpu_blocks_override": 20},
    "medusa": {"max_num_seqs": 3, "block_size": 64, "scheduling_policy": "priority"},
    "medusa, a tree": {"num_gpu_blocks_override": 20, "depth": 2},
    "mtp": {"depth": 2, "max_num_batched_tokens": 40},
}


@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=pytest.mark.matrix) if name == "eagle" else name for name in HEAD_COMPANIES],
)
def test_nor_on_what_a_head_drafts(tiny: Path, tmp_path: Path, alone, method: str) -> None:
    prompts, params, expected = alone
    model, drafts = heads.drafts_of(method, tiny, tmp_path)
    tokens = run(model, prompts, params, speculative_config=drafts, **HEAD_COMPANIES[method])
    assert_same(tiny, prompts, params, tokens, expected)


def test_greedy_tokens_are_those_of_transformers(tiny: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    prompts, _ = random_requests(6, seed=2)
    greedy = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    expected = [
        model.generate(  # pyright: ignore[reportAttributeAccessIssue]
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=64,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    assert run(tiny, prompts, [greedy] * 6) == expected


def test_prefix_hits_are_reported_and_change_nothing(tiny: Path) -> None:
    prompt = list(range(1, 101))
    greedy = SamplingParams(temperature=0, max_tokens=8)
    with LLM(str(tiny), **BASE) as llm:
        first, second = (llm.generate([prompt], greedy, use_tqdm=False)[0] for _ in range(2))
        llm.reset_prefix_cache()
        third = llm.generate([prompt], greedy, use_tqdm=False)[0]
    assert [output.num_cached_tokens for output in (first, second, third)] == [0, 96, 0]
    assert first.outputs[0].token_ids == second.outputs[0].token_ids == third.outputs[0].token_ids


def test_requests_of_one_step_share_their_prefix(tiny: Path) -> None:
    prompts = [[*range(1, 65), 100 + i] for i in range(4)]
    greedy = SamplingParams(temperature=0, max_tokens=4)
    with LLM(str(tiny), **BASE) as llm:
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
        assert sorted(output.num_cached_tokens for output in outputs) == [0, 64, 64, 64]
        assert [run(tiny, [p], [greedy])[0] for p in prompts] == [o.outputs[0].token_ids for o in outputs]


def test_a_full_hit_computes_its_last_block_again(tiny: Path) -> None:
    prompt = list(range(1, 65))  # exactly four blocks
    with LLM(str(tiny), **BASE) as llm:
        outputs = [llm.generate([prompt], SamplingParams(temperature=0), use_tqdm=False)[0] for _ in range(3)]
    assert [output.num_cached_tokens for output in outputs] == [0, 48, 48]
    assert outputs[0].outputs[0].token_ids == outputs[2].outputs[0].token_ids
