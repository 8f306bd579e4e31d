"""An engine follows orders to sleep when nothing is under way, and refuses those that would lose anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from pellucid import LLM
from pellucid.sleep.host import Rest
from pellucid.sleep.state import GONE, TAGS, SleepState, check_level, check_tags


class Toy:
    """Workers and scheduler in one."""

    def __init__(self) -> None:
        self.num_running, self.calls, self.answer = 0, list[object](), None

    def clear_prefix_cache(self) -> None:
        self.calls.append("clear")

    def call(self, name: str, *args: object) -> object:
        self.calls.append((name, *args))
        return self.answer


def made() -> tuple[Toy, Rest]:
    toy = Toy()
    return toy, Rest(toy, toy)


def test_it_waits_for_what_is_under_way() -> None:
    toy, sleeper = made()
    sleeper.sleep(1)
    sleeper.turn(is_still=False)
    assert sleeper.is_on and not toy.calls
    sleeper.turn(is_still=True)
    assert toy.calls == ["clear", ("sleep", 1)]
    assert sleeper.state == SleepState(level=1, away=TAGS, num_orders=1)
    assert sleeper.is_on and not sleeper.is_due


def test_what_runs_is_not_lost() -> None:
    toy, sleeper = made()
    toy.num_running = 2
    sleeper.sleep(2)
    sleeper.turn(is_still=True)
    assert not toy.calls and not sleeper.is_on
    assert sleeper.state.num_orders == 1 and "2 requests are running" in (sleeper.state.error or "")


def test_who_lends_its_kv_stays_awake(tiny: Path) -> None:
    with (
        LLM(str(tiny), device="cpu", kv_transfer_config={"kv_connector": "PeerConnector"}) as llm,
        pytest.raises(ValueError, match="lent by PeerConnector"),
    ):
        llm.sleep(1)


def test_it_comes_back_piece_by_piece() -> None:
    toy, sleeper = made()
    for order in (lambda: sleeper.sleep(1), lambda: sleeper.wake_up(("kv_cache",))):
        order()
        sleeper.turn(is_still=True)
    assert sleeper.state.away == TAGS and "behind weights" in (sleeper.state.error or "")
    sleeper.wake_up(("weights",))
    sleeper.turn(is_still=True)
    assert sleeper.state.away == ("kv_cache",) and sleeper.state.error is None and sleeper.is_on
    sleeper.sleep(1)
    sleeper.turn(is_still=True)
    assert "sleeps already" in (sleeper.state.error or "")
    sleeper.wake_up(TAGS)
    sleeper.turn(is_still=True)
    assert toy.calls[2:] == [("wake_up", ["weights"]), ("wake_up", ["kv_cache"])]
    assert sleeper.state == SleepState(num_orders=5) and not sleeper.is_on


def test_it_sleeps_on_where_there_is_no_room() -> None:
    toy, sleeper = made()
    sleeper.sleep(1)
    sleeper.turn(is_still=True)
    toy.answer = "2 GiB are lacking"
    sleeper.wake_up(TAGS)
    sleeper.turn(is_still=True)
    assert sleeper.state == SleepState(level=1, away=TAGS, num_orders=2, error="2 GiB are lacking")


def test_several_engines_are_awake_when_all_are() -> None:
    asleep = SleepState(level=1, away=("kv_cache",), num_orders=3)
    total = SleepState.total([SleepState(num_orders=4), asleep, GONE])
    assert total == SleepState(level=1, away=("kv_cache",), num_orders=3)


def test_levels_and_tags_have_names() -> None:
    assert check_level(2) == 2 and check_tags(None) == check_tags(["kv_cache", "weights"]) == TAGS
    with pytest.raises(ValueError, match="level is 0"):
        check_level(0)
    with pytest.raises(ValueError, match="may have weights and kv_cache"):
        check_tags(["x"])
