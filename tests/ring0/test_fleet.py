"""Several engines behind the real router, which may die at any step: each request has its one answer."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from pellucid.router.router import Router
from pellucid.types import FinishReason, Request, SeqUpdate
from tests.ring0.model import Truth
from tests.ring0.simulate import MAX_STEPS, Answer, Config, Simulation, random_config, random_requests


class Fleet:
    """Engines with ways of their own to run the same requests."""

    def __init__(
        self, configs: list[Config], requests: list[tuple[Request, Truth]], rng: random.Random
    ) -> None:
        self.requests, self.rng, self.num_moved = requests, rng, 0
        self.members = [Simulation(config, requests, rng) for config in configs]
        self.router = Router(len(configs), block_size=4, num_blocks=rng.choice([0, 40]))
        self.answers = {request.id: Answer() for request, _ in requests}

    def run(self) -> None:
        pending = [request for request, _ in reversed(self.requests)]
        for _ in range(3 * MAX_STEPS):
            if pending and self.rng.random() < 0.5:
                self.add(pending.pop())
            index = self.rng.randrange(len(self.members))
            self.step(index, self.members[index])
            if not pending and all(answer.end for answer in self.answers.values()):
                return
        raise AssertionError("livelock")

    def add(self, request: Request) -> None:
        if (index := self.router.choose(request)) is None:
            self.tell([failed(request.id)])
        else:
            self.members[index].engine.add(request)

    def step(self, index: int, member: Simulation) -> None:
        engine = member.engine
        if index not in self.router._open:
            return
        member.toy.finish_some()
        member.prefill_budget.most = 10**9
        member.connector.tick(member.executor.hear)
        updates = engine.step()
        for update in updates:
            if engine.error is not None and update.error == engine.error:
                update.error = update.finish_reason = None
        self.tell(self.router.note(index, updates))
        if engine.error is not None:
            for name in self.router.close(index):
                move = self.router.go_on(name, is_suspect=False)
                if move is None:
                    self.tell(self.router.note(index, [failed(name)]))
                else:
                    self.num_moved += 1
                    self.members[move.target].engine.add(move.request)

    def tell(self, updates: Iterable[SeqUpdate]) -> None:
        for update in updates:
            self.answers[update.request_id].add(update)

    def check(self) -> None:
        for request, truth in self.requests:
            answer, expected = self.answers[request.id], truth.tokens[len(request.prompt_token_ids) :]
            assert answer.end is not None
            is_whole = answer.end.finish_reason is not FinishReason.ERROR
            assert answer.tokens == (expected if is_whole else expected[: len(answer.tokens)])
            if request.sampling.logprobs is not None:
                assert answer.logprobs == truth.logprobs[: len(answer.tokens)]
            if request.sampling.prompt_logprobs is not None and answer.tokens:
                assert answer.prompt_logprobs == truth.prompt_logprobs
            if request.sampling.extra_args:
                assert answer.toys == [7 * token + request.seed for token in answer.tokens]


def failed(request_id: str) -> SeqUpdate:
    return SeqUpdate(request_id, finish_reason=FinishReason.ERROR, error="nobody is left")


@pytest.mark.parametrize("seed", range(60))
def test_a_request_whose_engine_dies_goes_on_at_another(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL + 1)
    rng = random.Random(seed)
    first = random_config(rng)
    windows, configs = first.worker.windows, list[Config]()
    for _ in range(3):
        config = random_config(rng)
        death = None if not configs else (rng.choice(["submit", "result"]), rng.randrange(40))
        worker = replace(config.worker, windows=windows, death=death, num_pages=400)
        configs.append(replace(config, worker=worker, policy="fcfs"))
    fleet = Fleet(configs, random_requests(rng, windows=windows), rng)
    fleet.run()
    fleet.check()
    refused = [r.id for r, t in fleet.requests if len(r.prompt_token_ids) >= 48]
    ends = {name: answer.end.finish_reason for name, answer in fleet.answers.items() if answer.end}
    errors = [name for name, reason in ends.items() if reason is FinishReason.ERROR]
    assert sorted(errors) == sorted(refused), "one engine never dies"
