"""What a grammar's rows have drafted is verified once the host has seen it, where the text may end."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from pellucid.features.grammar.host import Drafts, Grammars, Language, Text
from pellucid.sample.grammars.base import GrammarRef
from pellucid.sampling_params import SamplingParams
from pellucid.schedule.scheduler import Scheduler
from pellucid.types import Request
from tests.sample.grammars.engine import grammars_of
from tests.schedule.device import Device, make_request, make_scheduler, step

SHOWN = [7, 8]


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    grammars = grammars_of(64)
    yield grammars
    grammars.shutdown()


def begin(scheduler: Scheduler, grammars: Grammars, request: Request) -> None:
    """It is queued, and its language is there."""
    done: Future[None] = Future()
    done.set_result(None)
    language = Language(GrammarRef(address="x", digest="d"), grammars._memory)
    grammars._texts[request.id] = Text(language, ("x", "d"), len(request.prompt_token_ids), None, done)
    scheduler.add(request)


@pytest.mark.parametrize(
    "eos,min_tokens,num_draft",
    [((99,), 0, 2), ((), 0, 0), ((99,), 3, 0)],
    ids=["it may end", "nothing ends it", "not yet"],
)
def test_drafts_are_verified_where_the_text_may_end(
    grammars: Grammars, eos: tuple[int, ...], min_tokens: int, num_draft: int
) -> None:
    scheduler, device = make_scheduler(num_spec=3, features={"grammar": grammars}), Device()
    sampling = SamplingParams(min_tokens=min_tokens, max_tokens=20)
    begin(scheduler, grammars, make_request("a", 4, grammar="json", eos=eos, sampling=sampling))
    plan = scheduler.next_plan()
    assert plan and plan.is_open
    news = scheduler.commit(plan, device.run(plan))
    grammars.land(Drafts({0: SHOWN}), news, scheduler)
    second, _ = step(scheduler, device)
    assert second.rows[0].num_draft == num_draft
    (row,) = scheduler.rows_asking(second, scheduler.features.bits["grammar"])
    assert grammars._drafts(row) == SHOWN[:num_draft], "and these are read"
    third, _ = step(scheduler, device)
    assert third.rows[0].num_draft == 0, "this time none have been seen"


def test_drafts_of_who_has_left_are_forgotten(grammars: Grammars) -> None:
    scheduler, device = make_scheduler(num_spec=3, features={"grammar": grammars}), Device()
    begin(scheduler, grammars, make_request("a", 4, grammar="json", eos=(99,), max_tokens=1))
    plan = scheduler.next_plan()
    assert plan
    news = scheduler.commit(plan, device.run(plan))
    grammars.land(Drafts({0: SHOWN}), news, scheduler)
    grammars.leave("a")
    assert not grammars._texts and not scheduler.has_unfinished
