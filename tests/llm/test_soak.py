"""Random requests with random aborts on a pool that is too small: all are answered, none leaks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pellucid import LLMEngine, SamplingParams


@pytest.mark.parametrize("num", [250, pytest.param(1000, marks=pytest.mark.matrix)])
def test_every_request_is_answered_and_no_block_is_lost(tiny: Path, num: int) -> None:
    rng = random.Random(0)
    engine = LLMEngine.from_options(
        model=str(tiny),
        dtype="float32",
        device="cpu",
        block_size=16,
        num_gpu_blocks_override=17,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        depth=2,
        check_invariants=True,
        scheduling_policy="priority",
    )
    prefixes = [[rng.randrange(1, 320) for _ in range(48)] for _ in range(5)]
    running: list[str] = []
    answers: dict[str, str] = {}
    num_added = 0
    while num_added < num or not engine.is_finished():
        while num_added < num and len(running) < 30:
            prompt = rng.choice(prefixes)[: rng.randint(0, 48)] + [
                rng.randrange(320) for _ in range(rng.randint(1, 60))
            ]
            params = SamplingParams(
                max_tokens=rng.randint(1, 60),
                temperature=rng.choice([0.0, 0.9]),
                top_k=rng.choice([0, 5]),
                logprobs=rng.choice([None, None, 2]),
                prompt_logprobs=rng.choice([None, None, None, 0]),
                stop=rng.choice([None, None, ["a"]]),
            )
            running.append(engine.add_request(prompt, params, priority=rng.randint(0, 2)))
            num_added += 1
        if running and rng.random() < 0.1:
            engine.abort(rng.choice(running))
        for output in engine.step():
            if output.finished:
                assert output.request_id not in answers, "answered twice"
                answers[output.request_id] = output.outputs[0].finish_reason or ""
                running.remove(output.request_id)
    assert len(answers) == num
    assert set(answers.values()) == {"stop", "length", "abort"}
    scheduler = engine.engine.scheduler
    assert engine.stats.num_preemptions > num // 10, "the pool was not too small"
    assert scheduler.kv.usage == 0 and scheduler.kv.pool.num_pages == 17
    assert scheduler.num_running == scheduler.num_waiting == 0
    engine.shutdown()
