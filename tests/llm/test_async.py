"""The asyncio API, with the engine in a process of its own."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from pellucid.async_llm import AsyncLLM, EngineDeadError, Mailbox
from pellucid.llm import LLM
from pellucid.observe.xray import Frame
from pellucid.sampling_params import SamplingParams
from pellucid.text.outputs import OutputKind
from pellucid.types import CompletionOutput, RequestOutput
from tests.patience import PATIENCE
from tests.processes import members

OPTIONS: dict[str, Any] = {"device": "cpu", "num_threads": 1, "cpu_kv_cache_gib": 0.02, "max_num_seqs": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=12)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    llm = AsyncLLM(**OPTIONS)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def run(llm: AsyncLLM) -> Iterator[Callable[[Awaitable[Any]], Any]]:
    """Run a coroutine on the one loop of this module; afterwards nothing is left in the engine."""
    with asyncio.Runner() as runner:

        async def whole(work: Awaitable[Any]) -> Any:
            result = await asyncio.wait_for(work, PATIENCE)
            gc.collect()
            until = time.monotonic() + PATIENCE
            while llm.num_completions or llm.stats.num_running or llm.stats.kv_usage:
                assert time.monotonic() < until, f"left behind: {llm.stats}"
                await asyncio.sleep(0.05)
            return result

        yield lambda work: runner.run(whole(work))


async def collect(outputs: Any) -> list[RequestOutput]:
    return [output async for output in outputs]


def test_a_crowd_that_keeps_the_loop_busy_holds_up_neither_the_engine_nor_its_answers(
    llm: AsyncLLM, run: Any
) -> None:
    async def crowd() -> None:
        (prompt,) = await llm.tokenize(["a"])
        num_steps, until = llm.stats.num_steps, time.monotonic() + PATIENCE
        mailboxes: list[Mailbox] = []
        while llm.stats.num_steps == num_steps:  # which only a turn of the loop tells
            assert time.monotonic() < until, f"after {len(mailboxes)} requests the engine has done nothing"
            mailboxes.append(llm.open([prompt], SamplingParams(max_tokens=2)))
            time.sleep(0.005)  # what else it takes to take a request in
        for mailbox in mailboxes:
            mailbox.close()

    run(crowd())


def test_the_last_output_is_what_the_twin_for_scripts_gives(llm: AsyncLLM, run: Any) -> None:
    outputs = run(collect(llm.generate("Once upon a time", GREEDY)))
    with LLM(**OPTIONS) as twin:
        (expected,) = twin.generate("Once upon a time", GREEDY, use_tqdm=False)
    assert outputs[-1].finished and not outputs[0].finished
    assert outputs[-1].outputs == expected.outputs


def test_deltas_join_to_the_whole(llm: AsyncLLM, run: Any) -> None:
    async def both() -> tuple[list[RequestOutput], list[RequestOutput]]:
        sampling = GREEDY.clone(n=2, logprobs=1, prompt_logprobs=0)
        deltas = collect(llm.generate("The cat", sampling, kind=OutputKind.DELTA))
        (whole,) = await collect(llm.generate("The cat", sampling, kind=OutputKind.FINAL_ONLY))
        return await deltas, [whole]

    deltas, (whole,) = run(both())
    for index, completion in enumerate(whole.outputs):
        parts = [part for output in deltas for part in output.outputs if part.index == index]
        assert "".join(part.text for part in parts) == completion.text
        assert [token for part in parts for token in part.token_ids] == completion.token_ids
        assert sum(len(part.logprobs or ()) for part in parts) == 12
    assert sum(len(output.prompt_logprobs or ()) for output in deltas) == len(whole.prompt_token_ids)


def test_a_chat_is_rendered(llm: AsyncLLM, run: Any) -> None:
    outputs = run(collect(llm.chat([{"role": "user", "content": "Hi"}], GREEDY)))
    assert "<|im_start|>user" in (outputs[-1].prompt or "")


def test_who_leaves_aborts(llm: AsyncLLM, run: Any) -> None:
    async def leave() -> None:
        async for output in llm.generate("Once", LONG):
            if output["text"]:
                break

    async def close() -> None:
        outputs = llm.generate("Once", LONG)
        await anext(outputs)
        await outputs.aclose()

    async def cancel() -> None:
        task = asyncio.create_task(collect(llm.generate("Once", LONG)))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def all_at_once() -> None:
        await asyncio.gather(*(way() for way in (leave, close, cancel) for _ in range(3)))

    run(all_at_once())


def test_a_slow_reader_gets_larger_pieces(llm: AsyncLLM, run: Any) -> None:
    async def slowly() -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        sampling = GREEDY.clone(max_tokens=60, ignore_eos=True)
        async for output in llm.generate("Once", sampling, kind=OutputKind.DELTA):
            outputs.append(output)
            while llm.num_completions:
                await asyncio.sleep(0.02)
        return outputs

    first, rest = run(slowly())
    assert len(first.outputs[0].token_ids) + len(rest.outputs[0].token_ids) == 60 and rest.finished


def test_a_stop_string_ends_a_request_here_and_there(llm: AsyncLLM, run: Any) -> None:
    outputs = run(collect(llm.generate("Once upon a time", LONG.clone(stop="."))))
    assert outputs[-1].outputs[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "prompt,sampling,message",
    [
        ("", None, "prompt is empty"),
        ([9999], None, "token id 9999 is out of range"),
        ("a", SamplingParams(allowed_token_ids=[9999]), "9999, must be in"),
    ],
)
def test_what_cannot_be_served_is_refused(
    llm: AsyncLLM, run: Any, prompt: Any, sampling: SamplingParams | None, message: str
) -> None:
    async def refused() -> None:
        with pytest.raises(ValueError, match=message):
            await anext(llm.generate(prompt, sampling))

    run(refused())


def test_a_dead_engine_is_noticed_and_can_be_started_anew() -> None:
    async def life(llm: AsyncLLM) -> None:
        waiting = [asyncio.create_task(collect(llm.generate("Once", LONG))) for _ in range(6)]
        while llm.stats.num_running < 4:
            await asyncio.sleep(0.01)
        engines = [psutil.Process(pid) for pid in members()]
        max(engines, key=lambda child: child.create_time()).kill()
        ends = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 2)
        assert all(isinstance(end, EngineDeadError) for end in ends)
        assert llm.error == await llm.died() == "engine 0 has died (exit code -9)"
        with pytest.raises(EngineDeadError):
            await anext(llm.generate("Once"))
        restart = asyncio.create_task(llm.restart())
        await asyncio.sleep(0.1)
        seen: list[Frame] = []
        llm.view(lambda _, frame: seen.append(frame))
        assert await llm.died() == "engine 0 has died (exit code -9)", "as long as there is no other engine"
        with pytest.raises(EngineDeadError):
            await anext(llm.generate("Once"))
        assert not restart.done() and not seen
        await restart
        assert llm.error is None
        death = asyncio.create_task(llm.died())
        assert (await collect(llm.generate("Once", GREEDY)))[-1].finished
        assert seen[0].is_first and not death.done()
        death.cancel()

    llm = AsyncLLM(**OPTIONS)
    try:
        asyncio.run(life(llm))
    finally:
        llm.shutdown()


def test_who_does_not_want_an_engine_any_more_need_not_wait_for_its_start() -> None:
    known = set(members())

    async def new_engine() -> psutil.Process:
        until = time.monotonic() + PATIENCE
        while True:
            for pid in members().keys() - known:
                known.add(pid)
                return psutil.Process(pid)
            assert time.monotonic() < until, "no engine is started"
            await asyncio.sleep(0.01)

    async def end_within_restart() -> None:
        llm = AsyncLLM(**OPTIONS)
        (await new_engine()).kill()
        await llm.died()
        restart = asyncio.create_task(llm.restart())
        second = await new_engine()
        second.suspend()  # it will never be ready
        try:
            llm.shutdown()
            with pytest.raises(RuntimeError, match="not wanted any more"):
                await asyncio.wait_for(restart, PATIENCE)
        finally:
            with suppress(psutil.NoSuchProcess):
                second.kill()  # who waits for it all the same hears of its end

    asyncio.run(end_within_restart())


@pytest.mark.usefixtures("forks")
def test_what_an_engine_does_not_read_goes_to_it_as_soon_as_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pellucid.cluster.line.BUFFER", 1)
    monkeypatch.setattr("pellucid.async_llm.HEARTBEAT", 1000.0)  # nobody comes by to look
    for name in ("MOST_DELAY", "MOST_SILENCE"):  # all goes in one message, to which nobody answers half-way
        monkeypatch.setattr(f"pellucid.async_llm.{name}", 1000.0)

    async def crowd(llm: AsyncLLM) -> None:
        (prompt,) = await llm.tokenize([[300 + i % 90 for i in range(400)]])
        mailboxes = [llm.open([prompt], SamplingParams(max_tokens=1)) for _ in range(40)]
        for mailbox in mailboxes:
            assert [output.finished async for output in mailbox] == [True]

    llm = AsyncLLM(**OPTIONS)
    try:
        asyncio.run(asyncio.wait_for(crowd(llm), PATIENCE))
    finally:
        llm.shutdown()


def test_an_engine_ends_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    AsyncLLM(**OPTIONS).shutdown()
    assert not capfd.readouterr().err


def piece(text: str, *, finished: bool = False) -> RequestOutput:
    reason = "stop" if finished else None
    completion = CompletionOutput(0, text, [len(text)], finish_reason=reason)
    return RequestOutput("a", None, [1], [completion], finished=finished)


def test_what_nobody_has_read_joins() -> None:
    aborted: list[str] = []

    async def read() -> None:
        mailbox = Mailbox(OutputKind.DELTA, aborted.append)
        mailbox.expect("a")
        for text in ("o", "ne", " two"):
            mailbox.put(piece(text))
        first = await anext(mailbox)
        assert (first["text"], first["token_ids"]) == ("one two", [1, 2, 4])
        mailbox.put(piece("!", finished=True))
        assert [output["text"] async for output in mailbox] == ["!"]
        mailbox.close()

    asyncio.run(read())
    assert not aborted, "it had ended by itself"


def test_a_closed_mailbox_wakes_its_reader() -> None:
    aborted: list[str] = []

    async def read() -> None:
        mailbox = Mailbox(OutputKind.CUMULATIVE, aborted.append)
        mailbox.expect("a")
        asyncio.get_running_loop().call_soon(mailbox.close)
        assert [output async for output in mailbox] == []

    asyncio.run(read())
    assert aborted == ["a"]


def test_a_process_that_ends_takes_its_engine_along(tmp_path: Path) -> None:
    code = f"from pellucid import AsyncLLM\nAsyncLLM(**{OPTIONS!r})\n"
    (tmp_path / "script.py").write_text(code)
    subprocess.run([sys.executable, str(tmp_path / "script.py")], check=True, timeout=PATIENCE)
