"""Workloads are what their names promise."""

from __future__ import annotations

import argparse

import pytest

from pellucid.cli.main import build_parser
from pellucid.cli.workloads import Lengths, Workload, choose, nano


def chosen(*argv: str, seed: int = 0) -> list[Workload]:
    return choose(build_parser().parse_args(["bench", *argv]), seed)


def test_nano_is_nano_vllms_own_benchmark_to_the_token():
    workload = nano()
    assert (workload.num_prompt_tokens, workload.num_output_tokens) == (142_827, 133_966)
    assert len(workload.prompts) == len(workload.output_lens) == 256
    assert max(max(prompt) for prompt in workload.prompts) <= 10_000
    assert (min(workload.output_lens), max(workload.output_lens)) == (103, 1024)


def test_nano_is_the_default_and_cannot_be_bent():
    assert chosen("throughput") == [nano()]
    with pytest.raises(ValueError, match="--num-requests.*--workload random"):
        chosen("throughput", "--num-requests", "3")


def test_random_lengths_stay_in_their_ranges_and_follow_the_seed():
    arguments = [
        "throughput",
        "--workload",
        "random",
        "--num-requests",
        "50",
        "--input-len",
        "10:20",
        "--output-len",
        "7",
    ]
    (workload,) = chosen(*arguments)
    assert len(workload.prompts) == 50
    assert {len(prompt) for prompt in workload.prompts} <= set(range(10, 21))
    assert set(workload.output_lens) == {7}
    assert chosen(*arguments) == [workload]
    assert chosen(*arguments, seed=1) != [workload]


def test_latency_has_one_workload_a_batch_size_of_128_in_and_256_out():
    workloads = chosen("latency", "--batch-size", "1", "32")
    assert [workload.requests for workload in workloads] == [[(128, 256)], [(128, 256)] * 32]
    assert [workload.name for workload in workloads] == ["latency B=1", "latency B=32"]


def test_a_table_is_nano_three_latencies_and_prefill():
    names = [workload.name for workload in chosen("table")]
    assert names == ["nano", "latency B=1", "latency B=32", "latency B=256", "prefill"]
    with pytest.raises(SystemExit):
        chosen("table", "--input-len", "3")


def test_prefill_is_16_long_prompts_and_one_token_each():
    (workload,) = chosen("throughput", "--workload", "prefill")
    assert workload.requests == [(8000, 1)] * 16


def test_token_ids_are_folded_into_a_small_vocabulary():
    fitted = Workload("w", [[0, 99, 100, 250]], [1]).fitted(vocab_size=100, max_model_len=10)
    assert fitted.prompts == [[0, 99, 0, 50]]


def test_a_request_longer_than_the_context_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match="request of 8,001 tokens, max_model_len is 4,096"):
        chosen("throughput", "--workload", "prefill")[0].fitted(vocab_size=100, max_model_len=4096)


def test_a_warm_up_is_about_one_full_step():
    workload = Workload("w", [[1] * 60] * 5, [100, 2, 100, 100, 100])
    assert workload.warm_up(100).requests == [(60, 4), (60, 2)]


def test_lengths_are_one_number_or_a_range():
    assert Lengths.parse("7") == Lengths(low=7, high=7)
    assert Lengths.parse("7:9") == Lengths(low=7, high=9)


@pytest.mark.parametrize("text", ["0", "5:3", "x", "-1:4", "0:4"])
def test_lengths_that_are_none_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match=text):
        Lengths.parse(text)
