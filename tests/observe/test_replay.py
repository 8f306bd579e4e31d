"""What an engine did is written down, read again, and run again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pellucid.cli.main import main
from pellucid.observe.replay import Outcome, StepCost, measured, pictures, read_trace, replay
from pellucid.observe.statistics import EngineStats
from pellucid.observe.trace import RequestRecord, StepRecord, StepTrace
from pellucid.schedule.step import SchedulerOptions
from pellucid.sleep.state import AWAKE
from tests.schedule.device import Device, make_request, make_scheduler

TEXT = list(range(500, 532))
NOTHING: Any = {
    **dict.fromkeys(EngineStats.__dataclass_fields__, 0),
    "is_synthetic": False,
    "sleep": AWAKE,
    "of_features": {},
}
STATS = EngineStats(**{**NOTHING, "num_accepted_per_position": (), "num_steps_by_tokens": ()})


def record(path: Path, *, num_requests: int = 6, num_slots: int = 4) -> dict[str, int]:
    """An engine's life in virtual time: a decode takes 1 ms, a prompt token 0.1 ms, a step 2 ms more."""
    now = [0.0]
    scheduler, device = make_scheduler(num_slots=num_slots), Device()
    trace = StepTrace(path, scheduler, lambda: STATS, clock=lambda: now[0])
    lengths: dict[str, int] = {}
    for i in range(num_requests):
        request = make_request(f"r{i}", TEXT + [i], max_tokens=3 + i)
        trace.arrives(request)
        scheduler.add(request)
    while scheduler.has_unfinished:
        plan = scheduler.next_plan()
        assert plan is not None
        num_decode = sum(row.num_query == 1 for row in plan.rows)
        seconds = 0.002 + 0.001 * num_decode + 0.0001 * (plan.num_tokens - num_decode)
        now[0] += seconds
        result = device.run(plan)
        trace.lands(plan, result, seconds)
        for update in scheduler.commit(plan, result).one_by_one():
            lengths[update.request_id] = lengths.get(update.request_id, 0) + len(update.new_token_ids)
    trace.rests()
    return lengths


def facts(outcome: Outcome) -> tuple[int, int, int, int]:
    return outcome.num_steps, outcome.num_tokens, outcome.num_preemptions, outcome.num_cached


def test_what_is_written_is_read(tmp_path: Path) -> None:
    lengths = record(tmp_path / "trace")
    recorded = read_trace(tmp_path / "trace")
    assert recorded.num_generated == lengths == {f"r{i}": 3 + i for i in range(6)}
    first, second = recorded.requests[:2]
    assert [step.num_waiting for step in recorded.steps[:2]] == [2, 2] and not recorded.steps[-1].num_waiting
    assert first.prompt_len == 33 and len(first.blocks) == 8 and first.blocks == second.blocks
    assert "500" not in (tmp_path / "trace").read_text(), "no tokens"
    assert pictures(tmp_path / "trace")[0]["frame"]["is_first"] is True  # type: ignore[index]


def test_the_scheduler_does_the_same_again(tmp_path: Path) -> None:
    record(tmp_path / "trace")
    recorded = read_trace(tmp_path / "trace")
    cost = StepCost(recorded.steps)
    assert cost.parts == pytest.approx([0.002, 0.001, 0.0001])
    before, again = measured(recorded), replay(recorded, cost)
    assert facts(again) == facts(before) and again.seconds == pytest.approx(before.seconds, rel=1e-3)
    assert again.waits == pytest.approx(before.waits, abs=1e-4)
    assert again.gaps == pytest.approx(before.gaps, abs=1e-4)
    assert again.kv_peak == pytest.approx(before.kv_peak, abs=1e-4) and before.kv_peak > 0


def test_other_limits_have_other_outcomes(tmp_path: Path) -> None:
    record(tmp_path / "trace")
    recorded = read_trace(tmp_path / "trace")
    cost, again = StepCost(recorded.steps), replay(recorded, StepCost(recorded.steps))
    one = replay(
        recorded, cost, options=SchedulerOptions(max_model_len=64, num_slots=1, max_num_batched_tokens=64)
    )
    assert one.num_tokens == again.num_tokens and one.seconds > again.seconds
    assert max(one.waits) > max(again.waits) and max(one.gaps) < max(again.gaps)
    cold = replay(recorded, cost, has_prefix_cache=False)
    assert cold.num_cached == 0 < again.num_cached and cold.seconds > again.seconds
    tight = replay(recorded, cost, num_pages=22)
    assert tight.num_tokens == again.num_tokens and tight.kv_peak > again.kv_peak
    tiny = replay(recorded, cost, num_pages=3)
    assert len(tiny.refused) == 6 and tiny.num_tokens == 0


