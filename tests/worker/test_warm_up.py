"""The steps that are run before any request leave nothing behind, and are of every kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pellucid import LLM, SamplingParams
from pellucid.executor.local import LocalExecutor
from pellucid.resolve import Resolved
from pellucid.worker.warm_up import MOST_DRAWN, MOST_ROWS, around_powers_of_two, warm_up_steps
from pellucid.worker.worker import Worker
from tests.kernels.test_compile import run
from tests.spec.toy import tree_config

OPTIONS = {
    "dtype": "float32",
    "device": "cpu",
    "block_size": 16,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 64,
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


def tree() -> dict:
    return tree_config((0, 0, 1, 1, 2), [list(range(40))])  # there is one kind of tree at a time


def worker_of(llm: LLM) -> Worker:
    executor = llm.llm_engine.engine.executor
    assert isinstance(executor, LocalExecutor)
    return executor.worker


def given(worker: Worker) -> tuple[Resolved, int, int]:
    return worker.resolved, worker.layout.pages_a_block, worker.runner.features.eager_bits


@pytest.mark.parametrize("drafts", [dict, lambda: NGRAM, tree], ids=["none", "chain", "tree"])
def test_warm_up_steps_run_and_are_forgotten(tiny: Path, drafts: Callable[[], dict]) -> None:
    options = OPTIONS | {"speculative_config": drafts()}
    prompts = [[i + 1] * (5 * i + 1) for i in range(6)]
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def tokens(llm: LLM) -> list[list[int]]:
        return [o.outputs[0].token_ids for o in llm.generate(prompts, sampling, use_tqdm=False)]

    with LLM(str(tiny), **options) as llm:
        expected = tokens(llm)
    with LLM(str(tiny), **options) as llm:
        worker = worker_of(llm)
        for plan in warm_up_steps(*given(worker)):
            worker._try(plan)
        assert tokens(llm) == expected


def test_warm_up_steps_fit_and_differ(tiny: Path) -> None:
    with LLM(str(tiny), **OPTIONS, speculative_config=NGRAM) as llm:
        worker = worker_of(llm)
        plans = list(warm_up_steps(*given(worker)))
    sums = [sum(row.num_query for row in plan.rows) for plan in plans]
    assert max(sums) <= 64 and max(len(plan.rows) for plan in plans) == 6
    kinds = {tuple((row.num_query, row.num_draft) for row in plan.rows) for plan in plans}
    assert {
        ((1, 0),),
        ((1, 0),) * 6,
        ((4, 3),) * 6,
        ((2, 1),),
        ((64, 0),),
        ((1, 0), (16, 0), (16, 0)),
        ((1, 0),) * 5 + ((2, 0),),
    } <= kinds


def test_steps_are_of_every_size_where_texts_are_short(tiny: Path) -> None:
    with LLM(str(tiny), **OPTIONS, max_model_len=12) as llm:
        plans = list(warm_up_steps(*given(worker_of(llm))))
    assert {plan.num_tokens for plan in plans} >= set(around_powers_of_two(64))
    assert max(row.num_query for plan in plans for row in plan.rows) == 11


def test_torch_looks_nowhere_else_where_kernels_have_written_nothing(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    done = run("tests.worker.warm_up", str(tmp_path / "tiny"), cache=tmp_path)
    assert done.returncode == 0, done.stderr
    noted = dict(line.split(": ") for line in done.stdout.splitlines())
    assert len(noted) >= 14 and all(int(number) > 10 for number in noted.values()), noted


def test_sizes_are_of_every_class() -> None:
    assert around_powers_of_two(1) == [1]
    assert around_powers_of_two(11) == [1, 2, 3, 4, 5, 8, 9, 11]


def test_as_many_rows_are_warmed_up_as_attention_has_variants_for() -> None:
    """With one KV head, which makes as many pairs as there are rows."""
    decode = pytest.importorskip("pellucid.kernels.attention.decode_attention")
    tables = (decode.CUTS, decode.TILES, decode.VERIFYING_TILES, decode.FP8_TILES)
    most = max(num_pairs for table in tables for num_pairs in table)
    assert max(most + 1, decode.MIN_PAIRS_BY_LINES) <= MOST_ROWS


def test_as_many_rows_are_warmed_up_as_the_draw_has_variants_for() -> None:
    assert pytest.importorskip("pellucid.kernels.sampling.sample").FEW_ROWS < MOST_DRAWN
