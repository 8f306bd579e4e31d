"""The owner of several engines, without any: sums, updates that join, cores."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace

import msgspec
import pytest

from pellucid import platform
from pellucid.cluster.messages import Abort, Turn, WakeUp
from pellucid.config import EngineConfig
from pellucid.executor.base import Capacity
from pellucid.observe.statistics import EngineStats
from pellucid.platform import share_of_cpus
from pellucid.router.replicas import Replica, hear_early, joined, least
from pellucid.sleep.state import AWAKE
from pellucid.types import FinishReason, SeqUpdate, TokenLogprobs


def test_the_statistics_of_several_engines_are_summed() -> None:
    numbers = {f.name: 2 for f in fields(EngineStats)}
    numbers |= {"num_accepted_per_position": (3, 1), "num_steps_by_tokens": (0, 5)}  # type: ignore[dict-item]
    numbers |= {"is_synthetic": True, "sleep": AWAKE, "of_features": {"a": 2, "b": 0}}  # type: ignore[dict-item]
    part = EngineStats(**numbers)  # type: ignore[arg-type]
    total = EngineStats.total([part, part, part])
    assert (total.num_accepted_per_position, total.num_steps_by_tokens) == ((9, 3), (0, 15))
    other = EngineStats.total([part, replace(part, kv_usage=5)])
    assert (total.kv_usage, other.kv_usage) == (2, 3.5), "a share has a mean"
    assert total.is_synthetic is True, "any part's fault"
    assert total.proposer == part.proposer, "all have the same"
    assert total.of_features == {"a": 6, "b": 0}
    others = (
        "kv_usage",
        "num_accepted_per_position",
        "num_steps_by_tokens",
        "is_synthetic",
        "proposer",
        "sleep",
        "of_features",
    )
    sums = {getattr(total, name) for name in numbers if name not in others}
    assert sums == {6}


def test_what_all_can_hold_is_what_the_least_can() -> None:
    a = Capacity(kinds=(), num_pages=9, max_model_len=64)
    b = Capacity(kinds=(), num_pages=7, max_model_len=256)
    assert least([a, b]) == Capacity(kinds=(), num_pages=7, max_model_len=64)


def test_what_an_engine_says_of_a_request_in_several_turns_is_one_update() -> None:
    first, second, third = (TokenLogprobs([i], [-0.5], 1) for i in range(3))
    turns = [
        SeqUpdate("a", [1], logprobs=[first], prompt_logprobs=[third], first_scheduled=2.0),
        SeqUpdate("b", [7], num_cached_tokens=16, first_scheduled=2.5),
        SeqUpdate("a", [2, 3], logprobs=[second], first_scheduled=2.0),
        SeqUpdate("a", [4], finish_reason=FinishReason.STOP, stop_reason=4, first_scheduled=2.0),
        SeqUpdate("b", finish_reason=FinishReason.ERROR, error="it has died", num_cached_tokens=16),
    ]
    a, b, end = joined(turns)
    assert (a.request_id, a.new_token_ids, a.finish_reason, a.stop_reason) == ("a", [1, 2, 3, 4], "stop", 4)
    assert (a.logprobs, a.prompt_logprobs, a.first_scheduled) == ([first, second], [third], 2.0)
    assert (b.request_id, b.new_token_ids, b.error, b.num_cached_tokens) == ("b", [7], None, 16)
    assert (a.num_steps, b.num_steps) == (3, 1)
    assert (end.request_id, end.error) == ("b", "it has died"), "a stop string may have ended the text before"


@pytest.mark.parametrize("num_cores,num_shares", [(8, 2), (7, 3), (2, 2), (1, 3), (2, 5)])
def test_engines_divide_the_cores(num_cores: int, num_shares: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = [{core, core + 100} for core in range(num_cores)]  # with their hyperthreads
    monkeypatch.setattr(platform, "CORES", cores)
    shares = [share_of_cpus(i, num_shares) for i in range(num_shares)]
    assert set().union(*shares) == set().union(*cores)
    assert all(share >= {core, core + 100} for share in shares for core in share if core < 100)
    if num_shares <= num_cores:
        assert sum(map(len, shares)) == 2 * num_cores, "some core is in two shares"


def test_an_engine_that_wakes_up_is_not_silent() -> None:
    """It may take minutes; whoever asks how it is is not to give it up."""
    member = SimpleNamespace(failure=None, send=lambda message: None)
    replica = Replica(member, EngineConfig.from_options({}))  # type: ignore[arg-type]
    assert replica.silence == 0, "it has not begun"
    numbers = dict.fromkeys((f.name for f in fields(EngineStats)), 0) | {"sleep": AWAKE}
    stats = EngineStats(**numbers)  # type: ignore[arg-type]
    replica.note(Turn([], stats, num_heard=0, has_work=False, error=None))
    replica.post(WakeUp(()))
    replica.flush()
    assert replica.silence == 0
    stats = replace(stats, sleep=replace(AWAKE, num_orders=1))
    replica.note(Turn([], stats, num_heard=1, has_work=False, error=None))
    replica.post(Abort("a"))
    replica.flush()
    assert replica.silence > 0


def test_an_engine_that_fails_while_others_begin_says_so() -> None:
    numbers = dict.fromkeys((f.name for f in fields(EngineStats)), 0)
    standing = Turn([], EngineStats(**numbers), num_heard=0, has_work=False, error=None)  # type: ignore[arg-type]
    hear_early(0, standing)
    with pytest.raises(RuntimeError, match="engine 0 has failed before others began: its worker died"):
        hear_early(0, msgspec.structs.replace(standing, error="its worker died"))
