"""Features ride: one from outside the package, through every company; and what rides with whom."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pellucid import LLM, RequestOutput, SamplingParams
from pellucid.features.base import FEATURES
from pellucid.sampling_params import StructuredOutputsParams
from tests.graphs.test_graphs import OPTIONS, graphed, worker_of
from tests.llm.test_invariance import NGRAM, random_requests

pytestmark = pytest.mark.usefixtures("forked_members")

TOKEN = 77
COMPANIES: dict[str, dict[str, object]] = {
    "plain": {"depth": 1},
    "overlapped": {"depth": 2},
    "few blocks": {"depth": 2, "num_gpu_blocks_override": 24},
    "drafts": {"depth": 2, "speculative_config": NGRAM},
    "tp": {"tensor_parallel_size": 2},
    "pp": {"pipeline_parallel_size": 2},
}


@pytest.fixture(scope="module", autouse=True)
def toy() -> Iterator[None]:
    FEATURES.register("toy", "tests.features.toy:TOY")
    yield
    FEATURES.unregister("toy")


def ask(llm: LLM, *, every: int) -> list[RequestOutput]:
    """30 requests with all kinds of sampling, of which each `every`th asks for the toy."""
    prompts, params = random_requests(30, seed=5)
    wishes = [
        each.clone(extra_args={"toy": TOKEN}, ignore_eos=True) if index % every == 0 else each
        for index, each in enumerate(params)
    ]
    wishes[0] = SamplingParams(seed=1, max_tokens=9, extra_args={"toy": TOKEN}, logprobs=2, prompt_logprobs=1)
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], wishes, use_tqdm=False)


def check(outputs: list[RequestOutput], every: int) -> list[list[int]]:
    """Who asks has the token at every other place, and was told all that was sampled; others were not."""
    for index, output in enumerate(outputs):
        (answer,) = output.outputs
        assert output.error is None, output.error
        if index % every:
            assert answer.extras is None
            continue
        assert answer.extras == {"toy": answer.token_ids}
        first = len(output.prompt_token_ids)
        for place, token in enumerate(answer.token_ids, start=first):
            # Other wishes, as allowed tokens, may rule it out.
            assert token == TOKEN or place % 2 == 0 or index, (index, place, token)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected(tiny: Path, toy: None) -> dict[int, list[list[int]]]:
    """Launched kernel by kernel; by how many requests ask."""
    with LLM(str(tiny), **OPTIONS) as llm:
        return {every: check(ask(llm, every=every), every) for every in (1, 3)}


def test_who_does_not_ask_does_not_see_its_neighbours(expected: dict[int, list[list[int]]]) -> None:
    everyone, third = expected[1], expected[3]
    assert all(third[index] == everyone[index] for index in range(0, 30, 3))
    assert any(third[index] != everyone[index] for index in range(1, 30, 3))


@pytest.mark.parametrize("company", COMPANIES.values(), ids=COMPANIES.keys())
def test_a_feature_from_outside_rides_everywhere(
    tiny: Path, expected: dict[int, list[list[int]]], company: dict[str, object]
) -> None:
    with LLM(str(tiny), **(OPTIONS | company)) as llm:
        assert check(ask(llm, every=3), 3) == expected[3]


@pytest.mark.parametrize("every", [1, 3])
def test_it_rides_on_recorded_halves(tiny: Path, expected: dict[int, list[list[int]]], every: int) -> None:
    with LLM(str(tiny), **OPTIONS) as llm:
        graphed(worker_of(llm))
        assert check(ask(llm, every=every), every) == expected[every]


def test_features_ride_side_by_side(tiny: Path) -> None:
    """One has its halves recorded beside another's, which is not asked for in the same steps."""
    pytest.importorskip("xgrammar")
    regex = StructuredOutputsParams(regex="[a-z ]+")
    wishes = [
        SamplingParams(max_tokens=12, seed=1, extra_args={"toy": TOKEN}, ignore_eos=True),
        SamplingParams(max_tokens=6, seed=2, structured_outputs=regex, logprobs=1),
        SamplingParams(max_tokens=9, seed=3),
    ]
    with LLM("sprout", **OPTIONS) as llm:
        alone = [llm.generate("Once", wish, use_tqdm=False)[0].outputs[0].token_ids for wish in wishes]
        graphed(worker_of(llm))
        together = llm.generate(["Once"] * 3, wishes, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in together] == alone


def test_a_wish_that_cannot_be_is_its_requests_error(tiny: Path) -> None:
    with LLM(str(tiny), **OPTIONS) as llm:
        wishes = [SamplingParams(max_tokens=3, extra_args={"toy": "x"}), SamplingParams(max_tokens=3)]
        wrong, right = llm.generate([{"prompt_token_ids": [1, 2]}] * 2, wishes, use_tqdm=False)
        assert "extra_args['toy'] is 'x', must be a token id" in str(wrong.error)
        assert right.error is None and len(right.outputs[0].token_ids) == 3
        with pytest.raises(ValueError, match="extra_args has 'toys', which is no feature here"):
            llm.generate("Once", SamplingParams(extra_args={"toys": 1}), use_tqdm=False)
