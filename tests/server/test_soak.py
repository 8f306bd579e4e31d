"""Hundreds of requests at once, of which many are left by their clients: nothing stays behind."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import httpx
import pytest

from tests.forked import Nursery
from tests.patience import PATIENCE
from tests.server.conftest import running


def make_body(rng: random.Random) -> dict[str, object]:
    return {
        "prompt": [rng.randrange(4000) for _ in range(rng.randrange(1, 150))],
        "max_tokens": rng.randrange(1, 25),
        "n": rng.choice([1, 1, 1, 2]),
        "stream": rng.random() < 0.7,
        "ignore_eos": True,
        "logprobs": rng.choice([None, None, 3]),
        "stop": rng.choice([None, "e"]),
    }


async def ask(client: httpx.AsyncClient, number: int) -> str:
    """Send one request, and perhaps not wait for its end; how it went."""
    rng = random.Random(number)
    body, leaves, patience = make_body(rng), rng.random() < 0.4, rng.randrange(1, 8)
    if not body["stream"]:
        try:
            reply = await client.post("/v1/completions", json=body, timeout=patience / 4 if leaves else None)
        except httpx.TimeoutException:
            return "left"
        return "whole" if reply.status_code == 200 and "error" not in reply.json() else reply.text
    async with client.stream("POST", "/v1/completions", json=body, timeout=None) as stream:
        lines: list[str] = []
        async for line in stream.aiter_lines():
            lines += [line] if line else []
            if leaves and len(lines) == patience:
                return "left"
    return "whole" if lines[-1] == "data: [DONE]" and '"error"' not in lines[-2] else lines[-2]


async def ask_all(url: str, num: int) -> Counter[str]:
    """How the requests went.  All of them may take long; that none of them ends for long is a fault."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, limits=limits) as client:
        tasks = [asyncio.create_task(ask(client, number)) for number in range(num)]
        pending = set(tasks)
        while pending:
            done, pending = await asyncio.wait(pending, timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
            assert done, f"{len(pending)} requests stand still"
        return Counter(task.result() for task in tasks)


@pytest.mark.slow
@pytest.mark.parametrize("num", [200, pytest.param(500, marks=pytest.mark.matrix)])
def test_hundreds_at_once_leave_nothing_behind(nursery: Nursery, num: int) -> None:
    with running("--check-invariants", forks=nursery) as server:
        ends = asyncio.run(ask_all(server.url, num))
        assert set(ends) == {"left", "whole"} and min(ends.values()) > num // 5, ends
        server.wait_until_idle()
        assert httpx.get(f"{server.url}/load", timeout=PATIENCE).json()["server_load"] == 0
        assert server.metric("vllm:request_success_total", finished_reason="error") == 0
