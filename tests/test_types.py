"""Sampling parameters: what is taken, and what is refused by its name and value."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from pellucid.sampling_params import SamplingParams


def test_one_string_stands_for_a_list_of_it() -> None:
    params = SamplingParams(stop="end", bad_words="hello")
    assert (params.stop, params.bad_words) == (["end"], ["hello"])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"n": None}, "n is None, must be an integer"),
        ({"top_k": None}, "top_k is None, must be an integer"),
        ({"min_tokens": None}, "min_tokens is None, must be an integer"),
        ({"max_tokens": "5"}, "max_tokens is '5', must be an integer"),
        ({"temperature": None}, "temperature is None, must be a number"),
        ({"ignore_eos": 1}, "ignore_eos is 1, must be True or False"),
        ({"stop": 5}, "stop is 5, must be a string or a list of strings"),
        ({"stop": 0}, "stop is 0, must be a string or a list of strings"),
        ({"stop": [5]}, "stop has 5, must be strings"),
        ({"bad_words": {"a": 1}}, r"bad_words is {'a': 1}, must be a list of strings"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5, must be a list of integer token ids"),
        ({"stop_token_ids": ["5"]}, "stop_token_ids has '5', must be integer token ids"),
        ({"allowed_token_ids": "5"}, "allowed_token_ids is '5', must be a list of integer token ids"),
        ({"stop_token_ids": (i for i in range(3))}, "stop_token_ids is <generator .* must be a list"),
        ({"stop_token_ids": b"12"}, "stop_token_ids is b'12', must be a list of integer token ids"),
        ({"stop_token_ids": np.array(5)}, r"stop_token_ids is array\(5\), must be a list"),
        ({"allowed_token_ids": [True]}, "allowed_token_ids has True, must be integer token ids"),
        ({"allowed_token_ids": np.array([0.5])}, r"allowed_token_ids has np.float64\(0.5\), must be integer"),
        ({"allowed_token_ids": np.array([[5]])}, r"allowed_token_ids has array\(\[5\]\), must be integer"),
        ({"allowed_token_ids": [None, 5]}, "allowed_token_ids has None, must be integer token ids"),
        ({"logit_bias": [1]}, r"logit_bias is \[1\], must be a dict from integer token ids to numbers"),
        ({"logit_bias": {1: "x"}}, "logit_bias of token 1 is 'x', must be a number"),
        ({"logit_bias": {1: None}}, "logit_bias of token 1 is None, must be a number"),
        ({"logit_bias": {"1": 2.0}}, "logit_bias has '1', must be integer token ids"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs is .* must be StructuredOutputsParams"),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_refused_by_its_field_and_value(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}"):
        SamplingParams(**wrong)


IDS = [[2, 1, 2], (1, 2), {1, 2}, frozenset((1, 2)), range(1, 3), np.array([2, 1]), {1: 0, 2: 0}.keys()]


@pytest.mark.parametrize("ids", IDS, ids=lambda ids: type(ids).__name__)
def test_token_ids_of_any_container_are_a_list_in_order_each_once(ids: Any) -> None:
    params = SamplingParams(stop_token_ids=ids, allowed_token_ids=ids)
    assert params.stop_token_ids == params.allowed_token_ids == [1, 2]
    assert {type(token) for token in params.stop_token_ids} == {int}


def test_what_holds_texts_may_be_any_container_too() -> None:
    params = SamplingParams(stop={"b", "a"}, bad_words=np.array(["no", "never"]))  # type: ignore[arg-type]
    assert (params.stop, params.bad_words) == (["a", "b"], ["no", "never"])
    assert {type(text) for text in params.bad_words or ()} == {str}


def test_every_number_is_pythons_own() -> None:
    numbers = {name: np.int64(2) for name in ("n", "top_k", "seed", "min_tokens", "logprobs")}
    numbers |= {"max_tokens": np.uint8(9), "prompt_logprobs": np.int32(1), "temperature": np.float32(0.5)}
    numbers |= {"top_p": np.float64(0.5), "min_p": 0, "presence_penalty": Fraction(1, 2)}
    numbers |= {"frequency_penalty": np.float16(1), "repetition_penalty": 2}
    params = SamplingParams(**numbers, logit_bias={np.int64(1): np.float32(2), 5: 3})  # type: ignore[arg-type]
    for name, value in numbers.items():
        assert getattr(params, name) == value and type(getattr(params, name)) in (int, float), name
    assert json.dumps(params.logit_bias) == '{"1": 2.0, "5": 3.0}'
    assert hash(tuple(getattr(params, name) for name in numbers))


def test_a_list_that_its_giver_changes_stays_as_it_was_given() -> None:
    ids, biases = [1, 2], {1: 0.5}
    params = SamplingParams(allowed_token_ids=ids, logit_bias=biases)
    ids.append(10**9)
    biases[2] = 1000.0
    assert (params.allowed_token_ids, params.logit_bias) == ([1, 2], {1: 0.5})


def test_nothing_stays_nothing() -> None:
    names = ("seed", "max_tokens", "logprobs", "prompt_logprobs", "stop", "stop_token_ids", "logit_bias")
    params = SamplingParams(**dict.fromkeys(names))
    assert all(getattr(params, name) is None for name in names)
