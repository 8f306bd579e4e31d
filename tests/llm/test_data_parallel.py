"""Several engines behind one router: the tokens of one, and an end that takes nobody else along."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pellucid import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from pellucid.cluster.line import Line
from pellucid.router import replicas
from pellucid.router.replicas import Replicas
from pellucid.text.outputs import OutputKind
from pellucid.types import Request
from tests.executor.fragile import FATAL
from tests.llm.test_invariance import BASE, random_requests
from tests.patience import PATIENCE, eventually
from tests.processes import members

pytestmark = pytest.mark.usefixtures("forked_members")

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def pair(tiny: Path) -> Iterator[LLM]:
    with LLM(str(tiny), data_parallel_size=2, executor="fragile", **BASE) as llm:
        yield llm


def engines_of(llm: LLM) -> Replicas:
    assert isinstance(llm.llm_engine.engine, Replicas)
    return llm.llm_engine.engine


def has_spoken(line: Line) -> bool:
    """Is there something to receive?"""
    return bool(select.select([line], [], [], 0)[0])


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def test_two_engines_say_what_one_says_and_share_the_work(pair: LLM, tiny: Path) -> None:
    prompts, params = random_requests(40, seed=5)
    params[7] = SamplingParams(n=3, max_tokens=9)  # seeds that the front end draws
    params[8] = SamplingParams(stop=[" "], max_tokens=60)
    with LLM(str(tiny), **BASE) as one:  # beside the other two
        expected = one.generate(prompts, params, use_tqdm=False)
    outputs = pair.generate(prompts, params, use_tqdm=False)
    assert tokens(outputs) == tokens(expected)
    assert [output.outputs[0].text for output in outputs] == [output.outputs[0].text for output in expected]
    assert [output.prompt_logprobs for output in outputs] == [e.prompt_logprobs for e in expected]
    total, each = pair.llm_engine.stats, pair.llm_engine.stats_per_engine
    work = [stats.num_sampled_tokens for stats in each]
    assert max(work) < 1.3 * min(work)
    assert total.num_sampled_tokens == sum(work) and total.num_steps == sum(s.num_steps for s in each)
    assert total.kv_usage == 0 and pair.llm_engine.is_finished()
    assert engines_of(pair).router.loads == [0, 0]


def test_requests_go_where_their_prefix_is_until_it_is_forgotten(pair: LLM) -> None:
    prompt = list(range(100))

    def ask() -> RequestOutput:
        return pair.generate([prompt], SHORT, use_tqdm=False)[0]

    def asked() -> list[int]:
        return [stats.num_prompt_tokens for stats in pair.llm_engine.stats_per_engine]

    before = asked()
    outputs = [ask() for _ in range(5)]
    pair.reset_prefix_cache()
    outputs.append(ask())  # it is the other one's turn
    assert [output.num_cached_tokens for output in outputs] == [0, 96, 96, 96, 96, 0]
    assert sorted(b - a for a, b in zip(before, asked(), strict=True)) == [100, 500]
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1


def test_leaving_a_stream_aborts_its_request(pair: LLM) -> None:
    stream = pair.stream("the", LONG)
    next(stream)
    stream.close()
    assert pair.llm_engine.is_finished() and pair.llm_engine.stats.num_running == 0


def test_an_event_loop_can_wait_for_the_engines(pair: LLM) -> None:
    engine = engines_of(pair)
    (expected,) = pair.generate(["fox"], SHORT, use_tqdm=False)
    pair.llm_engine.add_request("fox", SHORT)

    async def follow() -> list[int]:
        loop, spoken, received = asyncio.get_running_loop(), asyncio.Event(), list[int]()
        for line in engine.lines:
            loop.add_reader(line, spoken.set)
        while True:
            updates = engine.poll()
            received += [token for update in updates for token in update.new_token_ids]
            if any(update.finish_reason for update in updates):
                break
            spoken.clear()
            await asyncio.wait_for(spoken.wait(), PATIENCE)
        for line in engine.lines:
            loop.remove_reader(line)
        return received

    assert asyncio.run(follow()) == expected.outputs[0].token_ids
    pair.llm_engine.outputs.fail_all("its updates were read above")


def test_engines_are_not_idle_before_they_have_read_everything(pair: LLM) -> None:
    engine = engines_of(pair)
    engine.clear_prefix_cache()
    engine.hand_out()  # nothing of what they say is read, be they ever so quick
    eventually(lambda: all(has_spoken(line) for line in engine.lines))
    for pid in members():
        os.kill(pid, signal.SIGSTOP)
    engine.clear_prefix_cache()
    engine.poll()
    assert engine.has_work, "what they have said is older than what they were sent"
    for pid in members():
        os.kill(pid, signal.SIGCONT)
    while engine.has_work:
        engine.step()


def test_requests_of_an_engine_that_dies_go_on_at_another(tiny: Path, pair: LLM) -> None:
    """Sampled with every kind of parameters, scored, ended by strings: the same to the last token."""
    pytest.importorskip("xgrammar")
    prompts, params = random_requests(30, seed=9)
    for sampling in params:
        sampling.max_tokens = 60
    for sampling in params[::3]:
        sampling.stop = ["e", "a "]
    for sampling in params[1::9]:
        sampling.structured_outputs = StructuredOutputsParams(regex="[a-z ]{30,50}")
        sampling.logit_bias = sampling.allowed_token_ids = None
    expected = pair.generate(prompts, params, use_tqdm=False)
    others = members()
    with LLM(str(tiny), data_parallel_size=2, **BASE) as llm:
        pids = {name: pid for pid, name in members().items() if pid not in others}
        engine, found = llm.llm_engine, dict[str, RequestOutput]()
        kinds = [OutputKind.FINAL_ONLY, OutputKind.CUMULATIVE]
        ids = [
            engine.add_request(*each, kind=kinds[i % 2])
            for i, each in enumerate(zip(prompts, params, strict=True))
        ]
        num_left = 30
        while engine.has_unfinished_requests():
            for output in engine.step():
                found[output.request_id] = output
            num_left = sum(not (i in found and found[i].finished) for i in ids)
            if num_left < 26 and "engine 0" in pids:
                os.kill(pids.pop("engine 0"), signal.SIGKILL)
        outputs = [found[i] for i in ids]
        assert not pids.get("engine 0") and engines_of(llm).router.loads == [0, 0]
        moved = engine.stats_per_engine
    assert [output.error for output in outputs] == [None] * 30
    assert moved[1].num_prompt_tokens > moved[0].num_prompt_tokens, "nothing has moved"
    assert tokens(outputs) == tokens(expected)
    for output, other in zip(outputs, expected, strict=True):
        ours, theirs = output.outputs[0], other.outputs[0]
        assert (ours.text, ours.finish_reason, ours.stop_reason) == (
            theirs.text,
            theirs.finish_reason,
            theirs.stop_reason,
        )
        assert len(output.prompt_logprobs or ()) == len(other.prompt_logprobs or ())
        assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-4)


def test_an_engine_that_dies_takes_no_requests_along(
    tiny: Path, pair: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replicas, "GRACE", 0.0)
    others = members()
    with LLM(str(tiny), data_parallel_size=2, worker_timeout=3.0, **BASE) as llm:  # beside the pair
        pids = {name: pid for pid, name in members().items() if pid not in others}
        streams = [llm.stream([1, 2, i], LONG) for i in range(4)]
        for stream in streams:
            next(stream)
        os.kill(pids["engine 0"], signal.SIGKILL)
        eventually(lambda: pids["engine 0"] not in members())
        streams.append(llm.stream([1, 2, 4], LONG))
        ends = [list(stream)[-1] for stream in reversed(streams)]
        assert [end.outputs[0].finish_reason for end in ends] == ["length"] * 5
        assert "engine 0 has died (exit code -9)" in caplog.text
        # The other one goes on, and gets all that comes.
        assert llm.llm_engine.engine.error is None
        (expected,) = pair.generate([[1, 2, 3]], SHORT, use_tqdm=False)
        outputs = llm.generate([[1, 2, 3]] * 3, SHORT, use_tqdm=False)
        assert tokens(outputs) == tokens([expected]) * 3
        dead = llm.llm_engine.stats_per_engine[0]
        assert (dead.num_running, dead.num_waiting, dead.kv_usage) == (0, 0, 0.0), "the dead run nothing"
        assert dead.num_sampled_tokens > 0, "but what it has done remains"
        # Then it hangs, and nobody is left.
        os.kill(pids["engine 1"], signal.SIGSTOP)
        with pytest.raises(RuntimeError, match="engine 1 has said nothing for 3 s; raise --worker-timeout"):
            llm.generate([[1, 2, 3]] * 3, SHORT, use_tqdm=False)
        with pytest.raises(RuntimeError, match="engine 1 has said nothing"):
            llm.generate([[1, 2, 3]], SHORT, use_tqdm=False)
        assert llm.llm_engine.is_finished()
        assert members() == others, "a dead engine's process lives on"


def test_a_stream_may_outlive_its_engines(tiny: Path) -> None:
    with LLM(str(tiny), data_parallel_size=2, **BASE) as llm:
        left, read = (llm.stream([1, 2, i], LONG) for i in range(2))
        assert not next(left).finished and not next(read).finished
    left.close()  # as the interpreter does at its end
    *_, end = read
    assert end.finished and end.error == "the engine was shut down"


def test_what_the_user_can_mend_is_the_same_value_error(tiny: Path) -> None:
    before = members()
    wish = BASE | {"max_model_len": 256, "num_gpu_blocks_override": 3}
    messages = []
    for size in (1, 2):
        with pytest.raises(ValueError, match="lower max_model_len to 48") as error:
            LLM(str(tiny), data_parallel_size=size, **wish)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    assert members() == before
    with pytest.raises(ValueError, match="data_parallel_size is 0, must be at least 1"):
        LLM(str(tiny), data_parallel_size=0)


SCRIPT = """
    import os, psutil, signal, sys, threading
    from pellucid import LLM, SamplingParams

    llm = LLM(sys.argv[1], device="cpu", data_parallel_size=2)
    print(*(process.pid for process in psutil.Process().children()), flush=True)
    try:
        threading.Timer(1.0, os.killpg, (os.getpid(), getattr(signal, sys.argv[2]))).start()
        while True:
            llm.generate([[1, 2, 3]] * 8, SamplingParams(max_tokens=250, ignore_eos=True), use_tqdm=False)
    except KeyboardInterrupt:
        pass
    assert llm.llm_engine.is_finished()
    print(len(llm.generate([[1, 2, 3]], use_tqdm=False)))
