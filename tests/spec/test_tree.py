"""Trees of drafts through the whole engine: nothing of an output changes, whichever path is accepted."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from pellucid import LLM, RequestOutput, SamplingParams
from tests.llm.test_invariance import BASE, random_requests
from tests.spec.test_ngram import random_prompts, random_wishes
from tests.spec.toy import tree_config, want_at_random
from tests.trees import ancestor_bits, depths_of, paths_of

FULLY = pytest.mark.matrix
BUSH = (0, 0, 1, 1, 2)
DEEP = (0, 1, 0, 3, 3, 2, 6)
WIDE = (0, 0, 0, 1, 1, 2, 4, 4, 7, 3)  # more queries than a short row has


def test_a_tree_as_numbers() -> None:
    assert depths_of(BUSH) == [0, 1, 1, 2, 2, 2]
    assert paths_of(BUSH) == [[], [1], [2], [1, 3], [1, 4], [2, 5]]
    assert ancestor_bits(BUSH) == [0, 0b1, 0b10, 0b101, 0b1001, 0b10010]
    assert ancestor_bits(tuple(range(64)))[-1] == -1, "all 64 bits of an int64"
    with pytest.raises(AssertionError, match="must come before it"):
        depths_of((0, 2))


@dataclass(frozen=True)
class Plain:
    """Requests of every kind, and their outputs without drafts."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    outputs: list[RequestOutput]

    @property
    def texts(self) -> list[list[int]]:
        return [p + o.outputs[0].token_ids for p, o in zip(self.prompts, self.outputs, strict=True)]

    def assert_same(self, llm: LLM) -> None:
        """Generate again: the same words, and log-probabilities up to rounding."""
        outputs = llm.generate(self.prompts, self.params, use_tqdm=False)
        assert [words(o) for o in outputs] == [words(o) for o in self.outputs]
        for output, expected in zip(outputs, self.outputs, strict=True):
            assert numbers(output) == pytest.approx(numbers(expected), abs=1e-3)


def words(output: RequestOutput) -> tuple[object, ...]:
    text = output.outputs[0]
    return text.token_ids, text.text, text.finish_reason, text.stop_reason


def numbers(output: RequestOutput) -> list[float]:
    entries = [*(output.outputs[0].logprobs or []), *(output.prompt_logprobs or [])]
    return [value.logprob for entry in entries if entry for value in entry.values()]


@pytest.fixture(scope="module")
def plain(tiny: Path) -> Plain:
    some, more = random_requests(24, seed=6), (random_prompts(20, 50), random_wishes(20))
    prompts, params = some[0] + more[0], some[1] + more[1]
    with LLM(str(tiny), **BASE) as llm:
        return Plain(prompts, params, llm.generate(prompts, params, use_tqdm=False))


COMPANIES = {  # and whose tree every run has, the others with `make test-matrix`
    "all at once": ({}, BUSH),
    "two plans in flight": ({"depth": 2, "max_num_batched_tokens": 400}, WIDE),
    "a pool that runs dry": ({"depth": 2, "num_gpu_blocks_override": 16}, DEEP),
    "few slots": ({"max_num_seqs": 3, "block_size": 64, "enable_prefix_caching": False}, WIDE),
}


@pytest.mark.parametrize(
    ("parents", "options"),
    [
        pytest.param(parents, options, id=f"{company}-{parents}", marks=() if parents == own else FULLY)
        for company, (options, own) in COMPANIES.items()
        for parents in (BUSH, DEEP, WIDE)
    ],
)
def test_nothing_of_an_output_changes(
    tiny: Path, plain: Plain, parents: tuple[int, ...], options: dict
) -> None:
    speculative = tree_config(parents, plain.texts)
    with LLM(str(tiny), **(BASE | options), speculative_config=speculative) as llm:
        plain.assert_same(llm)
        scheduler, stats = llm.llm_engine.engine.scheduler, llm.llm_engine.stats
        assert scheduler.kv.usage == 0, "pages were lost"
    depth = max(depths_of(parents))
    assert all(num > 10 for num in stats.num_accepted_per_position[:depth]), "paths of every depth"
    assert not any(stats.num_accepted_per_position[depth:])


def test_the_number_of_drafts_may_change_from_step_to_step(tiny: Path, plain: Plain) -> None:
    with LLM(str(tiny), **BASE, depth=2, speculative_config=tree_config(BUSH, plain.texts)) as llm:
        want_at_random(llm.llm_engine.engine.scheduler, random.Random(5), most=5)
        plain.assert_same(llm)
        assert llm.llm_engine.stats.num_accepted_tokens > 50


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("parents", [BUSH, WIDE], ids=str)  # as a graph, and kernel by kernel
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_on_a_gpu_the_tokens_are_the_same(tiny: Path, parents: tuple[int, ...], temperature: float) -> None:
    """In float32, where steps of another shape round the same but for the rarest tie."""
    prompts = random_prompts(40, 60)
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=60, ignore_eos=True) for i in range(40)
    ]
    options = {"dtype": "float32", "device": "cuda", "num_gpu_blocks_override": 400}
    with LLM(str(tiny), **options) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
    plain = Plain(prompts, params, expected)
    with LLM(str(tiny), **options, speculative_config=tree_config(parents, plain.texts)) as llm:
        plain.assert_same(llm)
        assert llm.llm_engine.stats.num_accepted_tokens > 400


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_text_may_end_anywhere_before_the_longest_length(tiny: Path, temperature: float) -> None:
    longest, rooms = 64, range(1, 8)
    params = SamplingParams(temperature=temperature, seed=3, ignore_eos=True, max_tokens=None)
    options = {**BASE, "max_model_len": longest, "depth": 2, "enable_prefix_caching": False}
    prompts = [
        [10 + room, *[5, 6, 7] * 30][: longest - room] for room in rooms
    ]  # the first tells which text it is

    def said(llm: LLM) -> list[tuple[list[int], str | None]]:
        outputs = [llm.generate([prompt], params, use_tqdm=False)[0].outputs[0] for prompt in prompts]
        return [(output.token_ids, output.finish_reason) for output in outputs]

    with LLM(str(tiny), **options) as llm:
        expected = said(llm)
    texts = [prompt + tokens for prompt, (tokens, _) in zip(prompts, expected, strict=True)]
    with LLM(str(tiny), **options, speculative_config=tree_config(BUSH, texts)) as llm:
        assert said(llm) == expected
        assert llm.llm_engine.stats.num_accepted_tokens
    assert [len(tokens) for tokens, _ in expected] == [*rooms]
