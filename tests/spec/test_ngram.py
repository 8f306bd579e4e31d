"""Drafts from the text: the look-up against a naive one, and an engine with it against one without."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from pellucid import LLM, LLMEngine, RequestOutput, SamplingParams
from pellucid.config import BY_CHECKPOINT, EngineConfig, SpeculativeConfig
from pellucid.kernels.slots.prompt_lookup import prompt_lookup_ref
from tests.llm.test_invariance import BASE, NGRAM, VOCAB

WORDS = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


def naive(text: list[int], num: int, shortest: int, longest: int) -> list[int]:
    """By the rule itself: the longest n-gram first, then its most recent occurrence."""
    for n in range(longest, shortest - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[len(text) - n :]:
                follows = text[end:]
                return [follows[i % len(follows)] for i in range(num)]
    return [text[-1]] * num


def look_up(
    texts: list[list[int]], lengths: list[int], num: int, shortest: int, longest: int
) -> list[list[int]]:
    """Of texts in slots the other way round."""
    token_ids = torch.tensor(texts[::-1], dtype=torch.int32)
    slots = torch.arange(len(texts) - 1, -1, -1)
    sizes = {"num": num, "shortest": shortest, "longest": longest}
    return prompt_lookup_ref(token_ids, slots, torch.tensor(lengths) - 1, **sizes).tolist()


@pytest.mark.parametrize("shortest,longest", [(1, 1), (1, 3), (2, 5), (3, 3)])
def test_it_is_the_naive_look_up(shortest: int, longest: int) -> None:
    rng = random.Random(4)
    lengths = [rng.randint(1, 24) for _ in range(200)]
    texts = [[rng.randrange(3) for _ in range(24)] for _ in lengths]
    expected = [naive(row[:n], 4, shortest, longest) for row, n in zip(texts, lengths, strict=True)]
    assert look_up(texts, lengths, 4, shortest, longest) == expected


def test_what_lies_behind_the_known_tokens_is_not_read() -> None:
    assert look_up([[1, 2, 3, 1, 2, 9, 9, 9]], [5], 2, 1, 3) == [[3, 1]]


def test_a_text_that_repeats_itself_goes_round() -> None:
    assert look_up([[7, 8, 7, 8, 7, 0]], [5], 5, 1, 3) == [[8, 7, 8, 7, 8]]


def random_wishes(num: int) -> list[SamplingParams]:
    """Requests that use all that looks at earlier tokens or at the text."""
    rng = random.Random(3)
    kinds = [
        {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 0.8, "bad_words": ["a", "the b"], "min_tokens": 9},
        {"temperature": 0.8, "top_k": 6, "stop": ["e", "q"], "logprobs": 1},
        {"temperature": 0.0, "stop": ["z"], "frequency_penalty": 0.4},
        {"temperature": 0.3, "top_p": 0.5, "min_tokens": 12, "repetition_penalty": 1.2},
        {"temperature": 0.0, "logit_bias": {40: 60.0}},  # it says the same over and over
        {"temperature": 0.8, "allowed_token_ids": [60, 61, 62]},
    ]
    return [SamplingParams(**rng.choice(kinds), seed=i, max_tokens=rng.randint(12, 50)) for i in range(num)]


def random_prompts(num: int, longest: int) -> list[list[int]]:
    rng = random.Random(9)
    return [
        [rng.randrange(1, 9) if i % 2 else rng.randrange(1, VOCAB) for _ in range(rng.randint(1, longest))]
        for i in range(num)
    ]


class Near(float):
    """A log-probability; the same as another but for rounding."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and math.isclose(self, other, abs_tol=1e-4)

    __hash__ = float.__hash__


def digest(outputs: list[RequestOutput]) -> list[object]:
    """Everything of an output that speculation could spoil."""

    def near(logprobs) -> object:
        return logprobs and [
            None if entry is None else {k: (Near(v.logprob), v.rank) for k, v in entry.items()}
            for entry in logprobs
        ]

    return [
        (o.outputs[0].token_ids, o.outputs[0].text, o.outputs[0].finish_reason, o.outputs[0].stop_reason,
         near(o.outputs[0].logprobs), near(o.prompt_logprobs))
        for o in outputs
    ]  # fmt: skip


@cache
def plainly(model: Path, num: int) -> list[object]:
    """Of so many random prompts with random wishes, without drafts."""
    with LLM(str(model), **BASE) as llm:
        return digest(llm.generate(random_prompts(num, 50), random_wishes(num), use_tqdm=False))


@pytest.mark.parametrize("options", [{}, {"depth": 2, "max_num_batched_tokens": 100}], ids=str)
def test_nothing_of_an_output_changes(tiny: Path, options: dict) -> None:
    prompts, params = random_prompts(60, 50), random_wishes(60)
    with LLM(str(tiny), **BASE, **options, speculative_config=NGRAM) as llm:
        assert digest(llm.generate(prompts, params, use_tqdm=False)) == plainly(tiny, 60)
        stats = llm.llm_engine.stats
    assert stats.num_accepted_tokens > 100, "nothing was accepted, so nothing was tested"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_text_may_end_anywhere_before_the_longest_length(tiny: Path, depth: int) -> None:
    longest = 64
    params = SamplingParams(temperature=0, logit_bias={5: 90.0}, ignore_eos=True)  # drafts are accepted
    options = {**BASE, "max_model_len": longest, "depth": depth, "enable_prefix_caching": False}
    prompts = [([5, 6] * 40)[: longest - room] for room in range(1, 8)]
    found = []
    for drafts in ({}, {"speculative_config": NGRAM}):
        with LLM(str(tiny), **options, **drafts) as llm:
            outputs = [llm.generate([prompt], params, use_tqdm=False)[0].outputs[0] for prompt in prompts]
        found.append([(output.token_ids, output.finish_reason) for output in outputs])
    assert found[1] == found[0]
    lengths = [min(room, params.max_tokens or room) for room in range(1, 8)]
    assert [len(token_ids) for token_ids, _ in found[1]] == lengths


