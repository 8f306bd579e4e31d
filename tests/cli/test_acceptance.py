"""What `bench` says of drafts."""

from __future__ import annotations

import pytest

from pellucid.cli.measure import Acceptance, expected_length


def test_the_mean_length_counts_the_models_own_token() -> None:
    figures = Acceptance(num_drafts=10, num_accepted=(5, 2)).figures()
    assert figures["mean_accepted_length"] == pytest.approx(1.7)
    assert figures["expected_accepted_length"] == pytest.approx(1.75)
    assert figures["acceptance_rates"] == [0.5, 0.2]


def test_without_drafts_there_is_nothing_to_say() -> None:
    assert set(Acceptance(num_drafts=0, num_accepted=()).figures().values()) == {None}


@pytest.mark.parametrize("rate,expected", [(0.0, 1.0), (0.5, 1.9375), (1.0, 5.0)])
def test_the_expected_length_of_four_drafts(rate: float, expected: float) -> None:
    assert expected_length(rate, 4) == pytest.approx(expected)
