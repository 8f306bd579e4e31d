"""The one loop: take requests in, plan, submit, commit.

One thread calls `step`; any thread may `add` and `abort`.  `depth` is the only mode: 1 is plain, 2 overlaps
host and device, the number of pipeline stages fills a pipeline.  Knows nothing of text or devices.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

from pellucid.bell import Bell
from pellucid.config import NOT_SPECULATIVE, SpeculativeConfig
from pellucid.executor.base import Executor, HasFileno, Ticket, WorkersLost
from pellucid.interrupts import held_back
from pellucid.observe.statistics import EngineStats, StepClock, StepSizes
from pellucid.observe.trace import NullTrace, Trace
from pellucid.observe.xray import NullXRay, XRay
from pellucid.schedule.news import NOBODY_GOES_ON, Going
from pellucid.schedule.plan import StepPlan
from pellucid.schedule.scheduler import Scheduler
from pellucid.sleep.host import Rest
from pellucid.types import FinishReason, Request, SeqUpdate

logger = logging.getLogger(__name__)


class Preparing(NamedTuple):
    """A request that is not queued yet, and what it waits for, by feature."""

    request: Request
    futures: dict[str, Future[Any]]


class Engine:
    """Runs requests to their end; each one ends in exactly one SeqUpdate with a finish_reason.

    When a worker or the engine itself fails, `step` does not raise: it answers every request with an error,
    now and from then on, and `error` says what happened.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        depth: int,
        check_invariants: bool = False,
        speculative: SpeculativeConfig = NOT_SPECULATIVE,
    ) -> None:
        self.scheduler, self.executor, self.depth = scheduler, executor, depth
        self.error: str | None = None  # why the engine is dead
        self.is_lost = False  # and whether workers were killed, or say nothing
        self.xray: XRay = NullXRay()
        self.trace: Trace = NullTrace()
        self.rest = Rest(executor, scheduler)
        self._features = scheduler.features
        self._check_invariants, self._speculative = check_invariants, speculative
        self._inbox: deque[Callable[[], SeqUpdate | None]] = deque()
        self._inflight: deque[tuple[StepPlan, Ticket]] = deque()
        # What no step has returned yet, `_going` behind `_updates`.
        self._updates: list[SeqUpdate] = []
        self._going = NOBODY_GOES_ON
        self._is_whole = True  # else a step has begun what it must finish
        self._preparing: dict[str, Preparing] = {}  # by id
        self._bell = Bell()
        # For so many seconds it waits at most for what features have under way, and on these lines, too.
        self.patience, self.ears = 0.1, list[HasFileno]()
        self._clock = StepClock()
        self._sizes = StepSizes()
        self._found_nothing = False  # in the last step
        self._num_late_compilations = 0
        self._num_empty = 0  # such steps in a row, while something should have been ready
        executor.listen(self._hear)

    # Any thread

    def add(self, request: Request) -> None:
        """Hand in a request; its id is not in use."""
        self._post(lambda: self._alone(request.id, lambda: self._add(request)))

    def abort(self, request_id: str) -> None:
        """End a request early; nothing happens if it has ended by itself meanwhile."""
        self._post(lambda: self._abort(request_id))

    def call(self, action: Callable[[], None]) -> None:
        """Run something between two steps, in the engine's thread."""
        self._post(action)

    def clear_prefix_cache(self) -> None:
        """Forget all cached prefixes that no running request uses."""
        self.call(self.scheduler.clear_prefix_cache)

    def _post(self, message: Callable[[], SeqUpdate | None]) -> None:
        self._inbox.append(message)
        self._bell.ring()

    def _hear(self, rank: int, name: str, said: object) -> None:
        """A worker has said something out of turn."""
        self._post(lambda: self._end_all(self._features.hear(name, rank, said)))

    # The engine's thread

    def step(self) -> list[SeqUpdate]:
        """One turn of the loop: what changed for which request.  Does not raise when a worker fails.

        A Ctrl-C is held back until all is whole, and loses nothing: what has changed, the next step returns.
        """
        with held_back:
            self._turn()
            self._tell_one_by_one()
        updates, self._updates = self._updates, []
        return updates

    def turn(self) -> tuple[list[SeqUpdate], Going]:
        """The same, with arrays for those of which there is nothing to tell but tokens."""
        with held_back:
            self._turn()
        updates, self._updates = self._updates, []
        going, self._going = self._going, NOBODY_GOES_ON
        return updates, going

    def _turn(self) -> None:
        self._is_whole = False
        self._tell_one_by_one()  # of a turn that was interrupted
        try:
            self._drain_inbox()
            self._submit()
            self._collect()
            self.rest.turn(is_still=not self._inflight)
        except Exception as error:
            logger.exception("the engine has failed")
            self._die(error)
        except BaseException as error:
            if not self._is_whole:  # a second Ctrl-C; what is planned may never run, and is published
                self._die(error)
            raise

    def _tell(self, updates: Iterable[SeqUpdate]) -> None:
        """These are to be returned; who has ended leaves the features at once, for its id may come again."""
        for update in updates:
            self._updates.append(update)
            if update.finish_reason is not None:
                self._features.leave(update.request_id)

    def _tell_one_by_one(self) -> None:
        """What comes now is newer than what merely goes on."""
        self._updates += self._going.one_by_one()
        self._going = NOBODY_GOES_ON

    def _let_through(self) -> None:
        """Here the state is whole: a Ctrl-C that has come may interrupt."""
        self._is_whole = True
        held_back.let_through()
        self._is_whole = False

    def _drain_inbox(self) -> None:
        while self._inbox:
            update = self._inbox.popleft()()
            if update is not None:
                self._tell([update])
            self._let_through()
        self._end_all(self._features.poll())

    def _alone(self, request_id: str, take_in: Callable[[], SeqUpdate | None]) -> SeqUpdate | None:
        """Take in a request, of which nothing is left if that fails: no other has to do with it."""
        try:
            return take_in()
        except Exception as error:
            logger.exception("request %s has failed", request_id)
            self._preparing.pop(request_id, None)
            update = self.scheduler.abort(request_id) or SeqUpdate(request_id)
            update.finish_reason = FinishReason.ERROR
            update.error = f"the request cannot be taken in: {type(error).__name__}: {error}"
            return update

    def _add(self, request: Request) -> SeqUpdate | None:
        if self.error is not None:
            return SeqUpdate(request.id, finish_reason=FinishReason.ERROR, error=self.error)
        self.trace.arrives(request)
        futures = self._features.prepare(request)
        if not futures:
            return self.scheduler.add(request)
        self._preparing[request.id] = Preparing(request, futures)
        # A future keeps for good what it calls: not the request, nor, in a circle, itself.
        request_id = request.id
        for future in futures.values():
            if not future.done():
                future.add_done_callback(
                    lambda _: self._post(lambda: self._alone(request_id, lambda: self._queue(request_id)))
                )
        return self._queue(request_id)

    def _queue(self, request_id: str) -> SeqUpdate | None:
        """Queue a request if all is ready; answer it if something never will be."""
        preparing = self._preparing.get(request_id)
        if preparing is None:
            return None  # it has ended meanwhile
        done = {name: future for name, future in preparing.futures.items() if future.done()}
        errors = [f"its {name}: {error}" for name, future in done.items() if (error := error_of(future))]
        if not errors and len(done) < len(preparing.futures):
            return None
        del self._preparing[request_id]
        if errors:
            return SeqUpdate(request_id, finish_reason=FinishReason.ERROR, error=errors[0])
        return self.scheduler.add(preparing.request)

    def _abort(self, request_id: str) -> SeqUpdate | None:
        if self._preparing.pop(request_id, None) is not None:
            return SeqUpdate(request_id, finish_reason=FinishReason.ABORT)
        return self.scheduler.abort(request_id)

    def _end_all(self, ended: Mapping[str, str | None]) -> None:
        """A feature ends these requests: what the plan under way makes of them counts no more."""
        for request_id, error in ended.items():
            reason = FinishReason.STOP if error is None else FinishReason.ERROR
            update = self.scheduler.abort(request_id, reason)
            if update is not None:
                update.error = error
                self._tell([update])

    def _submit(self) -> None:
        """Fill the pipeline."""
        if not self._inflight:
            self._clock.resume()
        can_plan = self.error is None and not self.rest.is_on
        while can_plan and len(self._inflight) < self.depth and self._submit_next():
            can_plan = self.error is None

    def _submit_next(self) -> bool:
        """Plan a step and start its forward; False if nothing is ready."""
        plan = self.scheduler.next_plan()
        if plan is None:
            return False
        features, rows_of = self._features, self.scheduler.rows_asking
        if plan.asked:
            plan = features.ride(plan, rows_of)
        self._clock.starts()
        ticket = self.executor.submit(plan)  # the forward starts
        self._clock.submitted()
        if plan.is_open:
            ticket.provide(features.late(plan, rows_of))
        self._inflight.append((plan, ticket))
        if plan.asked:
            self._end_all(features.ended(plan))
        return True

    def _collect(self) -> None:
        """Commit the oldest plan in flight."""
        self._found_nothing = not self._inflight
        if self._found_nothing:
            if self.error is None:
                self.executor.check()  # nobody waits for a worker that could die meanwhile
            self._count_empty()
            self.trace.rests()
            if self._preparing or self._features.are_busy:
                lines = *self.executor.lines, *self.ears
                self._bell.wait(lines, self.patience, lambda: not self._inbox)
            return
        self._num_empty = 0
        plan, ticket = self._inflight[0]
        since = time.perf_counter()
        self._is_whole = True
        ticket.wait()
        self._is_whole = False
        until = time.perf_counter()
        result = ticket.result()
        self._inflight.popleft()
        seconds = self._clock.waited(since, until)
        self.scheduler.took(seconds)
        self._num_late_compilations = max(self._num_late_compilations, result.num_late_compilations)
        self._sizes.add(plan.num_tokens)
        self.xray.lands(plan, result, seconds)
        self.trace.lands(plan, result, seconds)
        news = self.scheduler.commit(plan, result)
        try:
            self._features.land(result.told, news, self.scheduler)
        finally:  # who has ended in this step is the scheduler's no more
            self._tell(news.updates)
            self._going = news.going
        if self._check_invariants:
            self.scheduler.check([plan for plan, _ in self._inflight])

    def _count_empty(self) -> None:
        """Time passes in empty steps, and then some sequence is ready; if none ever is, the loop spins."""
        runnable = self.scheduler.has_unfinished and not (self._features.are_busy or self.rest.is_on)
        self._num_empty = self._num_empty + 1 if runnable else 0
        assert self._num_empty <= self.scheduler.options.pp, (
            f"nothing is in flight and nothing can run, with {self.scheduler.num_running} sequences running "
            f"and {self.scheduler.num_waiting} waiting"
        )

    def _die(self, error: BaseException) -> None:
        """Answer every request with an error."""
        self.error = f"the engine has failed: {type(error).__name__}: {error}"
        self.is_lost = isinstance(error, WorkersLost)
        self._inflight.clear()
        self._tell_one_by_one()
        preparing = [
            SeqUpdate(request_id, finish_reason=FinishReason.ERROR, error=self.error)
            for request_id in self._preparing
        ]
        self._preparing.clear()
        self._tell(preparing + self.scheduler.fail_all(self.error))

    @property
    def has_work(self) -> bool:
        """Is there anything that further steps would bring forward?"""
        pending = bool(self._inbox or self._inflight or self._preparing or self._updates or self._going)
        pending = pending or self.rest.is_due or (self.scheduler.has_unfinished and not self.rest.is_on)
        return pending or (self.error is None and self._features.are_busy)

    @property
    def idle(self) -> bool:
        """Would a step do nothing until a request arrives or a feature hears something?"""
        if self._inbox or self._inflight or self._updates or self._going:
            return False
        waits = self._features.are_busy or bool(self._preparing)
        return not self.has_work or (self._found_nothing and waits)

    def stats(self) -> EngineStats:
        scheduler, counters, clock = self.scheduler, self.scheduler.counters, self._clock
        return EngineStats(
            num_steps=clock.num_steps,
            num_step_tokens=self._sizes.num_tokens,
            num_steps_by_tokens=tuple(self._sizes.counts),
            num_prompt_tokens=counters.num_prompt_tokens,
            num_cached_tokens=counters.num_cached_tokens,
            num_sampled_tokens=counters.num_sampled_tokens,
            num_preemptions=counters.num_preemptions,
            num_drafts=counters.num_drafts,
            num_draft_tokens=counters.num_draft_tokens,
            num_accepted_tokens=counters.num_accepted_tokens,
            num_accepted_per_position=tuple(counters.num_accepted_per_position),
            host_seconds=clock.host_seconds,
            wait_seconds=clock.wait_seconds,
            num_late_compilations=self._num_late_compilations,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + len(self._preparing),
            kv_usage=scheduler.kv.usage,
            is_synthetic=self._speculative.is_synthetic,
            proposer=self._speculative.method,
            num_verifying_steps=counters.num_verifying_steps,
            draft_seconds_saved=scheduler.wants.switch.saved,
            sleep=self.rest.state,
            of_features=self._features.counters(),
        )

    def stats_per_engine(self) -> list[EngineStats]:
        return [self.stats()]

    def shutdown(self) -> None:
        """Stop the workers.  Requests under way get no answer any more: finish or abort them before."""
        self.trace.rests()
        self._features.shutdown()
        self.executor.shutdown()


def error_of(future: Future[Any]) -> BaseException | str | None:
    """Why what a request waits for will never be."""
    return "it was cancelled" if future.cancelled() else future.exception()