def test_requests_come_when_they_came_and_in_their_order(tmp_path: Path) -> None:
    record(tmp_path / "trace")
    recorded = read_trace(tmp_path / "trace")
    cost, one = StepCost(recorded.steps), replace(recorded.engine.options, num_slots=1, policy="priority")

    def again(**changes: Any) -> Outcome:
        """With other facts of the last request, the longest."""
        last = msgspec.structs.replace(recorded.requests[-1], **changes)
        return replay(replace(recorded, requests=[*recorded.requests[:-1], last]), cost, options=one)

    plain, late, urgent = again(), again(arrival=50.0), again(priority=-1)
    assert 50 < late.seconds < 51 and max(late.waits) < max(plain.waits)
    assert urgent.waits[1] - urgent.waits[0] > plain.waits[1] - plain.waits[0]


def test_a_target_for_times_between_tokens_cuts_prompts_beside_streams(tmp_path: Path) -> None:
    record(tmp_path / "trace")
    recorded = read_trace(tmp_path / "trace")
    cost = StepCost(recorded.steps)
    roomy = replace(recorded.engine.options, max_model_len=4096, max_num_batched_tokens=2048)

    def steps(target_itl_ms: float | None, *, is_streamed: bool = True) -> int:
        facts: Any = {"is_streamed": is_streamed, "prompt_len": 1000}
        requests = [msgspec.structs.replace(each, **facts) for each in recorded.requests]
        asked = replace(recorded, requests=requests)
        return replay(asked, cost, options=roomy, num_pages=2000, target_itl_ms=target_itl_ms).num_steps

    assert steps(10.0) > steps(None) and steps(10.0, is_streamed=False) == steps(None)


def test_what_an_engine_did_is_there_when_it_is_killed(tmp_path: Path) -> None:
    """But for the last second."""
    now, scheduler, device = [0.0], make_scheduler(num_slots=4), Device()
    trace = StepTrace(tmp_path / "trace", scheduler, lambda: STATS, clock=lambda: now[0])
    scheduler.add(make_request("a", 5))
    for _ in range(3):
        now[0] += 0.6
        plan = scheduler.next_plan()
        assert plan is not None
        result = device.run(plan)
        trace.lands(plan, result, 0.6)
        scheduler.commit(plan, result)
    assert len(read_trace(tmp_path / "trace").steps) == 2


def test_the_command_prints_all_three(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace"
    record(path)
    assert main(["replay", str(path), "--max-num-seqs", "1", "--target-itl-ms", "5"]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("recorded", "again", "what if", "first token, p95, ms"))
    assert main(["replay", str(tmp_path / "nothing")]) == 2
    wrong = ("--max-num-seqs=0", "--max-model-len=-1", "--num-pages=0", "--target-itl-ms=nan")
    for option in wrong:
        assert main(["replay", str(path), option]) == 2
    errors = capsys.readouterr().err
    assert all(f"{option[2:].split('=')[0].replace('-', '_')} is" in errors for option in wrong)


def test_an_engine_that_starts_anew_leaves_the_trace_of_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    record(path, num_requests=2)
    record(path, num_requests=3)
    old = tmp_path / "trace.old"
    assert [len(read_trace(each).requests) for each in (old, path)] == [2, 3]
    path.write_bytes(old.read_bytes() + path.read_bytes())
    with pytest.raises(ValueError, match="traces of 2 engines"):
        read_trace(path)


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    record(path, num_requests=1)
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])  # the engine was killed
    assert read_trace(path).requests
    for text, message in [
        (b"hello\n", "line 1"),
        (b"", "does not begin"),
        (whole.replace(b'"version":1', b'"version":9'), "is of version 9"),
    ]:
        path.write_bytes(text)
        with pytest.raises(ValueError, match=message):
            read_trace(path)


def test_times_are_never_negative() -> None:
    steps = [
        StepRecord(i, 0.0, seconds, [(1, query, 0, 1)], [], 0, 0, 0, 0.0)
        for i, (query, seconds) in enumerate([(1, 0.01), (50, 0.001), (1, 0.011)])
    ]
    assert (StepCost(steps).parts >= 0).all()
    with pytest.raises(ValueError, match="no steps"):
        StepCost([])
    assert RequestRecord("a", 0.0, 1, [], None).priority == 0
