"""What the X-ray shows is what is; and it looks no more often than it may."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import pytest

from pellucid.engine.core import Engine
from pellucid.kv.kinds import Full, Kind, Window
from pellucid.observe.xray import INTERVAL, MOST_ROWS, MOST_TIME, Flat, Frame, LiveXRay, PageView, RowView
from tests.engine.test_core import make_engine
from tests.schedule.device import make_request

FREE = PageView(0, -1, 0, False)


View = TypeVar("View", PageView, RowView)


def views(kind: Callable[..., View], flat: Flat) -> list[View]:
    """Views of four fields each."""
    return [kind(*flat[i : i + 4]) for i in range(0, len(flat), 4)]


class Clock:
    """Seconds that pass by themselves at each look."""

    def __init__(self, per_look: float = 0.0) -> None:
        self.now, self.per_look = 100.0, per_look

    def __call__(self) -> float:
        self.now += self.per_look
        return self.now


class Page:
    """Follows frames, as the page does."""

    def __init__(self) -> None:
        self.pages: dict[int, PageView] = {}
        self.last: Frame | None = None

    def show(self, frame: Frame | None) -> None:
        assert frame is not None
        if frame.is_first:
            self.pages.clear()
        self.pages |= {view.page: view for view in views(PageView, frame.pages)}
        self.last = frame

    def check(self, engine: Engine) -> None:
        """Every page is shown as it is."""
        scheduler = engine.scheduler
        kv, running = scheduler.kv, scheduler.running()
        held = {seq.id: set(kv.held(seq.slot).tolist()) for seq in running}
        num_owners = Counter(page for pages in held.values() for page in pages)
        for page in range(1, kv.pool.num_pages + 1):
            shown = self.pages.get(page, FREE)
            is_cached = not num_owners[page] and kv.pool.is_published[page]
            assert (shown.num_owners, shown.is_cached) == (num_owners[page], is_cached)
            owners = [seq_id for seq_id, pages in held.items() if page in pages]
            assert shown.owner in owners if owners else shown.owner == -1
        assert self.last is not None
        assert [view.id for view in self.last.running] == [seq.id for seq in running]
        assert self.last.num_waiting == scheduler.num_waiting


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_pages,kinds", [(15, (Full(4),)), (22, (Full(4), Window(4, 2, 5)))])
def test_the_picture_is_the_truth_whenever_it_is_drawn(
    seed: int, num_pages: int, kinds: tuple[Kind, ...]
) -> None:
    engine, _ = make_engine(depth=2, num_blocks=num_pages, num_slots=4, num_spec=2, budget=8, kinds=kinds)
    rng, clock, page = random.Random(seed), Clock(), Page()
    names = iter(range(10_000))
    for turn in range(300):
        if turn == 20:
            engine.xray = LiveXRay(engine.scheduler, clock)
        if rng.random() < 0.6:
            shared = [7] * rng.randrange(0, 20)
            prompt = [*shared, *rng.choices(range(100), k=rng.randrange(1, 8))]
            engine.add(make_request(str(next(names)), prompt, max_tokens=rng.randrange(1, 16)))
        if rng.random() < 0.02:
            engine.clear_prefix_cache()
        engine.step()
        clock.now += rng.choice((0.0, INTERVAL))
        if turn >= 20 and (frame := engine.xray.frame(is_stale=True)):
            page.show(frame)
            page.check(engine)
    assert page.last is not None and engine.scheduler.counters.num_preemptions


def test_a_frame_has_the_rows_of_each_step() -> None:
    engine, executor = make_engine(num_spec=2, budget=4)
    executor.device.accept = 1
    engine.xray = LiveXRay(engine.scheduler)
    engine.add(make_request("a", 6, max_tokens=44))
    while engine.has_work:
        engine.step()
    frame = engine.xray.frame(is_stale=False)
    assert frame is not None and frame.is_first and frame.max_num_tokens == 4 and not frame.running
    rows = [row[1:] for step in frame.steps for row in views(RowView, step.rows)]
    assert rows[:2] == [(4, 0, 0), (2, 0, 1)], "two chunks, then verifications"
    assert rows[2:] == [(3, 2, 2)] * 21 + [(3, 2, 1)]
    stats = engine.stats()
    assert sum(step.seconds for step in frame.steps) == pytest.approx(
        stats.host_seconds + stats.wait_seconds, rel=0.5
    )


def test_a_step_says_how_many_rows_it_has_beyond_those_that_are_shown() -> None:
    num = MOST_ROWS + 8
    engine, _ = make_engine(num_slots=num, budget=num, num_blocks=2 * num)
    engine.xray = LiveXRay(engine.scheduler)
    for name in range(num):
        engine.add(make_request(str(name), 1, max_tokens=1))
    while engine.has_work:
        engine.step()
    frame = engine.xray.frame(is_stale=False)
    assert frame is not None
    (step,) = frame.steps
    assert (step.num_rows, len(views(RowView, step.rows))) == (num, MOST_ROWS)


def test_it_looks_at_most_so_often_and_says_nothing_twice() -> None:
    engine, _ = make_engine()
    clock = Clock()
    xray = engine.xray = LiveXRay(engine.scheduler, clock)
    assert xray.patience == 0 and xray.frame(is_stale=False) is not None
    assert xray.patience is None and xray.frame(is_stale=False) is None, "nothing is new"
    engine.add(make_request("a", max_tokens=2))
    engine.step()
    assert xray.frame(is_stale=True) is None and xray.patience == pytest.approx(INTERVAL)
    clock.now += INTERVAL
    frame = xray.frame(is_stale=False)
    assert frame is not None and not frame.is_first and frame.steps


def test_it_takes_no_more_than_its_share_of_the_time() -> None:
    engine, _ = make_engine()
    clock = Clock(per_look=0.01)
    xray = LiveXRay(engine.scheduler, clock)
    assert xray.frame(is_stale=True) is not None
    until = clock.now + 0.01 / MOST_TIME - 0.1
    while clock.now < until:
        assert xray.frame(is_stale=True) is None


def test_nobody_watches_at_first() -> None:
    engine, _ = make_engine()
    engine.add(make_request("a"))
    engine.step()
    assert engine.xray.frame(is_stale=True) is None and engine.xray.patience is None
