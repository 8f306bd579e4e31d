"""The step by which a GPU's memory is measured leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

from pellucid import LLM, SamplingParams
from pellucid.executor.local import LocalExecutor
from pellucid.worker.warm_up import largest_step

OPTIONS = {
    "dtype": "float32",
    "device": "cpu",
    "block_size": 16,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
}


def test_a_first_plan_of_the_same_shape_is_not_taken_for_it(tiny: Path) -> None:
    prompts = [[i + 1] * 16 for i in range(4)]  # as many rows of as many tokens as the largest step has
    sampling = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    with LLM(str(tiny), **OPTIONS) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, sampling, use_tqdm=False)]
    with LLM(str(tiny), **OPTIONS) as llm:
        executor = llm.llm_engine.engine.executor
        assert isinstance(executor, LocalExecutor)
        plan = largest_step(executor.worker.resolved, 1, executor.worker.runner.features.eager_bits)
        executor.worker.runner.execute(plan).result()
        executor.worker.runner.slots.retire(plan.rows.slots.tolist())
        tokens = [o.outputs[0].token_ids for o in llm.generate(prompts, sampling, use_tqdm=False)]
    assert tokens == expected
