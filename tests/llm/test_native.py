"""The whole engine in native code: a request's tokens are its own in bfloat16, too, and ranks agree."""

from __future__ import annotations

import pytest

from pellucid import LLM, SamplingParams
from pellucid.native.library import library
from tests.llm.test_invariance import random_requests

pytestmark = pytest.mark.skipif(library() is None, reason="no native code here")
OPTIONS = {"device": "cpu", "dtype": "bfloat16", "cpu_kv_cache_gib": 0.05, "max_num_seqs": 8}


def answers(**options: object) -> tuple[list[list[int]], list[list[int]]]:
    """Of some requests together, and one after the other."""
    prompts, _ = random_requests(6, seed=1)
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=16, ignore_eos=True)
    with LLM("sprout", **(OPTIONS | {"num_threads": 1} | options)) as llm:
        together = llm.generate(prompts, params, use_tqdm=False)
        alone = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
    return [o.outputs[0].token_ids for o in together], [o.outputs[0].token_ids for o in alone]


@pytest.mark.parametrize("quantization", [None, "int8", "int4", "nf4", "mxfp4"])
def test_a_requests_tokens_do_not_depend_on_its_company(quantization: str | None) -> None:
    together, alone = answers(quantization=quantization, enable_prefix_caching=False)
    assert together == alone


NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
DRAFTER = {"model": "sprout-draft", "num_speculative_tokens": 4, "adaptive": False}
IN_ONE_BYTE = {"kv_cache_dtype": "fp8_e5m2"}
TEXTS = [[*range(9, 29), *range(9, 29), 9 + i] for i in range(3)]


@pytest.mark.parametrize(
    "quantization",
    ["nf4", *(pytest.param(each, marks=pytest.mark.matrix) for each in ("int8", "int4", "mxfp4"))],
)
@pytest.mark.parametrize("cache", [IN_ONE_BYTE, pytest.param({}, marks=pytest.mark.matrix)], ids=str)
def test_drafts_change_no_token_of_codes(quantization: str, cache: dict[str, str]) -> None:
    def tokens(**drafts: object) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        asked = OPTIONS | {"quantization": quantization, "num_threads": 1} | cache
        with LLM("sprout", **(asked | drafts)) as llm:
            found = [output.outputs[0].token_ids for output in llm.generate(TEXTS, params, use_tqdm=False)]
            assert bool(llm.llm_engine.stats.num_accepted_tokens) == bool(drafts)
        return found

    expected = tokens()
    assert tokens(speculative_config=NGRAM) == expected
    assert tokens(speculative_config=DRAFTER) == expected


def test_ranks_and_threads_share_the_cores() -> None:
    together, alone = answers(tensor_parallel_size=2, enable_prefix_caching=False)
    assert together == alone
    assert answers(num_threads=2, enable_prefix_caching=False) == answers(enable_prefix_caching=False)
