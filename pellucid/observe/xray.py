"""The engine as pictures: who holds which KV page, who runs and who waits, what the last steps did.

Nothing is looked at until somebody watches; then a step costs one reference to its plan, and what is shown is
gathered some times a second, in a bounded share of the time.  Shows counts, never tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np

from pellucid.kv.manager import KVManager
from pellucid.kv.pool import Pages
from pellucid.schedule.plan import Column, StepPlan, StepResult
from pellucid.schedule.scheduler import Scheduler
from pellucid.schedule.sequence import Sequence
from pellucid.schedule.table import Table

INTERVAL = 0.05  # seconds between two frames, at least
MOST_TIME = 0.01  # share of the engine's time that frames may take
MOST_ROWS = 512  # rows of a frame; its newest steps have room
MOST_SEQUENCES = 128  # of a frame, running and waiting each
NOBODY = -1

# Fields of views, one view after the other: objects that live on, thousands a second, would wake Python's
# garbage collector, which costs more than all the rest.
Flat = list[int]


class PageView(NamedTuple):
    """A page that has changed hands."""

    page: int
    owner: int  # id of the sequence that has held it longest; -1 is nobody
    num_owners: int  # more than one: a shared prefix
    is_cached: int  # 1: nobody's, but findable until its place is needed


class RowView(NamedTuple):
    """A row that came home.  Of drafts, `num_new` - 1 were accepted."""

    seq_id: int
    num_query: int  # tokens
    num_draft: int
    num_new: int  # tokens that it yielded


class SeqView(NamedTuple):
    """A sequence; counts are tokens."""

    id: int
    request_id: str
    prompt_len: int
    num_tokens: int  # prompt and what has been generated
    num_computed: int  # of these, with KV
    num_cached: int  # of the prompt, found in the prefix cache
    limit: int  # most tokens


class StepView(NamedTuple):
    """A plan that came home."""

    id: int
    rows: Flat  # RowViews, of the first MOST_ROWS rows
    num_rows: int
    seconds: float  # that it took: since it began, or since the one before it came home


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What has changed since the frame before, and what is."""

    is_first: bool  # all before is void; what is not named is free
    seconds: float  # of time.monotonic
    block_size: int  # tokens of a page
    num_pages: int
    max_num_tokens: int  # of a step
    num_running: int
    num_waiting: int
    running: list[SeqView]  # the oldest
    waiting: list[SeqView]  # the next
    steps: list[StepView]  # the newest, in their order
    pages: Flat  # PageViews of those that changed


