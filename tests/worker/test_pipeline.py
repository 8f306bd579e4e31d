"""Stages that run as late as they may give the tokens of a model in one piece.  All in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from pellucid import LLM, SamplingParams
from pellucid.graphs.launch import EagerLauncher, GraphLauncher
from pellucid.worker.results import Packed
from pellucid.worker.worker import Worker
from tests.graphs.test_graphs import recorded_shapes
from tests.llm.test_invariance import BASE, NGRAM, random_requests, run
from tests.models import parallel
from tests.spec.toy import tree_config
from tests.tiny import write_checkpoint
from tests.worker.pipeline import LazyPipeline

Requests = tuple[list[list[int]], list[SamplingParams], list[list[int]]]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five layers."""
    return write_checkpoint(tmp_path_factory.mktemp("deep"), num_hidden_layers=5)


@pytest.fixture(scope="module")
def whole(deep: Path) -> Requests:
    prompts, params = random_requests(24, seed=5)
    return prompts, params, run(deep, prompts, params)


COMPANIES = {
    "two stages": {"pipeline_parallel_size": 2},
    "five stages": {"pipeline_parallel_size": 5},
    "cut by hand": {"pipeline_parallel_size": 3, "pipeline_split": "1,3,1"},
    "one plan more than stages": {"pipeline_parallel_size": 2, "depth": 3},
    "one plan at a time, few slots, small chunks": {
        "pipeline_parallel_size": 3,
        "depth": 1,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 16,
    },
    "small chunks, no prefix cache": {
        "pipeline_parallel_size": 3,
        "max_num_batched_tokens": 24,
        "enable_prefix_caching": False,
    },
    "a pool that runs dry": {"pipeline_parallel_size": 3, "depth": 4, "num_gpu_blocks_override": 17},
    "few slots": {"pipeline_parallel_size": 2, "max_num_seqs": 3},
    "drafts": {"pipeline_parallel_size": 3, "depth": 4, "speculative_config": NGRAM},
    "drafts on a pool that runs dry": {
        "pipeline_parallel_size": 2,
        "depth": 3,
        "speculative_config": NGRAM,
        "max_num_batched_tokens": 40,
        "num_gpu_blocks_override": 17,
    },
}


@pytest.mark.parametrize("options", COMPANIES.values(), ids=COMPANIES.keys())
def test_stages_give_the_tokens_of_the_whole(deep: Path, whole: Requests, options: dict) -> None:
    prompts, params, expected = whole
    options = {"num_gpu_blocks_override": 400} | options
    assert run(deep, prompts, params, executor="lazy", **options) == expected


@pytest.mark.parametrize("num_blocks", [400, 20])
def test_stages_move_the_kv_of_accepted_branches(deep: Path, whole: Requests, num_blocks: int) -> None:
    """In a small pool a sequence may have to leave before it is known which branch was right."""
    prompts, params, expected = whole
    texts = [prompt + answer for prompt, answer in zip(prompts, expected, strict=True)]
    options = {"pipeline_parallel_size": 3, "depth": 4, "num_gpu_blocks_override": num_blocks}
    trees = tree_config((0, 0, 1, 1, 2, 3, 4), texts)
    assert run(deep, prompts, params, executor="lazy", speculative_config=trees, **options) == expected


def test_stages_give_the_logprobs_of_the_whole(deep: Path) -> None:
    """To the bit, as long as the steps are of the same rows."""
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=8, logprobs=3, prompt_logprobs=2)
    prompt = list(range(5, 60))

    def logprobs(**options: object) -> tuple[object, object]:
        with LLM(str(deep), **(BASE | {"num_gpu_blocks_override": 20} | options)) as llm:
            (output,) = llm.generate([prompt], params, use_tqdm=False)
        return output.prompt_logprobs, output.outputs[0].logprobs

    assert logprobs(executor="lazy", pipeline_parallel_size=3) == logprobs()


def test_so_do_stages_of_a_family_whose_layers_hand_on_the_whole_stream(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, architectures=[parallel.ARCHITECTURE], num_hidden_layers=3)
    prompts, params = random_requests(12, seed=7)
    options = {"executor": "lazy", "pipeline_parallel_size": 2, "num_gpu_blocks_override": 400}
    assert run(folder, prompts, params, **options) == run(folder, prompts, params)


Yield = Tensor | Packed | tuple  # a tuple is what the first half of a step hands to the second


def replay_in_place(run: Callable[[], Yield]) -> Callable[[], Yield]:
    """As a CUDA graph does: what other stages are sent is overwritten by the next replay."""
    if isinstance(first := run(), tuple):
        return run
    buffer = for_others(first)

    def replay() -> Yield:
        yielded = run()
        assert not isinstance(yielded, tuple)
        buffer.copy_(for_others(yielded))
        return replace(yielded, feedback=buffer) if isinstance(yielded, Packed) else buffer

    return replay


def for_others(yielded: Tensor | Packed) -> Tensor:
    sent = yielded.feedback if isinstance(yielded, Packed) else yielded
    assert sent is not None
    return sent


def record(worker: Worker) -> None:
    """Let the worker replay its steps on static buffers, padded to the next recorded number of rows."""
    eager, runner = worker.runner.launcher, worker.runner
    assert isinstance(eager, EagerLauncher)
    shapes = recorded_shapes(worker)
    runner.launcher = GraphLauncher(eager, shapes, runner.state, runner.features, lambda: replay_in_place)
    runner.launcher.capture()


@pytest.mark.parametrize("drafts", [{}, {"speculative_config": NGRAM}], ids=["no drafts", "drafts"])
def test_recorded_steps_hand_over_as_well(deep: Path, drafts: dict) -> None:
    prompts, params = random_requests(24, seed=6)
    plain = [SamplingParams(temperature=p.temperature, seed=p.seed, max_tokens=p.max_tokens) for p in params]
    expected = run(deep, prompts, plain)
    options = BASE | drafts | {"max_num_seqs": 20, "num_gpu_blocks_override": 400, "depth": 4}
    with LLM(str(deep), executor="lazy", pipeline_parallel_size=3, **options) as llm:
        executor = llm.llm_engine.engine.executor
        assert isinstance(executor, LazyPipeline)
        for worker in executor.workers:
            record(worker)
        outputs = llm.generate(prompts, plain, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