def test_aborted_requests_leave_the_others_alone(tiny: Path) -> None:
    prompts = random_prompts(24, 60)
    with LLM(str(tiny), **BASE) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, WORDS, use_tqdm=False)]
    config = EngineConfig.from_options(
        {"model": str(tiny), **BASE, "depth": 2, "num_gpu_blocks_override": 40, "speculative_config": NGRAM}
    )
    engine = LLMEngine(config)
    ids = [engine.add_request(prompt, WORDS) for prompt in prompts]
    tokens: dict[str, list[int]] = {}
    num_steps = 0
    while not engine.is_finished():
        for output in engine.step():
            tokens[output.request_id] = output.outputs[0].token_ids
        num_steps += 1
        if num_steps in (4, 7, 11):
            engine.abort(ids[num_steps])
    kept = [i for i in range(24) if i not in (4, 7, 11)]
    assert [tokens[ids[i]] for i in kept] == [expected[i] for i in kept]
    assert engine.engine.scheduler.kv.usage == 0
    engine.shutdown()


def test_the_counters_add_up(tiny: Path) -> None:
    same = SamplingParams(temperature=0, logit_bias={40: 90.0}, max_tokens=41, ignore_eos=True)
    with LLM(str(tiny), **BASE, speculative_config=NGRAM) as llm:
        llm.generate([[40] * 8], same, use_tqdm=False)
        stats = llm.llm_engine.stats
    # The prompt's step yields one token, and each of 8 verifications 4 drafts and one more.
    assert (stats.num_sampled_tokens, stats.num_steps) == (41, 9)
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (8, 32, 32)
    assert stats.num_accepted_per_position == (8, 8, 8, 8)


MEDUSA = {"method": "medusa", "model": "x", "num_speculative_tokens": 3}


def config_of(**options: object) -> SpeculativeConfig:
    return SpeculativeConfig.of(EngineConfig.from_options(options).speculative)


def test_every_way_to_ask_for_it_means_the_same() -> None:
    expected = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    assert config_of(speculative_config={"method": "ngram", "num_speculative_tokens": 4}) == expected
    assert config_of(speculative_config='{"method": "ngram", "num_speculative_tokens": 4}') == expected
    assert config_of(speculative_method="ngram", num_speculative_tokens=4) == expected
    assert config_of(speculative_model="[ngram]", num_speculative_tokens=4) == expected
    assert config_of(speculative_config={"model": "ngram", "num_speculative_tokens": 4}) == expected
    assert config_of() == SpeculativeConfig()


def test_a_model_alone_drafts_as_its_checkpoint_says() -> None:
    spec = {"model": "sprout-draft", "num_speculative_tokens": 4}
    expected = SpeculativeConfig(method="draft_model", model="sprout-draft", num_speculative_tokens=4)
    assert config_of(speculative_config=spec) == replace(expected, method=BY_CHECKPOINT)
    assert config_of(speculative_model="sprout-draft", num_speculative_tokens=4).is_open
    assert config_of(speculative_config=spec | {"method": "draft_model"}) == expected
    assert config_of(spec_model="sprout-draft", spec_method="draft_model", spec_tokens=4) == expected


@pytest.mark.parametrize(
    "options,message",
    [
        ({"speculative_config": {"num_speculative_tokens": 4, "modle": "sprout-draft"}}, "'model'"),
        ({"speculative_config": {"model": 5, "num_speculative_tokens": 4}}, "model .* must be a text"),
        ({"speculative_config": NGRAM | {"model": "sprout-draft"}}, "ngram reads no model"),
        ({"speculative_method": "draft_model", "num_speculative_tokens": 4}, "needs a model"),
        ({"speculative_config": {"method": "eagle3", "num_speculative_tokens": 4}}, "eagle3 needs a model"),
        ({"speculative_config": NGRAM | {"speculative_token_tree": [[0]]}}, "drafts chains"),
        (
            {"speculative_config": MEDUSA | {"speculative_token_tree": "[[0], [-1]]"}},
            "must be paths of ranks",
        ),
        (
            {"speculative_config": MEDUSA | {"speculative_token_tree": [[0], [1]]}},
            "has 2 nodes, but num_spec",
        ),
        ({"speculative_config": {"method": "ngram", "num_speculative_token": 4}}, "'num_speculative_tokens'"),
        ({"speculative_config": {"num_speculative_tokens": 4}}, "needs a method"),
        ({"speculative_config": '{"method"'}, "is no JSON"),
        ({"speculative_config": "[1]"}, "must be an object"),
        ({"speculative_config": {"method": "ngram"}}, r"must be in \[1, 64\]"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": "4"}}, "whole number"),
        ({"speculative_config": NGRAM | {"prompt_lookup_min": 4}}, "prompt_lookup_max is 3"),
        ({"speculative_config": NGRAM, "num_speculative_tokens": 3}, "leave out"),
    ],
    ids=str,
)
def test_mistakes_are_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(**options)


def test_an_unknown_method_is_named(tiny: Path) -> None:
    with pytest.raises(ValueError, match="speculative method 'ngrams'"):
        LLM(str(tiny), **BASE, speculative_method="ngrams", num_speculative_tokens=2)
