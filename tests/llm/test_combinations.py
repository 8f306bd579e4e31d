"""Features together on the bundled model: what changes speed or memory alone changes no token."""

from __future__ import annotations

import pytest

from pellucid import LLM, SamplingParams
from tests.worker import pipeline  # noqa: F401 (registers the executor "lazy")

pytestmark = pytest.mark.usefixtures("forked_members")

QUESTIONS = [[{"role": "user", "content": f"What is {a}+{3 * a + 7}?"}] for a in (12, 47, 333)]
GREEDY = SamplingParams(temperature=0, max_tokens=32)
NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}}
DRAFTER = {"speculative_config": {"model": "sprout-draft", "num_speculative_tokens": 4, "adaptive": False}}
TWO = {"tensor_parallel_size": 2}
STAGES = {"executor": "lazy", "pipeline_parallel_size": 3, "num_gpu_blocks_override": 40}


def answers(**options: object) -> list[list[int]]:
    with LLM("sprout", device="cpu", dtype="float32", max_model_len=512, **options) as llm:
        return [output.outputs[0].token_ids for output in llm.chat(QUESTIONS, GREEDY, use_tqdm=False)]


STORAGES = [
    {},
    pytest.param({"quantization": "fp8"}, marks=pytest.mark.matrix),
    {"quantization": "int8", "kv_cache_dtype": "fp8"},
    pytest.param({"quantization": "int8"}, marks=pytest.mark.matrix),
    pytest.param({"kv_cache_dtype": "fp8"}, marks=pytest.mark.matrix),
    pytest.param({"quantization": "fp8", "kv_cache_dtype": "fp8"}, marks=pytest.mark.matrix),
]


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_two_ranks_and_drafts_give_the_tokens_of_one_rank_without(storage: dict) -> None:
    expected = answers(**storage)
    assert answers(**storage, **NGRAM, **TWO) == expected
    assert answers(**storage, **NGRAM, **STAGES) == expected


@pytest.mark.parametrize(
    "storage", [pytest.param({}, marks=pytest.mark.matrix), {"kv_cache_dtype": "fp8"}], ids=str
)
def test_so_do_two_ranks_and_a_draft_model(storage: dict) -> None:
    expected = answers(**storage)
    assert answers(**storage, **DRAFTER, **TWO) == expected
    assert answers(**storage, **DRAFTER, **STAGES) == expected


def num_steps(**options: object) -> int:
    """For 32 answers of 20 tokens, with room for 32 tokens in a step."""
    prompts = [[5 + i, 9, 11 + i % 7, 5 + i, 9, 12, 30 + i, 4, 5 + i, 9] for i in range(32)]
    sampling = GREEDY.clone(max_tokens=20, ignore_eos=True)
    with LLM("sprout", device="cpu", max_num_batched_tokens=32, **options) as llm:
        llm.generate(prompts, sampling, use_tqdm=False)
        assert bool(llm.llm_engine.stats.num_accepted_tokens) == bool(options)
        return llm.llm_engine.stats.num_steps


def test_drafts_cost_no_steps_where_a_step_has_no_room_for_them() -> None:
    assert num_steps(**NGRAM) <= num_steps()
