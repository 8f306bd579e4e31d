"""Requests made from the server's own description: whatever they hold, none is answered with a 500."""

from __future__ import annotations

import warnings

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case

from tests.server.conftest import Running

ROUTES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
    "/v1/models/{name}",
)
MOST_ROUNDS = 8  # until chance has made a request that is answered


def make_sensible(case: Case) -> Case:
    """Get past the first checks, and be short."""
    body = case.body
    if isinstance(body, dict):
        body["model"] = "sprout"
        for name in ("max_tokens", "max_completion_tokens"):
            if body.get(name) is None or (isinstance(body[name], int | float) and body[name] > 3):
                body[name] = 3
        for name in ("n", "best_of"):
            if isinstance(body.get(name), int | float) and body[name] > 2:
                body[name] = 2
        body.pop("min_tokens", None)
        for message in body.get("messages") or ():
            if isinstance(message, dict):
                message.setdefault("role", "user")
                message.setdefault("content", "Hi")
    return case


@pytest.mark.parametrize("path", ROUTES)
def test_no_request_is_answered_with_a_500(server: Running, path: str) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        operations = [found.ok() for found in schema.get_all_operations()]
    (operation,) = [found for found in operations if found.path == path]
    statuses: set[int] = set()

    @given(case=operation.as_strategy())
    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    def ask(case: Case) -> None:
        reply = make_sensible(case).call(timeout=60)
        statuses.add(reply.status_code)
        assert reply.status_code < 500 and '"code":500' not in reply.text, reply.text

    for _ in range(MOST_ROUNDS):
        ask()
        if 200 in statuses or path == "/v1/models/{name}":
            break
    else:
        pytest.fail(f"nothing got through: {statuses}")
    server.wait_until_idle()