class XRay(Protocol):
    """Watches an engine, in its thread."""

    @property
    def patience(self) -> float | None:
        """Seconds until `frame` will have something, even if nothing happens; None is never."""
        ...

    def lands(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """A plan will be committed, whose step took so many seconds."""
        ...

    def frame(self, *, is_stale: bool) -> Frame | None:
        """What to show; None if it is too early or nothing is new.

        is_stale: something has changed since the last call.
        """
        ...


class NullXRay:
    """Nobody watches."""

    patience: float | None = None

    def lands(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        pass

    def frame(self, *, is_stale: bool) -> Frame | None:
        return None


class LiveXRay:
    """Somebody watches.  clock: seconds."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float] = time.monotonic) -> None:
        self._scheduler, self._clock = scheduler, clock
        self._board = _Board(scheduler.kv)
        # Plans, the sequences of their rows, and what came of them.
        self._landed: list[tuple[StepPlan, Column, StepResult, float]] = []
        self._is_first = self._is_stale = True
        self._due = clock()

    @property
    def patience(self) -> float | None:
        return max(0.0, self._due - self._clock()) if self._is_stale or self._landed else None

    def lands(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        self._landed.append((plan, self._scheduler.rows_in_flight().ids, result, seconds))

    def frame(self, *, is_stale: bool) -> Frame | None:
        self._is_stale |= is_stale or bool(self._landed)
        began = self._clock()
        if not self._is_stale or began < self._due:
            return None
        frame = self._make_frame(began)
        self._landed.clear()
        self._is_first = self._is_stale = False
        ended = self._clock()
        self._due = ended + max(INTERVAL, (ended - began) / MOST_TIME)
        return frame

    def _make_frame(self, now: float) -> Frame:
        scheduler = self._scheduler
        running, ids = scheduler.running(), np.full(scheduler.options.num_slots + 1, NOBODY)
        ids[[seq.slot for seq in running]] = [seq.id for seq in running]
        self._touch_passing()
        self._board.update(ids)
        return Frame(
            is_first=self._is_first,
            seconds=now,
            block_size=scheduler.kv.block_size,
            num_pages=scheduler.kv.pool.num_pages,
            max_num_tokens=scheduler.options.max_num_batched_tokens,
            num_running=len(running),
            num_waiting=scheduler.num_waiting,
            running=[_view(seq, scheduler.table) for seq in running[:MOST_SEQUENCES]],
            waiting=[_view(seq) for seq in scheduler.waiting(MOST_SEQUENCES)],
            steps=self._newest_steps(),
            pages=self._board.take_changes(),
        )

    def _touch_passing(self) -> None:
        """Pages of sequences that came and went since the last frame."""
        for plan, _, _, _ in self._landed:
            for admission in plan.admitted:
                self._board.touch(page for page in admission.pages if page)
            self._board.touch(plan.grown.pages.tolist())

    def _newest_steps(self) -> list[StepView]:
        steps: list[StepView] = []
        num_rows = 0
        for plan, ids, result, seconds in reversed(self._landed):
            num_rows += len(plan.rows)
            if num_rows > MOST_ROWS and steps:
                break
            rows: Flat = []
            views = zip(ids.tolist(), plan.rows, result.num_new, strict=True)
            for seq_id, row, num_new in islice(views, MOST_ROWS):
                rows += RowView(seq_id, row.num_query, row.num_draft, num_new)
            steps.append(StepView(plan.id, rows, len(plan.rows), round(seconds, 6)))
        return steps[::-1]


def _view(seq: Sequence, table: Table | None = None) -> SeqView:
    """table: of the slots, if it is in one."""
    return SeqView(
        seq.id,
        seq.request.id,
        seq.prompt_len,
        len(seq.tokens) if table is None else len(table.tokens(seq.slot)),
        0 if table is None else int(table.computed[seq.slot]),
        seq.num_cached_tokens,
        seq.limit,
    )


class _Board:
    """Who holds which page.  Tables are compared all at once; Python looks at what has changed."""

    def __init__(self, kv: KVManager) -> None:
        self._kv, self._pool = kv, kv.pool
        self._shown: Pages = kv.pages[:, :0]  # the tables as they were taken in, 0 where they end
        self._ids: Column = np.full(len(kv.pages), NOBODY)  # and whose
        self._owners: dict[int, dict[int, None]] = {}  # by page: sequence ids, as they came
        self._touched: set[int] = set()
        self._cached: set[int] = set()  # as shown

    def touch(self, pages: Iterable[int]) -> None:
        """These may have changed."""
        self._touched.update(pages)

    def update(self, ids: Column) -> None:
        """Take in the pages of all slots; ids: whose they are."""
        kv, num_shown = self._kv, int(self._shown.shape[1])
        num_blocks: Column = kv.capacity[:, None] // kv.block_size
        width = max(num_shown, int(num_blocks.max()))
        columns: Column = np.arange(width)
        now: Pages = kv.pages[:, :width] * (columns < num_blocks)[:, :, None]
        shown = np.pad(self._shown, ((0, 0), (0, width - num_shown), (0, 0)))
        changed = (now != shown) | (ids != self._ids)[:, None, None]
        slots = np.nonzero(changed)[0]
        for seq_id, page in zip(self._ids[slots].tolist(), shown[changed].tolist(), strict=True):
            self._leave(seq_id, page)
        for seq_id, page in zip(ids[slots].tolist(), now[changed].tolist(), strict=True):
            self._hold(seq_id, page)
        self._shown, self._ids = now[:, : int(num_blocks.max())], ids

    def _hold(self, seq_id: int, page: int) -> None:
        if page:
            self._touched.add(page)
            self._owners.setdefault(page, {})[seq_id] = None

    def _leave(self, seq_id: int, page: int) -> None:
        if page:
            self._touched.add(page)
            owners = self._owners[page]
            del owners[seq_id]
            if not owners:
                del self._owners[page]

    def take_changes(self) -> Flat:
        """PageViews of the touched pages, as they stand now."""
        changes = self._take_touched()
        if len(self._cached) != self._pool.num_cached:  # the beginning, or the cache was cleared
            self._touched = self._cached.union(self._pool.cached)
            changes += self._take_touched()
        return changes

    def _take_touched(self) -> Flat:
        changes: Flat = []
        for page in self._touched:
            owners = self._owners.get(page)
            if owners:
                self._cached.discard(page)
                changes += PageView(page, next(iter(owners)), len(owners), 0)
            else:
                changes += PageView(page, NOBODY, 0, self._note_cached(page))
        self._touched.clear()
        return changes

    def _note_cached(self, page: int) -> int:
        """1 if the page, which no sequence has, is cached; 0 if it is free or a connector's."""
        if self._pool.is_published[page] and not self._pool.refs[page]:
            self._cached.add(page)
            return 1
        self._cached.discard(page)
        return 0
