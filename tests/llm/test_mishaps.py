"""What goes wrong around an engine must not stay in it: interruptions, wrong types, ids used again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pellucid import LLM, SamplingParams
from pellucid.executor.local import LocalExecutor
from pellucid.graphs.launch import EagerLauncher
from pellucid.worker.inputs import StepCounts
from pellucid.worker.results import Packed
from tests.engine.test_interrupts import Places

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = [3 + i * 37 % 300 for i in range(100)]


@pytest.fixture
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(str(tiny), dtype="float32", device="cpu", block_size=16, check_invariants=True) as llm:
        yield llm


def tokens(llm: LLM, prompt: list[int], sampling: SamplingParams = GREEDY) -> list[int]:
    return llm.generate(prompt, sampling, use_tqdm=False)[0].outputs[0].token_ids


def test_an_interruption_within_a_forward_leaves_the_engine_as_it_was(llm: LLM) -> None:
    expected = tokens(llm, PROMPT)
    llm.reset_prefix_cache()
    executor = llm.llm_engine.engine.executor
    assert isinstance(executor, LocalExecutor)
    runner = executor.worker.runner
    launcher = runner.launcher

    class Interrupted(EagerLauncher):
        def __call__(self, counts: StepCounts) -> Packed:
            runner.launcher = launcher
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
            return launcher(counts)

    assert isinstance(launcher, EagerLauncher)
    runner.launcher = Interrupted(launcher.step, launcher.inputs)
    num_steps = llm.llm_engine.stats.num_steps
    with pytest.raises(KeyboardInterrupt):
        tokens(llm, PROMPT)
    assert llm.llm_engine.stats.num_steps - num_steps <= 2, "it was let through late"
    assert llm.llm_engine.stats.num_running == 0 and llm.llm_engine.is_finished()
    assert tokens(llm, PROMPT) == expected
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interruption_while_prompts_are_queued_leaves_none_of_them(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = llm.llm_engine
    queue = engine.queue

    def interrupted(*args: object, **kwargs: object) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        return queue(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "queue", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPT, GREEDY, use_tqdm=False)
    assert engine.is_finished()


def test_ctrl_c_anywhere_in_a_step_loses_no_output(llm: LLM) -> None:
    engine = llm.llm_engine

    def run(places: Places) -> tuple[list[list[int]], int]:
        ids = [engine.add_request([3, 5, number], GREEDY.clone(max_tokens=3)) for number in range(2)]
        ends: dict[str, list[int]] = {}
        num_interrupted = 0
        while not engine.is_finished():
            try:
                with places.watched():
                    outputs = engine.step()
                ends |= {output.request_id: output.outputs[0].token_ids for output in outputs}
            except KeyboardInterrupt:
                num_interrupted += 1
        return [ends[request_id] for request_id in ids], num_interrupted

    run(Places())  # which imports and remembers what later ones need not
    everywhere = Places()
    expected, _ = run(everywhere)
    for chosen in range(1, everywhere.num * 9 // 10, everywhere.num // 25):
        assert run(Places(chosen)) == (expected, 1), f"interrupted at place {chosen}"


def test_an_abort_that_is_cut_short_leaves_no_reader(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_short(ids: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm, "_abort_all", cut_short)
    outputs = llm.stream({"prompt_token_ids": PROMPT}, GREEDY)
    next(outputs)
    with pytest.raises(KeyboardInterrupt):
        outputs.close()
    assert not llm._readers
    monkeypatch.undo()
    assert tokens(llm, PROMPT) == tokens(llm, PROMPT)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 2.5},
        {"seed": 1.5},
        {"top_k": 2.0},
        {"n": "2"},
        {"n": True},
        {"ignore_eos": 1},
        {"min_tokens": 2**63, "max_tokens": None},
        {"temperature": 10**400},
        {"stop": "\ud83d"},
        {"temperature": "hot"},
        {"stop": [1]},
        {"logit_bias": {"5": 1}},
        {"repetition_penalty": float("nan")},
        {"repetition_penalty": float("inf")},
    ],
)
def test_a_parameter_of_a_wrong_type_is_a_value_error(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [None, 5, {3, 4}, {"text": 1}.keys(), iter([3, 4]), np.array(5)])
def test_prompts_without_an_order_are_a_value_error(llm: LLM, wrong: Any) -> None:
    with pytest.raises(ValueError, match="prompts is .*, must be"):
        llm.generate(wrong, GREEDY)
    assert len(llm.generate(np.array([PROMPT, PROMPT]), GREEDY, use_tqdm=False)) == 2  # type: ignore[arg-type]


def test_so_is_what_is_no_list_of_messages_and_what_are_no_parameters(llm: LLM) -> None:
    wrong: Any
    for wrong in (None, iter([]), {3}):
        with pytest.raises(ValueError, match="messages is a"):
            llm.chat(wrong)
    for wrong in ({"max_tokens": 3}, [5]):
        with pytest.raises(ValueError, match="must be SamplingParams"):
            llm.generate([PROMPT], wrong)


def test_numpys_integers_are_integers(llm: LLM) -> None:
    ids = list(np.array(PROMPT))
    assert tokens(llm, ids) == tokens(llm, PROMPT)
    (output,) = llm.generate([ids], SamplingParams(n=2, seed=np.int64(5), max_tokens=2), use_tqdm=False)  # type: ignore[arg-type]
    assert len(output.outputs) == 2


def test_all_slots_that_fit_in_memory_have_room_for_their_whole_length(tiny: Path) -> None:
    with LLM(str(tiny), device="cpu", max_num_seqs=1, max_model_len=100) as llm:
        assert llm.llm_engine.capacity.max_model_len == 100


def test_an_id_that_a_stop_string_has_freed_may_be_used_again_at_once(llm: LLM) -> None:
    engine = llm.llm_engine
    (free,) = llm.generate("the quick", GREEDY.clone(max_tokens=20), use_tqdm=False)
    stop = free["text"][:3]
    assert isinstance(stop, str)
    ends = []
    for sampling in (GREEDY.clone(max_tokens=20, stop=[stop]), GREEDY):
        engine.add_request("the quick", sampling, request_id="again")
        while not ends or not ends[-1].finished:
            ends += engine.step()
        ends.append(ends[-1]) if sampling is GREEDY else ends.clear()
    assert ends[-1].outputs[0].finish_reason == "length" and len(ends[-1].outputs[0].token_ids) == 8


def test_an_id_in_use_is_refused_whatever_n_and_nothing_stays_behind(llm: LLM) -> None:
    engine = llm.llm_engine
    engine.add_request("the quick", GREEDY, request_id="a")
    with pytest.raises(ValueError, match="request id 'a' is already running"):
        engine.add_request("the quick", GREEDY.clone(n=2), request_id="a")
    engine.add_request("the quick", GREEDY.clone(n=2), request_id="b")
    engine.add_request("the quick", GREEDY, request_id="b_1")
    ended = {}
    while not engine.is_finished():
        ended |= {output.request_id: len(output.outputs) for output in engine.step() if output.finished}
    assert ended == {"a": 1, "b": 2, "b_1": 1}


def test_parameters_changed_after_a_request_was_added_do_not_change_it(llm: LLM) -> None:
    engine, sampling = llm.llm_engine, GREEDY.clone()
    first = engine.add_request("the quick", sampling)
    sampling.max_tokens = 3
    engine.add_request("the quick", sampling)
    lengths = {}
    while not engine.is_finished():
        lengths |= {output.request_id: len(output.outputs[0].token_ids) for output in engine.step()}
    assert lengths.pop(first) == 8 and list(lengths.values()) == [3]


def test_shutting_down_twice_is_shutting_down(tiny: Path) -> None:
    with LLM(str(tiny), device="cpu", max_model_len=64) as llm:
        llm.shutdown()


def test_to_abort_thousands_of_prompts_takes_no_longer_than_to_add_them(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = [time.thread_time()]

    def interrupted() -> None:
        times.append(time.thread_time())
        raise KeyboardInterrupt

    monkeypatch.setattr(llm, "_step_until", lambda arrived: interrupted())
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[3, 5, 7]] * 8000, GREEDY, use_tqdm=False)
    times.append(time.thread_time())
    to_add, to_abort = times[1] - times[0], times[2] - times[1]
    assert llm.llm_engine.is_finished()
    assert to_abort < 4 * to_add, f"{to_abort:.2f} s, and {to_add:.2f} s to add them"
