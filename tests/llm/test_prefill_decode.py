"""Engines for prompts, and engines that go on from there: the tokens of one engine, whoever is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from pellucid import LLM, RequestOutput, SamplingParams
from pellucid.router.replicas import Replicas
from tests.llm.test_invariance import BASE, random_requests
from tests.processes import members

NUM = 40


def mixed(seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Every kind of sampling; some answers of one token, some that a string ends, three from one prompt."""
    prompts, params = random_requests(NUM, seed=seed)
    params[0] = SamplingParams(max_tokens=1)
    params[1] = SamplingParams(n=3, max_tokens=9, seed=7)
    params[2] = SamplingParams(stop=["e", "a "], max_tokens=60, seed=8)
    params[3] = SamplingParams(temperature=0, max_tokens=60, min_tokens=3, prompt_logprobs=0, logprobs=2)
    return prompts, params


def shown(outputs: list[RequestOutput]) -> list[object]:
    return [
        (o.error, len(o.prompt_logprobs or ()), [(c.text, c.token_ids, c.finish_reason) for c in o.outputs])
        for o in outputs
    ]


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[object]:
    with LLM(str(tiny), **BASE) as llm:
        return shown(llm.generate(*mixed(3), use_tqdm=False))


def test_prompts_and_decodes_on_engines_of_their_own(tiny: Path, expected: list[object]) -> None:
    with LLM(str(tiny), prefill_engines=1, decode_engines=2, **BASE) as llm:
        outputs = llm.generate(*mixed(3), use_tqdm=False)
        first, *others = llm.llm_engine.stats_per_engine
        assert isinstance(llm.llm_engine.engine, Replicas)
        assert llm.llm_engine.engine.router.loads == [0, 0, 0]
    assert shown(outputs) == expected
    assert first.num_sampled_tokens == NUM + 1, "a token for each completion that goes on"
    assert min(other.num_sampled_tokens for other in others) > 100


@pytest.mark.parametrize("who", ["engine 0", "engine 1"])
def test_an_engine_of_either_role_may_be_killed(tiny: Path, expected: list[object], who: str) -> None:
    """The other role's do its work."""
    others = members()
    with LLM(str(tiny), prefill_engines=1, decode_engines=1, **BASE) as llm:
        pids = {name: pid for pid, name in members().items() if pid not in others}
        engine, found = llm.llm_engine, dict[str, RequestOutput]()
        prompts, params = mixed(3)
        ids = [engine.add_request(*each) for each in zip(prompts, params, strict=True)]
        while engine.has_unfinished_requests():
            found |= {output.request_id: output for output in engine.step()}
            if len(found) > NUM // 3 and who in pids:
                os.kill(pids.pop(who), signal.SIGKILL)
        assert who not in pids
    assert shown([found[i] for i in ids]) == expected


@pytest.mark.parametrize(
    "options,message",
    [
        ({"prefill_engines": 1}, "prefill_engines is 1 and decode_engines 0: prompts need one of each"),
        ({"prefill_engines": 1, "decode_engines": 1, "data_parallel_size": 3}, "data_parallel_size is 3"),
    ],
)
def test_roles_that_do_not_add_up_are_refused(tiny: Path, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(str(tiny), **options, **BASE)