"""


@pytest.mark.parametrize("ends_by", ["SIGTERM", "SIGINT"])
def test_engines_leave_with_their_owner_however_it_goes(tiny: Path, tmp_path: Path, ends_by: str) -> None:
    """After Ctrl-C the owner goes on, and then ends without a shutdown; SIGTERM ends it at once."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, str(script), str(tiny), ends_by]
    done = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
        start_new_session=True,
    )
    lines = done.stdout.splitlines()
    assert (done.returncode, lines[1:]) == ((-15, []) if ends_by == "SIGTERM" else (0, ["1"]))
    pids = [int(pid) for pid in lines[0].split()]
    assert len(pids) == 2
    eventually(lambda: not any(map(psutil.pid_exists, pids)))
    assert [*tmp_path.iterdir()] == [script], "something stays behind"


def test_an_engine_that_fails_names_itself_and_gets_nothing_more(
    pair: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    """The last test: the pair is one afterwards."""
    engine = engines_of(pair)
    engine.add(Request(id="fatal", prompt_token_ids=FATAL, sampling=LONG))
    updates = engine.step()
    while not updates or updates[-1].finish_reason is None:
        updates = engine.step()
    update = updates[-1]
    assert update.error is not None and "the engine has failed: ArithmeticError" in update.error
    (name,) = [name for name in ("engine 0", "engine 1") if update.error.startswith(f"{name}: ")]
    assert engine.error is None and name in caplog.text
    outputs = pair.generate([[1, 2, 3]] * 4, SHORT, use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 4
