"""Acceptance by chance: at the rates that were asked for, and marked as what it is wherever it shows."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from pellucid import LLM, SamplingParams
from pellucid.config import SpeculativeConfig
from tests.llm.test_invariance import BASE, NGRAM

SYNTHETIC = NGRAM | {"rejection_sample_method": "synthetic"}
RATES = [0.8, 0.5, 0.5, 0.1]


def accepted(tiny: Path, speculative: dict[str, object], **sampling: object) -> list[float]:
    """The share of verifications in which the first, the first two, .. drafts stood."""
    params = [SamplingParams(max_tokens=80, ignore_eos=True, seed=i, **sampling) for i in range(40)]
    with LLM(str(tiny), **BASE, depth=2, speculative_config=speculative) as llm:
        outputs = llm.generate([[i + 1, 5] for i in range(40)], params, use_tqdm=False)
        stats = llm.llm_engine.stats
    assert all(len(output.outputs[0].token_ids) == 80 for output in outputs)
    assert stats.is_synthetic
    return [num / stats.num_drafts for num in stats.num_accepted_per_position]


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "top_k": 5}], ids=str)
def test_drafts_stand_at_the_given_rates(tiny: Path, sampling: dict) -> None:
    rates = accepted(tiny, SYNTHETIC | {"synthetic_acceptance_rates": RATES}, **sampling)
    assert rates == pytest.approx(RATES, abs=0.05)  # of over 1,000 verifications


def test_nothing_stands_at_rate_0_even_if_it_is_right(tiny: Path) -> None:
    speculative = SYNTHETIC | {"synthetic_acceptance_rates": [1, 0, 0, 0]}
    same = {"temperature": 0, "logit_bias": {40: 90.0}}  # every look-up is right
    rates = accepted(tiny, speculative, **same)
    assert rates[1:] == [0, 0, 0] and rates[0] > 0.95  # but for texts that end


def test_a_length_is_kept_with_the_least_variance() -> None:
    config = SpeculativeConfig(
        method="ngram", num_speculative_tokens=4, rejection_sample_method="synthetic",
        synthetic_acceptance_length=2.6,
    )  # fmt: skip
    assert config.acceptance_rates == pytest.approx((1, 0.6, 0, 0))
    assert 1 + sum(config.acceptance_rates) == pytest.approx(2.6)


def test_it_is_told_at_the_start(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING),
        LLM(str(tiny), **BASE, speculative_config=SYNTHETIC | {"synthetic_acceptance_length": 3}) as llm,
    ):
        assert llm.llm_engine.stats.is_synthetic
    assert "synthetic acceptance (100%, 100%, 0%, 0%)" in caplog.text


@pytest.mark.parametrize(
    "options,message",
    [
        ({}, "needs synthetic_acceptance_rates or synthetic_acceptance_length"),
        ({"synthetic_acceptance_rates": RATES, "synthetic_acceptance_length": 2}, "one of them"),
        ({"synthetic_acceptance_rates": RATES[:3]}, "a list of 4 numbers"),
        ({"synthetic_acceptance_rates": RATES[::-1]}, "none above the one before"),
        ({"synthetic_acceptance_rates": 0.5}, "must be a list"),
        ({"synthetic_acceptance_length": 5.5}, r"number in \[1, 5\]"),
        ({"synthetic_acceptance_length": 2, "rejection_sample_method": "strict"}, "means nothing without"),
        (
            {"synthetic_acceptance_length": 2, "rejection_sample_method": "synthetics"},
            "means nothing without",
        ),
    ],
    ids=str,
)
def test_mistakes_are_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig(**(SYNTHETIC | options))


def test_an_unknown_method_is_named(tiny: Path) -> None:
    with pytest.raises(ValueError, match="rejection_sample_method 'strickt'; did you mean 'strict'"):
        LLM(str(tiny), **BASE, speculative_config=NGRAM | {"rejection_sample_method": "strickt"})
