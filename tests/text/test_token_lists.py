"""What a request lists of tokens: at most so many, and never so that none could come."""

from __future__ import annotations

from typing import Any

import pytest

from pellucid.sampling_params import SamplingParams
from pellucid.text.token_lists import check_leaves_a_token, check_lists

Case = tuple[dict[str, Any], list[int], list[tuple[int, ...]]]  # parameters, what ends texts, bad words


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (({"logit_bias": dict.fromkeys(range(5), 1)}, [], []), "logit_bias has 5 tokens"),
        (({}, [], [(1, 2, 3), (4, 5)]), "bad_words has 5 tokens"),
        (({"min_tokens": 1}, [1, 2, 3, 4, 5], []), "stop_token_ids has 5 tokens"),
    ],
)
def test_too_long_a_list_is_refused_by_its_field_and_the_bounds_name(case: Case, words: str) -> None:
    params, ends, bad = case
    sampling = SamplingParams(**params)
    with pytest.raises(ValueError, match=f"{words}, max_listed_tokens is 4; .* --max-listed-tokens"):
        check_lists(sampling, stop_token_ids=ends, bad_words=bad, max_listed=4)
    check_lists(sampling, stop_token_ids=ends, bad_words=bad, max_listed=5)


def test_what_no_memory_is_needed_for_has_no_bound() -> None:
    sampling = SamplingParams(allowed_token_ids=list(range(9)))
    check_lists(sampling, stop_token_ids=range(9), bad_words=[], max_listed=1)  # without min_tokens


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (({"allowed_token_ids": [5], "min_tokens": 2}, [5], []), r"min_tokens=2 holds .*_ids=\[5\]"),
        (({"allowed_token_ids": [5, 6]}, [], [(5,), (6,)]), r"bad_words holds .* allowed_token_ids=\[5, 6\]"),
        (
            ({"allowed_token_ids": [5, 6], "min_tokens": 1}, [6, 8], [(5,), (7,)]),
            r"min_tokens=1 and bad_words holds .*=\[5, 6\]; .* leave one of them out",
        ),
        (({}, [], [(i,) for i in range(10)]), "bad_words holds back all of the vocabulary"),
    ],
)  # fmt: skip
def test_what_rules_out_every_token_is_refused_by_its_fields(case: Case, words: str) -> None:
    params, ends, bad = case
    with pytest.raises(ValueError, match=words):
        check_leaves_a_token(SamplingParams(**params), stop_token_ids=ends, bad_words=bad, vocab_size=10)


@pytest.mark.parametrize(
    "case",
    [
        ({"allowed_token_ids": [5]}, [5], []),  # it ends the text at once, as it may
        ({"allowed_token_ids": [5, 6], "min_tokens": 2}, [5], []),
        ({"allowed_token_ids": [5]}, [], [(5, 5)]),  # behind some text only
        ({"min_tokens": 2}, [0], [(i,) for i in range(1, 9)]),
        ({"logit_bias": {5: -100}, "allowed_token_ids": [5]}, [], []),
    ],
)
def test_what_leaves_a_token_passes(case: Case) -> None:
    params, ends, bad = case
    check_leaves_a_token(SamplingParams(**params), stop_token_ids=ends, bad_words=bad, vocab_size=10)
