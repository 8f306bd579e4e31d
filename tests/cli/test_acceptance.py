"""What `bench` says of drafts."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from pellucid.cli.measure import Acceptance, expected_length
from pellucid.observe.statistics import EngineStats
from pellucid.sleep.state import AWAKE


def stats(num_drafts: int, num_tokens: int, num_accepted: int, per_position: tuple[int, ...]) -> EngineStats:
    rest = dict.fromkeys((f.name for f in fields(EngineStats)), 0) | {
        "is_synthetic": False,
        "sleep": AWAKE,
        "of_features": {},
    }
    drafts = {
        "num_drafts": num_drafts,
        "num_draft_tokens": num_tokens,
        "num_accepted_tokens": num_accepted,
        "num_accepted_per_position": per_position,
    }
    return EngineStats(**(rest | drafts))  # type: ignore[arg-type]


def acceptance(num_drafts: int, *per_position: int) -> Acceptance:
    nothing = stats(0, 0, 0, (0,) * len(per_position))
    return Acceptance.between(nothing, stats(num_drafts, 2 * num_drafts, sum(per_position), per_position))


def test_the_mean_length_counts_the_models_own_token() -> None:
    figures = acceptance(10, 5, 2).figures()
    assert figures["mean_accepted_length"] == pytest.approx(1.7)
    assert figures["expected_accepted_length"] == pytest.approx(1.75)
    assert figures["acceptance_rates"] == [0.5, 0.2]


def test_without_drafts_there_is_nothing_to_say() -> None:
    figures = acceptance(0).figures()
    assert (figures["mean_accepted_length"], figures["acceptance_rates"]) == (None, None)


def test_a_run_is_what_was_counted_since_the_one_before() -> None:
    before, after = stats(4, 10, 5, (3, 2)), stats(10, 22, 9, (5, 4))
    assert Acceptance.between(before, after).counters == {
        "spec_decode_num_drafts": 6,
        "spec_decode_num_draft_tokens": 12,
        "spec_decode_num_accepted_tokens": 4,
        "spec_decode_num_accepted_tokens_per_pos": [2, 2],
    }
    assert Acceptance.between(before, replace(after, is_synthetic=True)).figures()["is_synthetic"]


@pytest.mark.parametrize("rate,expected", [(0.0, 1.0), (0.5, 1.9375), (1.0, 5.0)])
def test_the_expected_length_of_four_drafts(rate: float, expected: float) -> None:
    assert expected_length(rate, 4) == pytest.approx(expected)
