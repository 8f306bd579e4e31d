"""Sampling parameters: what is taken, and what is refused by its name and value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pellucid.types import SamplingParams


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


@pytest.mark.parametrize(
    "right",
    [
        {"n": np.int64(2), "top_k": np.int32(5), "seed": np.int64(2**40), "min_tokens": np.uint8(1)},
        {"temperature": np.float32(0.5), "top_p": np.float64(0.5), "presence_penalty": 1},
        {"stop": ("a", "b"), "stop_token_ids": {1, 2}, "allowed_token_ids": range(5)},
        {"stop_token_ids": [np.int64(7)], "logit_bias": {np.int64(1): np.float32(2)}},
        {"seed": None, "max_tokens": None, "logprobs": None, "prompt_logprobs": None, "stop": None},
    ],
)
def test_numpys_numbers_and_other_lists_are_taken(right: dict[str, Any]) -> None:
    params = SamplingParams(**right)
    assert all(getattr(params, name) == value for name, value in right.items())
